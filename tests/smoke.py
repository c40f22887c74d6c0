"""One small problem for each extra, with nothing else installed: ``python tests/smoke.py EXTRA``.

It imports the gemproj that is installed, not that of the checkout, and none of the packages that tests need.
"""

import importlib
import os
import sys
import tempfile
import time


def core():
    import numpy as np

    start = time.perf_counter()
    import gemproj

    seconds = time.perf_counter() - start
    x = gemproj.project(np.array([[1.0, 0.0]]), np.array([-3.0, 1.0]))
    assert x.tolist() == [0.0, 1.0]
    assert "torch" not in sys.modules
    print(f"import of gemproj after numpy: {1000 * seconds:.0f} ms")


def fast():
    import numpy as np

    from gemproj import _problem, backends, project

    G, g = np.eye(2, 3), np.array([-1.0, 2.0, 3.0])
    assert backends.select(_problem.check_problem(G, g)).name == "numba"
    assert project(G, g).tolist() == [0.0, 2.0, 3.0]


def qp():
    import numpy as np

    from gemproj import project

    rng = np.random.default_rng(0)
    G, g = rng.standard_normal((5, 9)), rng.standard_normal(9)
    for method in ("quadprog", "osqp"):
        assert np.allclose(project(G, g, method=method), project(G, g), atol=1e-5), method


def torchjd():
    import torch

    from gemproj.integrations.torchjd import ConeProjector

    J = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    U = torch.eye(2)
    W = ConeProjector()(U, J @ J.T)
    assert (W >= U).all()
    assert (W @ J @ J.T >= -1e-6).all()


def two_tasks():
    """Return a model, its loss, and two tasks that contradict each other."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    tasks = [DataLoader(TensorDataset(x, labels), batch_size=8) for labels in (y, (y + 1) % 3)]
    return torch.nn.Linear(4, 3), loss, tasks


def loss(model, batch):
    from torch.nn.functional import cross_entropy

    return cross_entropy(model(batch[0]), batch[1])


def check(gem):
    """Check that steps would have broken the promise about the first task, and that the last did not."""
    assert gem.report()[0].would_break, gem.report()
    assert gem.last.worst_cosine > -1e-4, gem.last  # what rounding float32 parameters leaves


def train(gem, model, optimizer, loss, tasks, backward=None):
    for loader in tasks:
        for batch in loader:
            optimizer.zero_grad()
            found = loss(model, batch)
            found.backward() if backward is None else backward(found)
            optimizer.step()
        gem.end_task(loader)
    check(gem)


def torch():
    from torch.optim import Adam

    from gemproj.torch import GEM

    model, loss, tasks = two_tasks()
    optimizer = Adam(model.parameters(), lr=0.05)
    train(GEM(model, optimizer, loss, on="both"), model, optimizer, loss, tasks)


def accelerate():
    from accelerate import Accelerator
    from torch.optim import Adam

    from gemproj.integrations.accelerate import GEM

    model, loss, tasks = two_tasks()
    accelerator = Accelerator(cpu=True)
    model, optimizer, *tasks = accelerator.prepare(model, Adam(model.parameters(), lr=0.05), *tasks)
    gem = GEM(accelerator, model, optimizer, loss, on="both")
    train(gem, model, optimizer, loss, tasks, accelerator.backward)


def transformers():
    from torch import manual_seed
    from transformers import GPT2Config, GPT2ForSequenceClassification, Trainer, TrainingArguments

    from gemproj.integrations.transformers import GEMCallback

    manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 4}
    model = GPT2ForSequenceClassification(GPT2Config(**sizes, num_labels=3, pad_token_id=0))
    gem = GEMCallback(on="both")
    options = {"learning_rate": 0.05, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    for k in range(2):
        data = [{"input_ids": [1 + i % 8] * 3, "labels": (i + k) % 3} for i in range(24)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(folder, max_steps=8, **options)
            trainer = Trainer(model, arguments, train_dataset=data, callbacks=[gem])
            trainer.train()
        gem.end_task(trainer.get_train_dataloader())
    check(gem)


def lightning():
    import lightning.pytorch as pl
    from torch.optim import Adam

    from gemproj.integrations.lightning import GEMCallback

    net, loss, tasks = two_tasks()

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            return loss(self.net, batch)

        def configure_optimizers(self):
            return Adam(self.parameters(), lr=0.05)

    model, gem = Module(), GEMCallback(lambda module, batch: loss(module.net, batch), on="both")
    for loader in tasks:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        pl.Trainer(max_epochs=1, callbacks=[gem], accelerator="cpu", **quiet).fit(model, loader)
        gem.end_task(loader)
    check(gem)


def avalanche():
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.training.supervised import Naive
    from torch.nn import CrossEntropyLoss
    from torch.optim import SGD

    from gemproj.integrations.avalanche import GEMPlugin

    model, _, tasks = two_tasks()
    both = [tuple(loader.dataset.tensors) for loader in tasks]
    benchmark, plugin = tensors_benchmark(both, both, task_labels=[0, 0]), GEMPlugin(24)
    optimizer, options = SGD(model.parameters(), lr=0.5), {"train_mb_size": 8, "evaluator": None}
    options |= {"model": model, "optimizer": optimizer, "criterion": CrossEntropyLoss()}
    strategy = Naive(plugins=[plugin], **options)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    check(plugin)


def deepspeed():
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29611", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from torch.optim import Adam

    import gemproj.integrations.deepspeed  # noqa: F401
    from gemproj.torch import GEM

    # DeepSpeed would compile an operator of its own for processes of one machine.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    model, loss, tasks = two_tasks()
    config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1}}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=model, optimizer=Adam(model.parameters(), lr=0.05), config=config)
    gem = GEM(engine.module, engine.optimizer, loss, on="step")
    for loader in tasks:
        for batch in [*loader] * 10:
            engine.backward(loss(engine, batch))
            engine.step()
        gem.end_task(loader)
    check(gem)


if __name__ == "__main__":
    # The name of this folder's files must not hide packages.
    sys.path.pop(0)
    globals()[sys.argv[1]]()
    print(f"{sys.argv[1]}: right", flush=True)
    os._exit(0)  # threads of DeepSpeed would abort a process that ends in the usual way
