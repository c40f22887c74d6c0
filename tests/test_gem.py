"""GEM in one object takes the steps of a loop that computes and attaches everything itself."""

import pickle

import pytest

torch = pytest.importorskip("torch")

from models import FIELDS, SMALL, begin, flat, half_loss, loss, perceptron, protect, rival, rows, task  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, GradientProjector, Promise, detach  # noqa: E402

BATCHES = 8


def stream(tasks=3):
    """Tasks that contradict each other, in batches."""
    loaders = []
    for k in range(tasks):
        batches = [task(10 * j) for j in range(BATCHES)]
        loaders.append([rival(batch, k) for batch in batches])
    return loaders


def adamw(model, **options):
    return torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.01}], lr=0.05, **options
    )


def by_hand(model, accumulate=1, make=adamw, per="task", examples=None, loss=loss, **options):
    memory, optimizer = EpisodicMemory(per_task=20, label=1), make(model)
    promise = Promise(loss, **{name: options.pop(name) for name in FIELDS & options.keys()})
    projector = GradientProjector(model.parameters(), promise, **options)
    projector.attach(optimizer)
    active = 0
    for k, loader in enumerate(stream()):
        projector.reset()
        for start in range(0, BATCHES, accumulate):
            optimizer.zero_grad()
            for batch in loader[start : start + accumulate]:
                (loss(model, batch) / accumulate).backward()
            past = [memory.sample(examples)] if per == "all" and k else memory.batches()
            projector.recall(model, past)
            optimizer.step()
            active += projector.last.num_active
        for batch in loader:
            memory.add(batch, k)
    assert active
    return flat(model)


def by_gem(model, accumulate=1, make=adamw, closure=False, loss=loss, **options):
    optimizer = make(model)
    gem = protect(model, optimizer, loss, per_task=20, label=1, **options)
    for loader in stream():
        for start in range(0, BATCHES, accumulate):

            def learn(window=loader[start : start + accumulate]):
                optimizer.zero_grad()
                for batch in window:
                    (loss(model, batch) / accumulate).backward()

            if closure:
                optimizer.step(learn)
            else:
                learn()
                optimizer.step()
        gem.end_task(loader)
    assert gem.memory.tasks == [0, 1, 2]
    return flat(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on": "step", "accumulate": 2},
        {"on": "both", "every": 2},
        {"weight": 0.1, "method": "pgd"},
        {"method": "agem", "per": "all", "examples": 15},
        {"equal": True},
        {"penalty": 0.05},
    ],
    ids=str,
)
def test_gem_takes_the_steps_of_a_loop_by_hand(options):
    expected = by_hand(perceptron(), **options)
    for closure in (False, True):
        assert torch.equal(by_gem(perceptron(), closure=closure, **options), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_computes_nothing(fused):
    model = perceptron(torch.float32)
    seen = []

    def counting(model, batch):
        seen.append(len(batch[1]))
        return loss(model, batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    gem = GEM(model, optimizer, counting, on="both", scaler=scaler)
    gem.end_task([task(1, dtype=torch.float32)])
    seen.clear()  # the loss was tried
    for finite in (True, False, True):
        optimizer.zero_grad()
        value = loss(model, rival(task(1, dtype=torch.float32)))
        scaler.scale(value if finite else value * float("inf")).backward()
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
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        gem = GEM(model, optimizer, half_loss, scaler=scaler)
        gem.end_task([past])
        loss(model, past).backward()
        optimizer.step()
        return float((gem.projector.constraints.double() / SMALL - expected).norm() / expected.norm())

    assert error(None) > 0.1
    assert error(torch.amp.GradScaler("cpu", init_scale=2.0**26)) < 0.01


def test_a_task_that_is_being_learned_can_be_left_out():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for options in ({}, {"per": "all", "examples": 5}):
        gem = GEM(model, optimizer, loss, **options)
        gem.exclude = 0
        gem.memory.add(task(1), 0)
        loss(model, task(2)).backward()
        optimizer.step()
        assert gem.last.constraints == 0
        gem.exclude = 1
        optimizer.step()
        assert gem.last.constraints == 1
        gem.remove()


def test_a_state_without_rows_has_constraints_from_the_first_step_on():
    model, _, gem = begin()
    gem.end_task([task(1)])
    for _ in range(2):
        loss(model, rival(task(1))).backward()
        gem.projector.recall(model, gem.memory.batches(), loss)
    state = gem.state_dict()
    assert state["projector"]["constraints"] is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seldom = GEM(model, optimizer, loss, every=4)
    seldom.load_state_dict(state)
    optimizer.step()
    assert seldom.last.constraints == 1


def test_a_state_of_another_model_changes_nothing():
    model, other = perceptron(), torch.nn.Linear(6, 3, dtype=torch.float64)
    gem, theirs = (
        GEM(one, torch.optim.SGD(one.parameters(), lr=0.1), loss, every=2) for one in (model, other)
    )
    theirs.end_task([task(2)], "theirs")
    theirs.projector.recall(other, theirs.memory.batches(), loss)
    gem.end_task([task(1)], "ours")
    gem.projector.recall(model, gem.memory.batches(), loss)
    G = gem.projector.constraints.clone()
    with pytest.raises(ValueError, match="belongs to another model"):
        gem.load_state_dict(theirs.state_dict())
    assert gem.memory.tasks == ["ours"]
    assert torch.equal(gem.projector.constraints, G)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own pytree
def test_a_copy_is_attached_to_nothing():
    _, optimizer, gem = begin()
    gem.end_task([task(1)])
    other = pickle.loads(pickle.dumps(gem))
    assert other.memory.tasks == [0]
    other.remove()
    optimizer.step()
    assert gem.last.constraints == 1


def test_what_is_removed_projects_no_more():
    model, optimizer, gem = begin()
    gem.end_task([task(1)])
    gem.remove()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    loss(model, rival(task(1))).backward()
    before = flat(model)
    optimizer.step()
    torch.testing.assert_close(before - flat(model), 0.1 * flat(p.grad for p in model.parameters()))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"model": [1]}, TypeError, "model must be a torch.nn.Module; found list"),
        ({"loss": None}, TypeError, "loss must be a function of model and batch; found NoneType"),
        ({"loss": torch.nn.CrossEntropyLoss()}, TypeError, "called as .*batch.*, and CrossEntropyLoss"),
        ({"loss": torch.nn.functional.mse_loss}, TypeError, "called as .*batch.*, and mse_loss"),
        ({"per_task": 0}, ValueError, "per_task must be at least 1"),
        ({"memory": {}}, TypeError, "memory must be an EpisodicMemory; found dict"),
        ({"weight": [0.5]}, TypeError, r"weight must be a number; found \[0.5\]"),
        ({"tolerance": -1.0}, ValueError, "tolerance must be finite and at least 0"),
        ({"examples": 0}, ValueError, "examples must be at least 1"),
        ({"per": "class"}, ValueError, "per must be one of 'task', .*'all'; found 'class'"),
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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=text):
        GEM(**({"model": model, "optimizer": optimizer, "loss": loss} | options))
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("attach", [GEM, lambda model, optimizer: projector_of(model).attach(optimizer)])
def test_what_nothing_refers_to_any_more_is_detached(attach):
    """A cell of a notebook that is run twice, perhaps after ``del gem``."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach(model, optimizer)
    with pytest.raises(ValueError, match=r"attached to this optimizer.*gemproj.torch.detach\(optimizer\)"):
        attach(model, optimizer)
    detach(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    attach(model, optimizer)


def projector_of(model):
    return GradientProjector(model.parameters())
