"""What is special to Lightning: its precision plugins, the stages of its trainer, its strategies.

What holds in every framework is in test_frameworks.py.
"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning", reason="needs the extra lightning")

import lightning.pytorch as pl  # noqa: E402
from frameworks import WINDOW, Lightning, LightningByHand, batches  # noqa: E402
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: E402
from lightning.pytorch.plugins import Precision  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy  # noqa: E402
from models import EACH, SAID, assert_same_weights, gradient, loss, perceptron, sgd  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import gemproj.integrations.lightning  # noqa: E402, F401
from gemproj.torch import GEM, GradientProjector  # noqa: E402


@pytest.mark.parametrize("promised", [loss, SAID])
def test_batches_are_converted_as_for_training(promised, tmp_path):
    driver = Lightning(tmp_path, promised)
    for k in range(2):
        driver.train(batches(k, dtype=torch.float32), precision="64-true")
        driver.end_task(batches(k, dtype=torch.float32))
    kept = next(leaf for leaf in tree_leaves(driver.object.memory.batch(0)) if leaf.ndim == 2)
    assert kept.dtype == torch.float32
    assert driver.object.projector.constraints.dtype == torch.float64


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
def test_batches_are_changed_by_the_module_as_for_training(hook, tmp_path):
    def doubled(module, batch, i):
        batch["x"].mul_(2)  # in place, as some are
        return batch

    driver = Lightning(tmp_path, SAID, tolerance=0.0)
    setattr(type(driver.module), hook, doubled)
    driver.object.keep(batches(0), name="a", model=driver.module)
    stored = driver.object.memory.batch("a")
    expected = SAID.outputs(driver.module, {"x": 2 * stored.batch["x"]})
    torch.testing.assert_close(stored.outputs, expected)
    assert float(stored.losses.abs().max()) < 1e-6  # of the same batch, changed once
    driver.train(batches(1)[:WINDOW])
    assert float(driver.object.last.losses.abs().max()) < 1e-6


def test_what_a_data_module_changes_has_to_be_known(tmp_path):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(batches(1), batch_size=None)

        def on_after_batch_transfer(self, batch, i):
            return batch

    driver = Lightning(tmp_path, SAID, tolerance=0.0)
    driver.object.keep(batches(0), name="a", model=driver.module)
    with pytest.raises(ValueError, match="without the hook on_after_batch_transfer"):
        driver.trainer().fit(driver.module, datamodule=Data())


def test_hooks_that_a_teacher_lacks_or_that_need_a_trainer_are_told(tmp_path):
    driver = Lightning(tmp_path, SAID, tolerance=0.0)
    kind = type(driver.module)
    kind.on_after_batch_transfer = lambda module, batch, i: module.trainer.training and batch
    with pytest.raises(ValueError, match="on_after_batch_transfer needs a trainer: call keep after"):
        driver.object.keep(batches(0), name="a", model=driver.module)
    driver.object.keep(batches(0), name="a", model=driver.model)
    with pytest.raises(ValueError, match="without the hook on_after_batch_transfer"):
        driver.train(batches(1))


def test_the_trainer_is_of_the_same_package(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    with pytest.raises(TypeError, match=r"import lightning\.pytorch as pl"):
        Lightning(tmp_path).object.setup(trainer, None, "fit")


def test_clipping_is_of_the_optimizer_that_is_attached_to():
    class Lookahead(torch.optim.SGD):
        """Has another optimizer in it."""

    model = perceptron()
    optimizer = Lookahead(model.parameters(), lr=1.0)
    optimizer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    GEM(model, optimizer, loss)
    loss(model, batches(0)[0]).backward()
    before = gradient(model)
    for given in (optimizer, LightningOptimizer(optimizer)):
        Precision().clip_grad_by_norm(given, 1e-3)  # in the step
        assert torch.equal(gradient(model), before)
    optimizer.step()
    assert gradient(model).norm() < 1.1e-3


def test_after_training_batches_go_where_the_module_is(monkeypatch, tmp_path):
    """When `fit` ends, Lightning moves the module to the CPU, but not its own idea of the device."""
    driver = Lightning(tmp_path, EACH, tolerance=0.0)
    driver.train(batches(0))
    monkeypatch.setattr(type(driver.now.strategy), "root_device", torch.device("meta"))
    driver.end_task(batches(0))
    assert driver.object.memory.batch(0).losses.device.type == "cpu"


def test_a_checkpoint_that_is_evaluated_leaves_the_memory_alone(tmp_path):
    driver = Lightning(tmp_path)
    gem, checkpoint = driver.object, tmp_path / "last.ckpt"
    driver.train(batches(0), save=True)
    before = gem.state_dict()
    driver.end_task(batches(0))
    driver.now.test(driver.module, DataLoader(batches(0), batch_size=None), ckpt_path=checkpoint)
    assert gem.memory.tasks == [0]
    gem.load_state_dict(before)  # by hand, which is no evaluation
    assert gem.memory.tasks == []
    driver.end_task(batches(0))
    driver.train(batches(1), resume=True)
    assert gem.memory.tasks == []


def test_a_checkpoint_has_no_rows_of_shards(monkeypatch, tmp_path):
    driver = Lightning(tmp_path, every=3)
    driver.object.memory.add(batches(0)[0], 0)
    driver.train(batches(1))
    assert driver.object.state_dict()["projector"]["constraints"] is not None
    # Lightning would give those of process 0 to all processes, which have other columns.
    monkeypatch.setattr(GradientProjector, "sharded", True)
    assert driver.object.state_dict()["projector"]["constraints"] is None


def test_what_it_cannot_do_is_refused(tmp_path):
    driver = LightningByHand(tmp_path)
    parts = driver.model.net[0], driver.model.net[2]
    driver.module.configure_optimizers = lambda: [sgd(part.parameters()) for part in parts]
    with pytest.raises(ValueError, match=r"one optimizer; found 2.*GEM\(self, \[opt.optimizer for opt in"):
        driver.train(batches(0))
    for strategy in (DeepSpeedStrategy, FSDPStrategy):
        running = SimpleNamespace(strategy=object.__new__(strategy))
        with pytest.raises(ValueError, match=f"cannot work with {strategy.__name__}"):
            driver.object.on_train_start(running, driver.module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_fabric_trains_as_a_plain_loop(precision):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)

    def train(fabric, mixed):
        model = perceptron(torch.float32)
        optimizer, backward = sgd(model.parameters()), torch.Tensor.backward
        if fabric is not None:
            model, optimizer = fabric.setup(model, optimizer)
            backward = fabric.backward

        def of_training(model, batch):
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                return loss(model, batch)

        gem = GEM(model, optimizer, of_training, on="both", weight=0.5)
        for k in range(2):
            for batch in batches(k, dtype=torch.float32):
                optimizer.zero_grad()
                backward(of_training(model, batch))
                optimizer.step()
            gem.end_task(batches(k, dtype=torch.float32))
        return model, gem

    (model, gem), (plain, _) = (train(one, precision == "bf16-mixed") for one in (fabric, None))
    assert gem.last.constraints == 1
    assert_same_weights(model, plain)
