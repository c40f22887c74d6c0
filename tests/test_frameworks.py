"""What a keeper does in every framework, tested with the drivers of frameworks.py: the steps of a plain loop first."""

import copy
import importlib
import sys

import pytest
import torch
from frameworks import ALL, CALLBACKS, CLIP, LOOPS, Avalanche, BreakingOff, Net, Plain, adamw, batches
from loops import assert_same_weights, flat
from models import EACH, adapted, logits, perceptron
from models import loss as mean_loss
from torch.utils._pytree import tree_leaves

from gemproj import FISTA
from gemproj.torch import Promise
from gemproj.torch.losses import Distillation, model_loss

pytestmark = pytest.mark.usefixtures("fresh_state")

loops = pytest.mark.parametrize("kind", LOOPS)


def numbers(last):
    """Return what is logged about a step."""
    found = {"violations": last.num_violated, "active": last.num_active}
    found |= {"cosine": last.cosine, "worst_cosine": last.worst_cosine}
    if last.excess is not None:
        found["excess"] = float(last.excess.max())
    return {f"keep/{name}": value for name, value in found.items()}


def compare(kind, folder, promise=ALL, precision=None, make=Net, change=list, atol=1e-9, n=6, **options):
    """Learn three tasks in a framework and in a plain loop, which must come to the same; return both drivers."""
    plain = Plain(folder, promise, precision, make(precision), like=kind, **options)
    driver = kind(folder, promise, precision, make(precision), **options)
    dtype = next(plain.model.parameters()).dtype
    for k in range(3):
        data = batches(k, n, dtype)
        for one in (plain, driver):
            one.train(change(data))
            one.keep(data)
        last = driver.keeper.last
        assert k == 0 or last.names == list(range(k))
        if driver.logged and k:
            logged = driver.logged[-1]
            assert logged.pop("keep/seconds") > 0
            assert logged == pytest.approx(numbers(last), rel=1e-5, abs=1e-6)
    assert plain.active > 2  # or a loop without rows would do the same
    assert_same_weights(driver.model, plain.model, atol)
    assert list(driver.keeper.sets) == [0, 1, 2]
    looks, expected = ([line.looks for line in one.keeper.report().values()] for one in (driver, plain))
    assert looks == expected
    assert driver.norms in ([], pytest.approx(plain.norms, rel=1e-4, nan_ok=True))
    return plain, driver


# --- steps --------------------------------------------------------------------------------------


SAID = Distillation(logits, labels=EACH, weight=0.2)
PROMISES = {
    "gradient": (ALL, {}),
    "step": (Promise(examples=7), {"on": "step", "look": 2}),
    # So many steps that the start does not matter: who attaches anew for each task forgets the multipliers.
    "both": (Promise(examples=None, weight=0.05), {"on": "both", "method": FISTA(steps=200)}),
    # Avalanche replaces losses.
    "distilled and tolerance": (Promise(SAID, tolerance=0.01, repair=0.5, examples=5), {}),
    # The weight of a step counts as much as clipping leaves of the gradient.
    "weight of steps": (Promise(EACH, tolerance=0.0, weight=0.5, examples=None), {"on": "step"}),
    "margin": (Promise(EACH, examples=3, weight=0.3), {"on": "gradient"}),
}
CASES = [
    (kind, name) for kind in (*LOOPS, Avalanche) for name in [*PROMISES][: 3 if kind is Avalanche else 6]
]


@pytest.mark.filterwarnings("ignore:0 sets kept")  # in a first training, before which texts may be written
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_steps_are_those_of_a_plain_loop(kind, name, tmp_path):
    promise, options = PROMISES[name]
    compare(kind, tmp_path, promise, **options)


@loops
def test_with_auto_rows_are_computed_in_the_steps_of_a_plain_loop(kind, tmp_path):
    promise = Promise(EACH, examples=None, tolerance=0.5)
    _, driver = compare(kind, tmp_path, promise, n=24, look="auto", on="both")
    line = driver.keeper.report()[0]
    assert 1 < line.looks < line.steps == 24


@loops
@pytest.mark.parametrize(("precision", "on"), [("bf16", "both"), ("fp16", "gradient")])
def test_rows_have_the_precision_and_the_scale_of_training(kind, precision, on, tmp_path):
    def overflow(data):
        """Have the scaler skip the second of three steps."""
        return [*data[:2], data[2] | {"x": data[2]["x"] * float("inf")}, *data[3:]]

    change = overflow if precision == "fp16" else list
    plain, _ = compare(kind, tmp_path, precision=precision, change=change, on=on, atol=1e-5)
    assert sum(norm != norm for norm in plain.norms) == (3 if change is overflow else 0)


@loops
def test_of_adapters_only_their_weights_are_projected(kind, tmp_path):
    def make(precision):
        torch.manual_seed(0)
        return adapted(Net(), target_modules=["net.0", "net.2"])

    _, driver = compare(kind, tmp_path, Promise(weight=0.5, examples=None), make=make, on="both")
    assert driver.keeper.rows.G.shape[1] == 2 * (6 + 8 + 8 + 3)
    assert_same_weights(driver.model.get_base_model().net[0].base_layer, perceptron()[0])


@pytest.mark.parametrize("kind", [Plain, *LOOPS])
def test_a_weight_is_that_of_replay_also_where_gradients_are_clipped(kind, tmp_path):
    driver, past, data = kind(tmp_path, Promise(weight=4.0)), batches(0)[:1], batches(1)
    driver.keep(past)
    driver.train(data)
    assert driver.keeper.last.num_active == 0  # replay, and nothing else

    model = perceptron()
    optimizer = adamw(model)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        ((mean_loss(model, first) + mean_loss(model, second)) / 2).backward()
        (4.0 * mean_loss(model, past[0])).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
    assert_same_weights(driver.model, model)


# --- attached once, and removed -----------------------------------------------------------------


@loops
def test_it_is_attached_once_also_after_a_training_that_broke_off(kind, tmp_path):
    attached, counts = Plain(tmp_path).hooks(), set()

    def counting(model, batch):
        if model.training is False and hasattr(driver, "optimizer"):
            counts.add(driver.hooks())
        return model_loss(model, batch)

    driver = kind(tmp_path, Promise(counting))
    driver.keep(batches(0)[:1])
    with pytest.raises(ConnectionError, match="on purpose"):
        driver.train(BreakingOff(batches(1)))
    broken = driver.optimizer
    assert driver.hooks() == (0 if kind.tells else attached)
    driver.train(batches(1))
    assert counts == {attached}
    assert driver.hooks() == driver.hooks(broken) == (attached if kind.lasts else 0)
    driver.keeper.remove()
    assert driver.hooks() == 0


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_copy_has_nothing_of_a_training(kind, tmp_path):
    copied = []

    def copying(model, batch):  # in the middle of a training, too
        memo = {}
        copy.deepcopy(driver.keeper, memo)
        copied.extend(map(type, memo.values()))
        return model_loss(model, batch)

    driver = kind(tmp_path, Promise(copying))
    for k in range(2):
        driver.train(batches(k))
        driver.keep(batches(k))
    assert torch.Tensor in copied
    assert not {torch.optim.AdamW, Net, torch.nn.Linear} & {*copied}
    other = copy.deepcopy(driver.keeper)
    assert str(other.sets) == str(driver.keeper.sets)
    assert str(other.history.state_dict()) == str(driver.keeper.history.state_dict())
    assert not other.report().kept
    assert "not known, as another adapter is active, or the keeper has no model" in str(other.report())


# --- checkpoints --------------------------------------------------------------------------------


@loops
def test_training_resumes_to_the_bit(kind, tmp_path):
    promise, options = Promise(examples=3), {"on": "both", "method": "pgd"}
    whole, half = (kind(tmp_path / name, promise, **options) for name in ("whole", "half"))
    for driver in (whole, half):
        driver.train(batches(0))
        driver.keep(batches(0))
    half.train(batches(1), save=True)
    whole.train(batches(1), epochs=2)
    resumed = kind(half.folder, promise, **options)  # its model, optimizer and keeper know nothing
    resumed.train(batches(1), epochs=2, resume=True)
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert torch.equal(resumed.keeper.rows.G, whole.keeper.rows.G)
    for logs, expected in zip(resumed.logged, whole.logged[1:], strict=True):
        assert logs | {"keep/seconds": 0.0} == expected | {"keep/seconds": 0.0}
    for driver in (whole, resumed):
        driver.keep(batches(1), limit=4)  # which examples are kept
    both = ([one.state_dict() for one in driver.keeper.sets.values()] for driver in (whole, resumed))
    kept = map(tree_leaves, both)
    assert all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in zip(*kept, strict=True))


# --- imports ------------------------------------------------------------------------------------


def test_an_import_changes_nothing_of_a_framework(monkeypatch):
    Accelerator = pytest.importorskip("accelerate").Accelerator
    Precision = pytest.importorskip("lightning.pytorch.plugins").Precision
    kinds = [Accelerator, Precision, pytest.importorskip("transformers").Trainer, torch.optim.Optimizer]
    before = [dict(vars(kind)) for kind in kinds]
    package = importlib.import_module("gemproj.integrations")
    for name in [name for name in sys.modules if name.startswith("gemproj.integrations.")]:
        monkeypatch.setattr(package, name.rpartition(".")[2], sys.modules[name])
        monkeypatch.delitem(sys.modules, name)
    names = {f"gemproj.integrations.{name}" for name in ("accelerate", "transformers", "lightning")}
    for name in names:
        importlib.import_module(name)
    after = {name for name in sys.modules if name.startswith("gemproj.integrations.")}
    for name in after:
        monkeypatch.delitem(sys.modules, name)
    assert [dict(vars(kind)) for kind in kinds] == before
    # DeepSpeed's is imported where an engine is.
    assert after == names | {"gemproj.integrations.texts"}
