"""Five tasks one after the other with PyTorch Lightning, with and without a keeper.

``python examples/lightning_fit.py`` takes a few seconds on a CPU and needs no data. Each task has its own
clusters of points, which one network with one head classifies.
"""

import logging
import warnings

import lightning.pytorch as pl
import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from gemproj.integrations.lightning import KeeperCallback
from gemproj.torch import Promise

FEATURES, CLASSES, EPOCHS = 16, 4, 4


class Classifier(pl.LightningModule):
    """A small network. `loss` does not log, because it is also called with kept examples."""

    def __init__(self) -> None:
        super().__init__()
        layers = torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
        self.net = torch.nn.Sequential(*layers)

    def loss(self, batch):
        """Return the mean loss on a batch of inputs and labels."""
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        """Return the loss of a training step."""
        return self.loss(batch)

    def configure_optimizers(self):
        """Return the optimizer; ``on="both"`` projects the steps of any optimizer."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)

    @torch.no_grad()
    def accuracy(self, data: TensorDataset) -> float:
        """Return the share of right answers."""
        return float((self.net(data.tensors[0]).argmax(1) == data.tensors[1]).float().mean())


def make_task(seed: int, examples: int) -> tuple[TensorDataset, TensorDataset]:
    """Return the training examples and the test examples of a task."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=random)
    y = torch.randint(CLASSES, (2 * examples,), generator=random)
    x = centres[y] + 0.7 * torch.randn(len(y), FEATURES, generator=random)
    return TensorDataset(x[:examples], y[:examples]), TensorDataset(x[examples:], y[examples:])


def learn(tasks: list[tuple[TensorDataset, TensorDataset]], keeper: KeeperCallback | None) -> list[float]:
    """Learn the tasks in turn; return the accuracy on each of them at the end."""
    torch.manual_seed(0)
    model = Classifier()
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "callbacks": [keeper] if keeper else [], **dict.fromkeys(quiet, False)}
    for train, _ in tasks:
        loader = DataLoader(train, batch_size=32, shuffle=True)
        trainer = pl.Trainer(max_epochs=EPOCHS, **options)
        trainer.fit(model, loader)
        if keeper:
            keeper.keep(loader, limit=40)
    return [model.accuracy(test) for _, test in tasks]


def main(count: int = 5, examples: int = 1024) -> None:
    """Print the accuracy on each task at the end, without and with a keeper."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # such as its advice on worker processes
    tasks = [make_task(seed, examples) for seed in range(count)]
    table = Table("Method", *(f"Task {k + 1}" for k in range(len(tasks))), "Average", title="Accuracy (%)")
    for name, callback in (
        ("Fine-tuning", None),
        ("Kept", KeeperCallback(promise=Promise(Classifier.loss, examples=None))),
    ):
        print(f"{name}: {len(tasks)} tasks of {EPOCHS} epochs ...", flush=True)
        found = learn(tasks, callback)
        table.add_row(name, *(f"{100 * one:.0f}" for one in (*found, sum(found) / len(found))))
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    main()
