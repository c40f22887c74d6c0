"""What is special to Accelerate: several keepers in one checkpoint, engines out of reach.

What holds in every framework is in test_frameworks.py.
"""

import contextlib

import pytest

pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from frameworks import Accelerate, Net, batches
from loops import sgd

import gemproj.torch
from gemproj.integrations.accelerate import Keeper
from gemproj.torch import Promise

pytestmark = pytest.mark.usefixtures("fresh_state")


def test_a_prepared_optimizer_is_for_the_object_of_accelerate(tmp_path):
    driver = Accelerate(tmp_path)
    assert driver.hooks()
    gemproj.torch.detach(driver.optimizer)
    assert not driver.hooks()
    with pytest.raises(TypeError, match=r"AcceleratedOptimizer. If it wraps another .*accelerate.Keeper"):
        gemproj.torch.Keeper(driver.model, driver.optimizer)
    with pytest.raises(TypeError, match="accelerator must be an Accelerator; found Net"):
        Keeper(driver.model, driver.model, driver.optimizer)


def test_several_keepers_have_files_of_their_own(tmp_path):
    driver = Accelerate(tmp_path)
    first, accelerator, other = driver.keeper, driver.accelerator, Net()
    parts = [sgd(part.parameters()) for part in (other.net[0], other.net[2])]
    other, *parts = accelerator.prepare(other, *parts)
    second = Keeper(accelerator, other, parts)
    first.keep(batches(0), name="one")
    second.keep(batches(1), name="two")
    accelerator.save_state(tmp_path)
    assert sorted(file.name for file in tmp_path.glob("keeper*")) == ["keeper.pt", "keeper_1.pt"]
    first.forget("one")
    second.keep(batches(1), name="two")
    accelerator.load_state(tmp_path)
    assert (list(first.sets), list(second.sets), len(second.sets["two"])) == (["one"], ["two"], 24)
    second.remove()
    assert Keeper(accelerator, other, parts)._number == 1
    second.remove()  # again, which does not free the number of another keeper
    assert second._numbers == {0, 1}


def test_a_keeper_that_is_removed_is_in_no_checkpoint_and_projects_no_more(tmp_path):
    driver = Accelerate(tmp_path)
    driver.keep(batches(0))
    driver.keeper.remove()
    driver.accelerator.save_state(tmp_path)
    assert not list(tmp_path.glob("keeper*"))
    with pytest.raises(ValueError, match="not attached to an optimizer, and clips no gradient"):
        driver.train(batches(1))
    driver.optimizer.step()
    assert driver.keeper.last is None
    with pytest.raises(FileNotFoundError, match=r"has no keeper\.pt; it has none"):
        Accelerate(tmp_path).accelerator.load_state(tmp_path)


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        (DistributedType.DEEPSPEED, None, "DeepSpeed's AdamW; a keeper needs one of ZeRO 1, 2"),
        (DistributedType.MEGATRON_LM, None, "MEGATRON_LM takes its steps itself"),
        (DistributedType.FSDP, 1, "fsdp_version=2"),
        (DistributedType.FSDP, 2, None),
    ],
)
def test_engines_out_of_reach_are_refused(kind, version, message, monkeypatch, tmp_path):
    driver = Accelerate(tmp_path)
    driver.keeper.remove()
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    if version is not None:
        plugin = type("Plugin", (), {"fsdp_version": version})()
        monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    expected = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with expected:
        driver.make(Promise())
