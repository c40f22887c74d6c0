"""The projector and the memory inside a training loop."""

import io

import pytest

torch = pytest.importorskip("torch")

from gemproj import GEM2017, PGD, project, solve_dual  # noqa: E402
from gemproj.torch import EpisodicMemory, GradientProjector  # noqa: E402


@pytest.fixture
def model():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    net[0].bias.requires_grad_(False)
    return net


def task(seed, n=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def gradient(model, batch):
    return flat(torch.autograd.grad(loss(model, batch), [p for p in model.parameters() if p.requires_grad]))


def conflicting(model):
    """Past tasks and a gradient that violates at least one of them."""
    past = [task(1), task(2)]
    now = (past[0][0], (past[0][1] + 1) % 3)
    return past, now


def test_projects_the_gradients_of_the_trainable_parameters(model):
    past, now = conflicting(model)
    rows = torch.stack([gradient(model, batch) for batch in past])
    g = gradient(model, now)
    projector = GradientProjector(model.parameters())
    projector.constrain(loss(model, batch) for batch in past)
    assert all(p.grad is None for p in model.parameters())
    torch.testing.assert_close(projector.constraints, rows)

    loss(model, now).backward()
    before = model[0].weight.grad
    stats = projector.project_()
    x = flat(p.grad for p in model.parameters() if p.requires_grad)
    torch.testing.assert_close(x, project(rows, g))
    assert model[0].weight.grad is before
    assert model[0].bias.grad is None
    expected = solve_dual(rows, g)
    assert stats.constraints == 2
    assert stats.violated == int((rows @ g < 0).sum()) >= 1
    assert stats.active == int((expected.multipliers > 0).sum()) >= 1
    torch.testing.assert_close(stats.multipliers, expected.multipliers, rtol=1e-4, atol=1e-6)
    assert stats.cosine == pytest.approx(float(torch.cosine_similarity(x, g, dim=0)), abs=1e-5)
    assert projector.last is stats
    assert repr(projector) == "GradientProjector(3 parameters, d=48, t=2, Exact(), margin=0.0, penalty=inf)"


def test_constraint_gradients_do_not_clobber_grad(model):
    past, now = conflicting(model)
    loss(model, now).backward()
    before = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    GradientProjector(model.parameters()).constrain(loss(model, batch) for batch in past)
    after = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_nothing_changes_without_constraints_or_violation(model):
    _, now = conflicting(model)
    loss(model, now).backward()
    before = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    projector = GradientProjector(model.parameters())
    assert projector.project_().constraints == 0
    projector.constrain([loss(model, now)])  # the gradient itself: never violated
    stats = projector.project_()
    assert (stats.violated, stats.active, stats.cosine) == (0, 0, 1.0)
    after = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_attached_optimizer_steps_along_the_projection(model):
    past, now = conflicting(model)
    rows = torch.stack([gradient(model, batch) for batch in past])
    expected = project(rows, gradient(model, now))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    projector = GradientProjector(model.parameters())
    handle = projector.attach(optimizer)
    projector.constrain(loss(model, batch) for batch in past)
    loss(model, now).backward()
    before = flat(p.detach().clone() for p in model.parameters() if p.requires_grad)
    optimizer.step()
    after = flat(p.detach() for p in model.parameters() if p.requires_grad)
    torch.testing.assert_close((before - after) / 0.1, expected, rtol=1e-4, atol=1e-6)
    assert projector.last.active >= 1
    handle.remove()
    projector.last = None
    optimizer.step()
    assert projector.last is None


def test_closures_are_followed_by_a_projection(model):
    past, now = conflicting(model)
    rows = torch.stack([gradient(model, batch) for batch in past])
    expected = project(rows, gradient(model, now))
    projector = GradientProjector(model.parameters())
    projector.constrain(loss(model, batch) for batch in past)
    for how in ("positional", "keyword"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        projector.attach(optimizer)

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            value = loss(model, now)
            value.backward()
            return value

        value = optimizer.step(closure) if how == "positional" else optimizer.step(closure=closure)
        assert float(value.detach()) == float(loss(model, now).detach())
        torch.testing.assert_close(flat(p.grad for p in model.parameters() if p.requires_grad), expected)


def test_autocast_of_the_caller_does_not_reach_the_projection(rng):
    for d in (1000, 200_000):
        G, g = torch.from_numpy(rng.standard_normal((2, d)) - 0.2).float(), torch.full((d,), 0.2)
        expected = project(G, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(project(G, g), expected)


def test_a_failing_loss_leaves_no_constraints(model):
    past, _ = conflicting(model)
    projector = GradientProjector(model.parameters())
    projector.constrain(loss(model, batch) for batch in past)

    def losses():
        yield loss(model, past[0])
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        projector.constrain(losses())
    assert len(projector.constraints) == 0
    assert projector.project_().solution is None


def test_growing_constraints_keep_the_rows_before_them(model):
    past = [task(k) for k in range(5)]
    projector = GradientProjector(model.parameters())
    for t in (1, 2, 5):
        projector.constrain(loss(model, batch) for batch in past[:t])
        expected = torch.stack([gradient(model, batch) for batch in past[:t]])
        torch.testing.assert_close(projector.constraints, expected)


def test_gradients_appear_only_where_the_present_constraints_reach(model):
    extra, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    projector = GradientProjector([extra, other])
    projector.constrain([extra.sum() + other.sum()])
    projector.constrain([extra.sum()])
    extra.grad = -torch.ones(2)
    projector.project_()
    assert other.grad is None
    assert not extra.grad.any()


def test_warm_start_lives_within_a_task(model):
    past, now = conflicting(model)
    starts = []

    def spy(K, b, warm_start):
        starts.append(None if warm_start is None else warm_start.clone())
        return PGD()(K, b, warm_start)

    projector = GradientProjector(model.parameters(), method=spy)

    def step(batches):
        model.zero_grad()
        projector.constrain(loss(model, batch) for batch in batches)
        loss(model, now).backward()
        return projector.project_().multipliers

    first = step(past)
    step(past)
    assert starts[0] is None
    assert torch.equal(starts[1], first)
    step([*past, task(3)])  # one more constraint: another problem
    assert starts[2] is None
    projector.reset()
    assert len(projector.constraints) == 0
    assert projector.last is None
    step([*past, task(3)])
    assert starts[3] is None


def test_parameters_without_a_gradient(model):
    extra = torch.nn.Parameter(torch.ones(4))
    unused = torch.nn.Parameter(torch.ones(2))
    past, now = conflicting(model)
    projector = GradientProjector([*model.parameters(), extra, unused])
    projector.constrain([loss(model, past[0]) + (extra**2).sum()])
    loss(model, now).backward()
    stats = projector.project_()
    assert stats.active == 1
    # The constraint depends on `extra`, so the projection moves along it; `unused` stays out.
    torch.testing.assert_close(extra.grad, 2.0 * stats.multipliers.float() * torch.ones(4))
    assert unused.grad is None


def test_mixed_dtypes_and_shared_parameters(model):
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameters = [half, half, model[0].weight]
    projector = GradientProjector(parameters)
    projector.constrain([(half.float() ** 2).sum() + model[0].weight.sum()])
    assert projector.constraints.shape == (1, 33)
    assert projector.constraints.dtype == torch.float32
    half.grad, model[0].weight.grad = -torch.ones_like(half), torch.zeros_like(model[0].weight)
    projector.project_()
    assert half.grad.dtype == torch.bfloat16
    assert abs(float(2 * half.grad.sum() + model[0].weight.grad.sum())) < 0.05


@pytest.mark.parametrize("method", ["exact", "agem", PGD(steps=2), GEM2017()])
def test_state_survives_a_checkpoint(model, method):
    past, now = conflicting(model)
    projectors = [GradientProjector(model.parameters(), method=method) for _ in range(2)]
    projectors[0].constrain(loss(model, batch) for batch in past)
    loss(model, now).backward()
    saved = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    projectors[0].project_()
    buffer = io.BytesIO()
    torch.save(projectors[0].state_dict(), buffer)
    buffer.seek(0)
    projectors[1].load_state_dict(torch.load(buffer, weights_only=True))
    results = []
    for projector in projectors:
        for p, g in zip([p for p in model.parameters() if p.requires_grad], saved, strict=True):
            p.grad = g.clone()
        projector.project_()
        results.append(flat(p.grad for p in model.parameters() if p.requires_grad))
    assert torch.equal(*results)


def test_errors_of_the_projector(model):
    with pytest.raises(ValueError, match="parameters holds none that requires a gradient"):
        GradientProjector([model[0].bias])
    with pytest.raises(TypeError, match=r"pass module.parameters\(\)"):
        GradientProjector(model)
    with pytest.raises(TypeError, match="parameters must be an iterable of real tensors; found tuple"):
        GradientProjector(model.named_parameters())
    with pytest.raises(ValueError, match="margin must be finite and at least 0"):
        GradientProjector(model.parameters(), margin=-1.0)
    projector = GradientProjector(model.parameters())
    with pytest.raises(ValueError, match=r"losses must be scalars.*loss 0 is a tensor of shape \(3,\)"):
        projector.constrain([torch.ones(3)])
    with pytest.raises(ValueError, match="loss 0 is float"):
        projector.constrain([1.0])
    with pytest.raises(ValueError, match="belongs to another model"):
        projector.load_state_dict(
            {"constraints": {"rows": torch.zeros(1, 2), "reached": []}, "multipliers": None}
        )
    table = torch.nn.Embedding(5, 3, sparse=True)
    with pytest.raises(TypeError, match="Gradients must be dense"):
        GradientProjector(table.parameters()).constrain([table(torch.tensor([1])).sum()])
    projector.constrain([loss(model, task(1))])
    loss(model, task(2)).backward()
    model[0].weight.grad[0, 0] = float("nan")
    before = model[2].weight.grad.clone()
    with pytest.raises(ValueError, match="g is not finite"):
        projector.project_()
    assert torch.equal(model[2].weight.grad, before)


# --- memory -------------------------------------------------------------------------------------


def test_memory_is_balanced_however_skewed_the_stream():
    memory = EpisodicMemory(per_task=12, label="y")
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 10)[torch.randperm(1000, generator=torch.Generator())]
    for part in torch.arange(1000).split(64):
        memory.add({"x": part.float()[:, None], "y": labels[part]}, task="news")
    (batch,) = memory.batches()
    assert torch.bincount(batch["y"]).tolist() == [4, 4, 4]
    assert torch.equal(labels[batch["x"][:, 0].long()], batch["y"])  # rows stay together
    assert len(batch["x"].unique()) == 12


def test_memory_keeps_every_example_with_the_same_chance():
    counts = torch.zeros(20)
    for seed in range(600):
        memory = EpisodicMemory(per_task=5, seed=seed)
        for part in torch.arange(20).split(6):
            memory.add(part, task=0)
        counts[next(memory.batches())] += 1
    # 600 draws with probability 1/4: a standard deviation of 10.6 around 150
    assert counts.sum() == 3000
    assert (counts - 150).abs().max() < 4.5 * 10.6


def test_memory_yields_tasks_in_order_and_samples_their_union():
    memory = EpisodicMemory(per_task=3)
    for k in (2, 0, 1):
        memory.add((torch.full((5,), k), [torch.arange(5)]), task=k)
    assert len(memory) == 3
    assert memory.tasks == [2, 0, 1]
    assert [int(batch[0][0]) for batch in memory.batches()] == [2, 0, 1]
    assert [int(batch[0][0]) for batch in memory.batches(exclude=0)] == [2, 1]
    sample = memory.sample(100)
    assert torch.bincount(sample[0]).tolist() == [3, 3, 3]
    assert sample[0].shape == sample[1][0].shape == (9,)
    assert memory.sample(4)[0].shape == (4,)
    assert memory.nbytes == 3 * 3 * 8 * 2


def test_memory_holds_copies():
    memory, batch = EpisodicMemory(per_task=4), torch.zeros(4, 2)
    memory.add(batch, task=0)
    batch += 1
    assert not next(memory.batches()).any()


def test_memory_mixes_tasks_by_key_and_refuses_other_examples():
    memory = EpisodicMemory(per_task=3)
    memory.add({"ids": torch.zeros(2), "labels": torch.ones(2)}, task=0)
    memory.add({"labels": torch.ones(2), "ids": torch.zeros(2)}, task=1)
    sample = memory.sample(4)
    assert not sample["ids"].any()
    assert sample["labels"].all()
    with pytest.raises(ValueError, match="nested differently"):
        memory.add({"other": torch.zeros(2), "labels": torch.ones(2)}, task=2)
    with pytest.raises(ValueError, match="Pad sequences"):
        memory.add({"ids": torch.zeros(2, 5), "labels": torch.ones(2)}, task=2)
    memory.add({"ids": torch.zeros(0), "labels": torch.ones(0)}, task=3)
    assert memory.tasks == [0, 1]


def test_saved_state_does_not_follow_the_memory():
    memory = EpisodicMemory(per_task=50)
    memory.add(torch.zeros(2), task=0)
    state, batch = memory.state_dict(), next(memory.batches())
    batch += 7.0
    memory.add(torch.ones(40), task=0)
    assert not state["tasks"][0]["batch"].any()
    assert state["tasks"][0]["batch"].untyped_storage().nbytes() == 8
    memory.load_state_dict(state)
    assert next(memory.batches()).tolist() == [0.0, 0.0]


def test_memory_survives_a_checkpoint():
    memories = [EpisodicMemory(per_task=4, label=lambda batch: batch["y"], seed=3) for _ in range(2)]
    first = {"x": torch.randn(9, 2), "y": torch.arange(9) % 3}
    memories[0].add(first, task="a")
    memories[0].add({"x": torch.randn(2, 2), "y": torch.zeros(2, dtype=torch.long)}, task="b")
    buffer = io.BytesIO()
    torch.save(memories[0].state_dict(), buffer)
    buffer.seek(0)
    memories[1].load_state_dict(torch.load(buffer, weights_only=True))
    later = {"x": torch.randn(50, 2), "y": torch.arange(50) % 4}
    for memory in memories:
        memory.add(later, task="b")
    for left, right in zip(*(m.batches() for m in memories), strict=True):
        assert torch.equal(left["x"], right["x"])
        assert torch.equal(left["y"], right["y"])
    assert torch.equal(memories[0].sample(5)["x"], memories[1].sample(5)["x"])


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"x": torch.zeros(3), "y": torch.zeros(2, dtype=torch.long)}, ValueError, "same leading dimension"),
        ({"x": [1, 2], "y": torch.zeros(2, dtype=torch.long)}, TypeError, "tensors only; found int"),
        ({"x": torch.zeros(2)}, ValueError, r"label 'y' is not in the batch; found keys \['x'\]"),
        (
            {"x": torch.zeros(2), "y": torch.zeros(2, 2, dtype=torch.long)},
            ValueError,
            r"labels must be integers of shape \(2,\)",
        ),
        (
            {"x": torch.zeros(2, 5), "y": torch.zeros(2, dtype=torch.long)},
            ValueError,
            "Pad sequences to a fixed length",
        ),
        ({"z": torch.zeros(2), "y": torch.zeros(2, dtype=torch.long)}, ValueError, "nested differently"),
    ],
)
def test_errors_of_the_memory(batch, error, text):
    memory = EpisodicMemory(per_task=4, label="y")
    memory.add({"x": torch.zeros(2, 3), "y": torch.zeros(2, dtype=torch.long)}, task=0)
    with pytest.raises(error, match=text):
        memory.add(batch, task=0)
    assert len(next(memory.batches())["y"]) == 2


def test_empty_memory_cannot_be_sampled():
    with pytest.raises(ValueError, match="memory is empty"):
        EpisodicMemory().sample(3)
    with pytest.raises(ValueError, match="per_task must be at least 1"):
        EpisodicMemory(per_task=0)
