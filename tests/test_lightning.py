"""What is special to Lightning: hooks for batches, its clipping and logs, the stages of its trainer, strategies.

What holds in every framework is in test_frameworks.py.
"""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("lightning", reason="needs the extra lightning")

import lightning.pytorch as pl
from frameworks import WINDOW, Lightning, LightningByHand, Net, batches
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from loops import assert_same_weights, sgd
from models import EACH, SAID, loss, perceptron
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from gemproj.torch import Keeper, Promise

HELD = Promise(SAID, tolerance=0.0)


@pytest.mark.parametrize("promised", [loss, SAID])
def test_batches_are_converted_as_for_training(promised, tmp_path):
    driver = Lightning(tmp_path, Promise(promised))
    for k in range(2):
        driver.train(batches(k, dtype=torch.float32), precision="64-true")
        driver.keep(batches(k, dtype=torch.float32))
    kept = next(leaf for leaf in tree_leaves(driver.keeper.sets[0].examples[0]) if leaf.ndim == 1)
    assert kept.dtype == torch.float32
    assert driver.keeper.rows.G.dtype == torch.float64


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer"])
@pytest.mark.parametrize("of", ["module", "data module"])
def test_batches_are_changed_by_hooks_as_for_training(of, hook, tmp_path):
    def doubled(module, batch, i):
        batch["x"].mul_(2)  # in place, as some are
        return batch

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(batches(1)[:WINDOW], batch_size=None)

    driver = Lightning(tmp_path, HELD)
    owner = Data() if of == "data module" else driver.module
    setattr(type(owner), hook, doubled)
    driver.keep(batches(0), name="a")
    before = Net()  # of the same weights
    if of == "module":
        driver.train(batches(1)[:WINDOW])
    else:
        driver.trainer().fit(driver.module, datamodule=owner)
    kept = driver.keeper.sets["a"]
    batch, outputs = kept.fetch(list(range(len(kept))), None)
    torch.testing.assert_close(outputs, SAID.outputs(before, {"x": 2 * batch["x"]}))
    assert float(kept.losses.abs().max()) < 1e-6
    assert float(driver.keeper.last.losses.abs().max()) < 1e-6  # of the same batch, changed once


def test_batches_that_are_kept_are_not_augmented(tmp_path):
    seen = []

    def augmented(module, batch, i):
        seen.append(module.trainer.training)
        return batch | {"x": torch.randn_like(batch["x"])} if module.trainer.training else batch

    driver = Lightning(tmp_path, HELD)
    type(driver.module).on_after_batch_transfer = augmented
    driver.keep(batches(0), name="a")
    driver.train(batches(1)[:WINDOW])
    assert float(driver.keeper.last.losses.abs().max()) < 1e-6
    assert seen.count(True) == WINDOW


def test_a_trial_of_rates_leaves_what_waits(tmp_path):
    """A finder saves the state of callbacks before a trial, and loads it after it."""
    driver = Lightning(tmp_path, HELD)
    driver.keep(batches(0), name="a")
    trainer = driver.trainer(max_steps=4, default_root_dir=tmp_path)
    loader = DataLoader(batches(1), batch_size=None)
    pl.tuner.Tuner(trainer).lr_find(
        driver.module, loader, num_training=3, attr_name="rate", update_attr=False
    )
    trainer.fit(driver.module, loader)
    assert driver.keeper.report()["a"].steps > 0


def test_the_trainer_is_of_the_same_package(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    trainer = other.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    with pytest.raises(TypeError, match=r"import lightning\.pytorch as pl"):
        Lightning(tmp_path).keeper.setup(trainer, None, "fit")


def test_a_fused_optimizer_in_float16_is_projected(tmp_path):
    """It would divide by the loss scale in its step, so Lightning cannot clip its gradient."""
    driver = Lightning(tmp_path, Promise(weight=1e6), precision="fp16")
    driver.keep(batches(0, dtype=torch.float32)[:1])
    driver.module.configure_optimizers = lambda: torch.optim.AdamW(driver.model.parameters(), fused=True)
    driver.train(batches(1, dtype=torch.float32), gradient_clip_val=None)
    assert driver.keeper._steps == []
    assert driver.keeper.report()[0].steps == 3


def test_statistics_are_logged_as_often_as_lightning_logs(tmp_path):
    driver = Lightning(tmp_path)
    driver.keep(batches(0))
    for every, expected in ((1, 4), (2, 2)):
        logger = CSVLogger(tmp_path, version=every)
        driver.train(batches(1, 8), logger=logger, log_every_n_steps=every)
        rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
        assert sum(bool(row["keep/violations"]) for row in rows) == expected
    assert driver.keeper.history.means() == {}
    assert driver.keeper.report()[0].steps == 8


def test_after_training_batches_go_where_the_module_is(monkeypatch, tmp_path):
    """When `fit` ends, Lightning moves the module to the CPU, but not its own idea of the device."""
    driver = Lightning(tmp_path, Promise(EACH, tolerance=0.0))
    driver.train(batches(0))
    monkeypatch.setattr(type(driver.now.strategy), "root_device", torch.device("meta"))
    driver.keep(batches(0))
    assert driver.keeper.sets[0].losses.device.type == "cpu"


def test_losses_of_kept_examples_are_not_logged(tmp_path):
    """After training, Lightning could not log them."""

    def logging(model, batch):
        driver.module.log("of a module", 1.0)
        return EACH(model, batch)

    driver = Lightning(tmp_path, logging)
    driver.module.log = driver.module.log  # it may have one of its own
    own = driver.module.log
    driver.train(batches(0))
    driver.keep(batches(0))
    driver.train(batches(1))
    assert driver.keeper.report()[0].steps == 3
    assert "of a module" not in driver.now.logged_metrics
    assert driver.module.log is own


@pytest.mark.filterwarnings("ignore::FutureWarning")  # inside of Lightning
def test_a_checkpoint_that_is_evaluated_leaves_the_sets_alone(tmp_path):
    driver = Lightning(tmp_path)
    keeper, checkpoint = driver.keeper, tmp_path / "last.ckpt"
    driver.train(batches(0), save=True)
    before = keeper.state_dict()
    driver.keep(batches(0))
    driver.now.test(driver.module, DataLoader(batches(0), batch_size=None), ckpt_path=checkpoint)
    assert list(keeper.sets) == [0]
    with pytest.warns(UserWarning, match="no examples of 0, which are dropped"):
        keeper.load_state_dict(before)  # by hand, which is no evaluation
    assert list(keeper.sets) == []
    driver.keep(batches(0))
    with pytest.warns(UserWarning, match="no examples of 0"):
        driver.train(batches(1), resume=True)
    assert list(keeper.sets) == []


def test_what_it_cannot_do_is_refused(tmp_path):
    driver = LightningByHand(tmp_path)
    parts = driver.model.net[0], driver.model.net[2]
    driver.module.configure_optimizers = lambda: [sgd(part.parameters()) for part in parts]
    with pytest.raises(ValueError, match=r"one optimizer; found 2.*Keeper\(self, \[opt.optimizer for opt in"):
        driver.train(batches(0))
    for strategy in (DeepSpeedStrategy, FSDPStrategy):
        running = SimpleNamespace(strategy=object.__new__(strategy))
        with pytest.raises(ValueError, match=f"cannot work with {strategy.__name__}"):
            driver.keeper.on_train_start(running, driver.module)
    forks = SimpleNamespace(launcher=_MultiProcessingLauncher(None, "fork"))
    with pytest.raises(ValueError, match="processes that are forked"):
        driver.keeper.on_train_start(SimpleNamespace(strategy=forks), driver.module)


def test_fabric_trains_as_a_plain_loop():
    from lightning.fabric import Fabric

    def of_training(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    def train(fabric=None):
        model = perceptron(torch.float32)
        optimizer, backward = sgd(model.parameters()), torch.Tensor.backward
        if fabric is not None:
            (model, optimizer), backward = fabric.setup(model, optimizer), fabric.backward
        keeper = Keeper(model, optimizer, Promise(of_training, weight=0.5))
        for k in range(2):
            for batch in batches(k, dtype=torch.float32):
                optimizer.zero_grad()
                backward(of_training(model, batch))
                optimizer.step()
            keeper.keep(batches(k, dtype=torch.float32))
        assert keeper.last.names == [0]
        return model

    assert_same_weights(train(Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")), train())
