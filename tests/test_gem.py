"""GEM in one object: skipped steps, float16, states and options; its steps are tested in test_frameworks.py."""

import pytest

torch = pytest.importorskip("torch")

from models import SMALL, begin, flat, half_loss, loss, perceptron, rival, rows, sgd, task  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, Promise  # noqa: E402


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_computes_nothing(fused):
    seen, data = [], task(1, dtype=torch.float32)

    def counting(model, batch):
        seen.append(len(batch[1]))
        return loss(model, batch)

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    model, optimizer, gem = begin(
        counting,
        model=perceptron(torch.float32),
        make=lambda p: torch.optim.AdamW(p, lr=0.02, fused=fused),
        on="both",
        scaler=scaler,
    )
    gem.end_task([data])
    seen.clear()  # the loss was tried
    for finite in (True, False, True):
        optimizer.zero_grad()
        scaler.scale(loss(model, rival(data)) * (1.0 if finite else float("inf"))).backward()
        before = flat(model)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, flat(model)) is not finite
    assert len(seen) == 2
    assert gem.last.worst_cosine > -1e-5


def test_constraints_in_float16_do_not_vanish():
    model, past = perceptron(torch.float32), task(1, dtype=torch.float32)
    expected = rows(model, [past])

    def error(scaler):
        _, optimizer, gem = begin(half_loss, model=model, make=lambda p: sgd(p, 0.0), scaler=scaler)
        gem.end_task([past])
        loss(model, past).backward()
        optimizer.step()
        return float((gem.projector.constraints.double() / SMALL - expected).norm() / expected.norm())

    assert error(None) > 0.1
    assert error(torch.amp.GradScaler("cpu", init_scale=2.0**26)) < 0.01


# --- states -------------------------------------------------------------------------------------


def recalled(name=0, **options):
    """Return a model, its optimizer, and GEM with a task and its rows."""
    model, optimizer, gem = begin(**options)
    gem.end_task([task(1)], name)
    gem.projector.recall(model, gem.memory.batches(), lambda model, batch: model(batch[0]).mean())
    return model, optimizer, gem


def test_a_state_without_rows_has_constraints_from_the_first_step_on():
    gem = recalled()[2]
    state = gem.state_dict()
    assert state["projector"]["constraints"] is None
    seldom, optimizer, other = begin(every=4)
    other.load_state_dict(state)
    loss(seldom, rival(task(1))).backward()
    optimizer.step()
    assert other.last.constraints == 1


def test_a_state_of_something_else_changes_nothing():
    _, _, gem = recalled("ours", every=2)
    theirs = recalled("theirs", model=torch.nn.Linear(6, 3, dtype=torch.float64), every=2)[2]
    G = gem.projector.constraints.clone()
    for state, text in (
        (theirs.state_dict(), "belongs to another model"),
        (perceptron().state_dict(), "state has no 'memory': it is not of a GEM"),
    ):
        with pytest.raises(ValueError, match=text):
            gem.load_state_dict(state)
    assert gem.memory.tasks == ["ours"]
    assert torch.equal(gem.projector.constraints, G)


# --- options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": [1]}, TypeError, "model must be a torch.nn.Module; found list"),
        ({"loss": torch.nn.CrossEntropyLoss()}, TypeError, "called as .*batch.*, and CrossEntropyLoss"),
        ({"loss": torch.nn.functional.mse_loss}, TypeError, "called as .*batch.*, and mse_loss"),
        ({"per_task": 0}, ValueError, "per_task must be at least 1"),
        ({"memory": {}}, TypeError, "memory must be an EpisodicMemory; found dict"),
        ({"weight": [0.5]}, TypeError, r"weight must be a number; found \[0.5\]"),
        ({"tolerance": -1.0}, ValueError, "tolerance must be finite and at least 0"),
        ({"per": "label"}, ValueError, "per='label' needs labels"),
        ({"loss": Promise(), "weight": 0.5}, ValueError, "weight is given beside a Promise"),
        ({"loss": EpisodicMemory()}, TypeError, "pass memory= for a memory"),
        ({"microbatch": 0}, ValueError, "microbatch must be at least 1"),
        ({"project": 0}, TypeError, "project must be True or False; found 0"),
        ({"method": "gem2017", "on": "both"}, ValueError, "made for gradients"),
        ({"method": "gem2017", "tolerance": 0.1}, ValueError, "tolerance cannot be combined with method"),
        ({"margin": 0.5}, TypeError, "GEM has no keyword 'margin'; did you mean weight"),
        ({"scaler": "cuda"}, TypeError, "scaler must be the torch.amp.GradScaler of training; found str"),
    ],
)
def test_bad_options_leave_the_optimizer_alone(options, error, text):
    model = perceptron()
    optimizer = sgd(model.parameters())
    with pytest.raises(error, match=text):
        GEM(**({"model": model, "optimizer": optimizer, "loss": loss} | options))
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"loss": None}, TypeError, "loss must be a function of model and batch; found NoneType"),
        ({"per": "class"}, ValueError, "per must be one of 'task', .*'all'; found 'class'"),
        ({"examples": 0}, ValueError, "examples must be at least 1"),
        ({"weight": -1.0}, ValueError, "weight must be finite and at least 0"),
        ({"weight": float("inf")}, ValueError, "weight must be finite"),
        ({"weight": 2.0, "penalty": 1.0}, ValueError, "penalty must be finite and at least 2; found 1"),
        ({"penalty": "high"}, TypeError, "penalty must be a number; found 'high'"),
        ({"repair": 0.5}, ValueError, "repair is for a tolerance"),
        ({"tolerance": 0.0, "repair": 1.5}, ValueError, "repair must be at most 1; found 1.5"),
        ({"tolerance": 0.0, "equal": True}, ValueError, "tolerance and equal exclude each other"),
        ({"weight": 1.0, "equal": True}, ValueError, "weight and equal exclude each other"),
        ({"equal": 1}, TypeError, "equal must be True or False; found 1"),
    ],
)
def test_a_promise_validates_itself(given, error, message):
    with pytest.raises(error, match=message):
        Promise(**given)
