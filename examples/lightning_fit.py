"""PyTorch Lightning, without and with a keeper: ``python -m examples.lightning_fit``."""

import logging
import warnings

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from gemproj.integrations.lightning import KeeperCallback
from gemproj.torch import Promise

from .common.toy import TASKS, Batch, accuracies, compare, draw, loss, network


class Classifier(pl.LightningModule):
    """The network. `loss` does not log, because it is also called with kept examples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss on a batch of inputs and labels."""
        return loss(self.net, batch)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the loss of a training step."""
        return self.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer; ``on="both"``, the default, projects the steps of any optimizer."""
        return torch.optim.Adam(self.parameters(), lr=5e-3)


def learn(kept: bool, epochs: int = 4) -> list[float]:
    """Learn one task after the other; return the accuracy on each of them at the end."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # such as its advice on worker processes
    model = Classifier()
    keeper = KeeperCallback(promise=Promise(Classifier.loss, examples=None)) if kept else None
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"accelerator": "cpu", "callbacks": [keeper] if keeper else [], **dict.fromkeys(quiet, False)}
    for task in range(TASKS):
        loader = DataLoader(TensorDataset(*draw(task, 1024, seed=0)), batch_size=32, shuffle=True)
        pl.Trainer(max_epochs=epochs, **options).fit(model, loader)
        if keeper:
            keeper.keep(loader, limit=100)
    return accuracies(model.net)


if __name__ == "__main__":
    compare(learn)
