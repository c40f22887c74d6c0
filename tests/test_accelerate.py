"""What is special to Accelerate: its clipping, several objects in one checkpoint, engines out of reach.

What holds in every framework is in test_frameworks.py.
"""

import contextlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from frameworks import Accelerate, Net, batches  # noqa: E402
from models import flat, sgd  # noqa: E402

import gemproj.torch  # noqa: E402
from gemproj.integrations.accelerate import GEM  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_state")


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("size", [1.0, 1e25])
def test_where_nothing_is_remembered_gradients_are_clipped_as_without_gem(size, kind, tmp_path):
    weights = []
    for attached in (False, True):
        driver = Accelerate(tmp_path, model=Net("bf16"))
        if not attached:
            driver.object.remove()
        accelerator, model = driver.accelerator, driver.model
        with accelerator.accumulate(model):
            accelerator.backward(model(**batches(0, dtype=torch.float32)[0]).loss * size)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, kind)
            driver.optimizer.step()
        weights.append((flat(model), norm))
    assert weights[0][0].isfinite().all()
    torch.testing.assert_close(*weights)


def test_a_prepared_optimizer_is_for_the_object_of_accelerate(tmp_path):
    driver = Accelerate(tmp_path)
    assert driver.hooks()
    gemproj.torch.detach(driver.optimizer)
    assert not driver.hooks()
    with pytest.raises(
        TypeError, match=r"AcceleratedOptimizer wraps another one.*integrations.accelerate.GEM"
    ):
        gemproj.torch.GEM(driver.model, driver.optimizer)
    with pytest.raises(TypeError, match="accelerator must be an Accelerator; found Net"):
        GEM(driver.model, driver.optimizer, lambda model, batch: model(**batch).loss)


def test_several_objects_have_files_of_their_own(tmp_path):
    driver = Accelerate(tmp_path)
    first, accelerator, other = driver.object, driver.accelerator, Net()
    parts = [sgd(part.parameters()) for part in (other.net[0], other.net[2])]
    other, *parts = accelerator.prepare(other, *parts)
    second = GEM(accelerator, other, parts)
    first.end_task(batches(0), "one")
    second.end_task(batches(1), "two")
    second.exclude = "two"
    accelerator.save_state(tmp_path)
    second.exclude = None
    first.memory.remove("one")
    accelerator.load_state(tmp_path)
    assert (first.memory.tasks, second.memory.tasks) == (["one"], ["two"])
    assert (first.exclude, second.exclude) == (None, "two")
    other(**batches(0)[0]).loss.backward()
    for part in parts:
        part.step()
    assert len(second.projector.constraints) == 0


def test_what_is_removed_is_in_no_checkpoint_and_projects_no_more(tmp_path):
    driver = Accelerate(tmp_path)
    driver.object.memory.add(batches(0)[0], 0)
    driver.object.remove()
    driver.accelerator.save_state(tmp_path)
    assert not list(tmp_path.glob("gem*"))
    driver.train(batches(1))
    assert driver.object.last is None
    with pytest.raises(FileNotFoundError, match=r"has no gem\.pt; it has none"):
        Accelerate(tmp_path).accelerator.load_state(tmp_path)


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        (DistributedType.DEEPSPEED, None, None),  # what cannot be projected there is told by the optimizer
        (DistributedType.MEGATRON_LM, None, "MEGATRON_LM takes its steps itself"),
        (DistributedType.FSDP, 1, "fsdp_version=2"),
        (DistributedType.FSDP, 2, None),
    ],
)
def test_engines_out_of_reach_are_refused(kind, version, message, monkeypatch, tmp_path):
    driver = Accelerate(tmp_path)
    driver.object.remove()
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    if version is not None:
        plugin = type("Plugin", (), {"fsdp_version": version})()
        monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    expected = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with expected:
        driver.make()
