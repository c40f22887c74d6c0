"""Gradient projection memory: maps that keep what they do to past inputs."""

import io

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gemproj  # noqa: E402
from gemproj.torch import SubspaceProjector  # noqa: E402
from gemproj.torch.gpm import grow  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def low_rank(n, d, rank):
    """Inputs in a subspace of dimension `rank`."""
    return torch.randn(n, rank) @ torch.randn(rank, d)


def orthonormal(M, accuracy):
    torch.testing.assert_close(M.mT @ M, torch.eye(M.shape[1], dtype=M.dtype), rtol=0, atol=accuracy)


def learn(model, batch):
    """Gradients of something, on other inputs than those that are remembered."""
    model.zero_grad()
    (model(batch).square().sum() + model(batch).sum()).backward()


def conv1d(d, out):
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
    return Conv1D(out, d)


LAYERS = {
    "linear": (lambda: nn.Linear(12, 5), (4, 12)),
    "linear without bias": (lambda: nn.Linear(12, 5, bias=False), (4, 12)),
    "linear on tokens": (lambda: nn.Linear(12, 5), (2, 3, 12)),
    "conv1d": (lambda: conv1d(12, 5), (2, 3, 12)),
    "conv2d": (lambda: nn.Conv2d(4, 5, 3), (1, 4, 5, 5)),
    "conv2d, channels last": (
        lambda: nn.Conv2d(4, 5, 3, bias=False).to(memory_format=torch.channels_last),
        (1, 4, 5, 5),
    ),
    "conv2d, all options": (
        lambda: nn.Conv2d(8, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, padding_mode="reflect"),
        (1, 8, 3, 3),
    ),
    "conv2d, circular, unbatched": (
        lambda: nn.Conv2d(8, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), padding_mode="circular"),
        (8, 3, 3),
    ),
    "conv2d, same": (lambda: nn.Conv2d(6, 3, 3, padding="same"), (1, 6, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_new_weights_do_what_the_old_ones_did_to_past_inputs(layer, dtype):
    make, shape = LAYERS[layer]
    model, past = make().to(dtype), torch.randn(shape, dtype=dtype)
    projector = SubspaceProjector(model, threshold=1.0)
    projector.remember([past])
    (M,) = projector.bases.values()
    assert 0 < M.shape[1] < M.shape[0]
    assert M.dtype == dtype
    orthonormal(M, 1e-5)
    learn(model, 3.0 * torch.randn(shape, dtype=dtype))
    before, grad, plain = model(past).detach(), model.weight.grad, model.weight.grad.clone()
    assert grad.stride() == model.weight.stride()
    projector.project_()
    assert model.weight.grad is grad
    assert model.weight.grad.norm() > 1e-2 * plain.norm()
    accuracy = 1e-4 if dtype == torch.float32 else 1e-12
    model.weight.data -= model.weight.grad
    scale = before.abs().max() + plain.norm()
    assert (model(past) - before).abs().max() <= accuracy * scale
    assert (model(torch.randn(shape, dtype=dtype)) - model(past)).abs().max() > 1e-3


@pytest.mark.parametrize("rank", [1, 4])
def test_it_is_the_projection_with_equalities(rank):
    model = nn.Linear(12, 5).double()
    projector = SubspaceProjector(model, threshold=1.0)
    projector.remember([low_rank(50, 12, rank).double()])
    learn(model, torch.randn(4, 12, dtype=torch.float64))
    dW = model.weight.grad.clone()
    rows = projector.bases[""].mT
    assert rows.shape == (rank, 12)
    projector.project_()
    expected = gemproj.project(rows.expand(5, -1, -1), dW, equality=True)
    torch.testing.assert_close(model.weight.grad, expected, rtol=0, atol=1e-13)


def directions(R, M, threshold):
    """The paper's rule, from a singular value decomposition of the inputs R (inputs, examples)."""
    covered = M @ (M.T @ R)
    U, sizes, _ = np.linalg.svd(R - covered, full_matrices=False)
    needed = threshold * np.sum(R**2)
    k, held = 0, np.sum(covered**2)
    while held < needed * (1 - 1e-12):
        held += sizes[k] ** 2
        k += 1
    return np.concatenate([M, U[:, :k]], axis=1)


@pytest.mark.parametrize("threshold", [0.5, 0.9, 0.97, 0.999])
def test_bases_grow_by_the_rule_of_the_paper(threshold, rng):
    M, expected = torch.empty(20, 0, dtype=torch.float64), np.empty((20, 0))
    for _ in range(4):
        R = rng.standard_normal((20, 60)) * 10.0 ** rng.uniform(-2, 0, (20, 1))
        R = np.linalg.qr(rng.standard_normal((20, 20)))[0] @ R
        C = torch.from_numpy(R @ R.T)
        M, expected = grow(M, C, threshold), directions(R, expected, threshold)
        assert M.shape == expected.shape
        np.testing.assert_allclose((M @ M.T).numpy(), expected @ expected.T, rtol=0, atol=1e-9)
        held = torch.trace(M.mT @ C @ M) / torch.trace(C)
        assert held >= threshold * (1 - 1e-12)
        assert torch.equal(grow(M, C, threshold), M)  # what is known adds nothing
    assert 0 < M.shape[1] <= 20


def test_a_basis_is_never_more_than_a_basis():
    M = torch.empty(5, 0, dtype=torch.float64)
    for k in range(8):
        x = torch.randn(3, 5, dtype=torch.float64) * 10.0 ** -(k % 5)
        M = grow(M, x.mT @ x, 1.0)
        assert M.shape[1] <= 5
        orthonormal(M, 1e-13)
    assert M.shape == (5, 5)
    assert grow(M[:, :2], torch.zeros(5, 5).double(), 1.0).shape == (5, 2)


def test_small_directions_do_not_lean_towards_the_basis():
    Q = torch.linalg.qr(torch.randn(20, 6, dtype=torch.float64))[0]
    known, new = Q[:, :5], Q[:, 5:]
    mix = 1e6 * torch.rand(5, 5, dtype=torch.float64)
    M = grow(known, known @ mix @ mix.mT @ known.mT / 1e6 + 1e-7 * new @ new.mT, 1.0)
    assert M.shape == (20, 6)
    orthonormal(M, 1e-14)
    assert abs(float(M[:, 5] @ new[:, 0])) > 0.9


def test_scale_of_the_inputs_does_not_matter():
    x = torch.randn(9, 6, dtype=torch.float64) * torch.tensor([1.0, 0.5, 0.2, 0.1, 0.05, 0.01])
    bases = [grow(torch.empty(6, 0).double(), (s * x).mT @ (s * x), 0.98) for s in (1e-30, 1.0, 1e30)]
    for M in bases:
        torch.testing.assert_close(M @ M.mT, bases[1] @ bases[1].mT, rtol=0, atol=1e-12)


def test_tasks_add_up_and_a_network_keeps_them():
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 4, bias=False))
    projector = SubspaceProjector(model, threshold=1.0)
    tasks = [low_rank(6, 20, 3) for _ in range(2)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    kept = []
    for task in tasks:
        projector.remember(task.split(4))
        kept.append((task, model(task).detach()))
    assert [M.shape for M in projector.bases.values()] == [(20, 6), (30, 12)]
    handle = projector.attach(optimizer)
    new = torch.randn(8, 20)
    before = model(new).detach()
    for _ in range(5):
        learn(model, new)
        optimizer.step()
    for task, output in kept:
        torch.testing.assert_close(model(task), output, rtol=0, atol=1e-5)
    assert (model(new) - before).norm() > 0.1 * before.norm()
    handle.remove()
    learn(model, new)
    optimizer.step()
    assert (model(tasks[0]) - kept[0][1]).abs().max() > 1e-3


def test_closures_are_followed_by_a_projection():
    model, past = nn.Linear(6, 3, bias=False), low_rank(9, 6, 2)
    projector = SubspaceProjector(model, threshold=1.0)
    projector.remember([past])
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    projector.attach(optimizer)
    before = model(past).detach()

    def closure():
        learn(model, torch.ones(2, 6))
        return model(torch.ones(2, 6)).square().sum()

    optimizer.step(closure)
    torch.testing.assert_close(model(past), before, rtol=0, atol=1e-4)


def test_remembering_leaves_everything_else_as_it_was():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model[2].eval()
    projector = SubspaceProjector(model)
    learn(model, torch.randn(5, 6))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    random = torch.get_rng_state()
    graphs = []

    def forward(batch):
        assert not model.training
        graphs.append(model(batch["x"]).requires_grad)
        torch.rand(3)

    projector.remember([{"x": torch.randn(4, 6)}], forward)
    random_after = torch.get_rng_state()
    assert graphs == [False]
    assert [m.training for m in model.modules()] == [True, True, True, False, True]
    torch.set_rng_state(random)
    torch.randn(4, 6)
    assert torch.equal(torch.get_rng_state(), random_after)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_an_error_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    projector = SubspaceProjector(model)

    def batches():
        yield torch.randn(4, 6)
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        projector.remember(batches())
    with pytest.raises(ValueError, match="inputs of module '0' hold NaN"):
        projector.remember([torch.randn(4, 6), torch.full((1, 6), torch.nan)])
    with pytest.raises(ValueError, match="reached none of the modules"):
        projector.remember([])
    assert [M.shape[1] for M in projector.bases.values()] == [0, 0]
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert model.training
    learn(model, torch.randn(4, 6))
    before = model[0].weight.grad.clone()
    projector.project_()
    assert torch.equal(model[0].weight.grad, before)


def test_memory_does_not_grow_with_examples():
    """Moments are all that is kept: batches can be a stream, and their order does not matter."""
    model = nn.Linear(6, 2, bias=False)
    x = torch.randn(40_000, 6)
    bases = []
    for parts in (x.split(40_000), x.split(7), x.flip(0).split(999)):
        projector = SubspaceProjector(model, threshold=0.8)
        projector.remember(iter(parts))
        bases.append(projector.bases[""])
    for M in bases[1:]:
        torch.testing.assert_close(M @ M.mT, bases[0] @ bases[0].mT, rtol=0, atol=1e-6)


def test_only_trainable_maps_are_chosen():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    projector = SubspaceProjector(model)
    assert list(projector.bases) == ["1", "3"]
    projector.remember([torch.randn(3, 4)])
    assert repr(projector).startswith("SubspaceProjector(threshold=0.95, directions={'1': ")


def test_modules_that_share_a_weight_share_a_basis():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    projector = SubspaceProjector(model, threshold=1.0)
    projector.remember([low_rank(9, 4, 1)])
    assert {name: M.shape for name, M in projector.bases.items()} == {"0": (4, 2)}


def test_low_precision_weights_and_autocast():
    model = nn.Linear(12, 5, bias=False).bfloat16()
    projector = SubspaceProjector(model, threshold=1.0)
    past = low_rank(20, 12, 3).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        projector.remember([past[:3]])
        M = projector.bases[""]
        assert M.dtype == torch.float32
        assert M.shape == (12, 3)
        learn(model, torch.randn(4, 12).bfloat16())
        plain = model.weight.grad.float()
        projector.project_()
    assert model.weight.grad.dtype == torch.bfloat16
    expected = plain - plain @ M @ M.mT
    torch.testing.assert_close(
        model.weight.grad.float(), expected, rtol=1e-2, atol=1e-2 * float(plain.norm())
    )


def test_state_survives_a_checkpoint():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    first, second = SubspaceProjector(model, 0.9), SubspaceProjector(model, 0.5)
    first.remember([torch.randn(4, 6)])
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    second.load_state_dict(state)
    assert second.threshold == 0.9
    assert all(torch.equal(M, second.bases[name]) for name, M in first.bases.items())
    state["bases"]["0"].zero_()
    assert second.bases["0"].any()
    text = r"belongs to another model: inputs \{'0': 6, '1': 8\}, but \{'0': 3\} here"
    with pytest.raises(ValueError, match=text):
        SubspaceProjector(nn.Sequential(nn.Linear(3, 3)), 0.9).load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: SubspaceProjector([nn.Linear(2, 2)]), TypeError, "model must be a torch.nn.Module; found list"),
        (lambda: SubspaceProjector(nn.LayerNorm(2)), ValueError, "has no Linear, Conv1D or Conv2d whose weight"),
        (lambda: SubspaceProjector(nn.Linear(2, 2).requires_grad_(False)), ValueError, "whose weight requires"),
        (lambda: SubspaceProjector(nn.Linear(2, 2), 0.0), ValueError, "threshold must be finite and above 0"),
        (lambda: SubspaceProjector(nn.Linear(2, 2), 1.1), ValueError, "threshold must be at most 1"),
        (lambda: SubspaceProjector(nn.Linear(2, 2), "all"), TypeError, "threshold must be a number"),
        (lambda: SubspaceProjector(nn.Linear(2, 2)).remember([{"x": torch.ones(1, 2)}]), TypeError, "found dict. Pass forward"),
        (lambda: SubspaceProjector(nn.Linear(2, 2)).load_state_dict({}), ValueError, "state has no 'bases': it is not of"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(call, error, text):
    with pytest.raises(error, match=text):
        call()
