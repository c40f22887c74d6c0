"""Gradient projection memory, a baseline of the study: linear maps that keep what they do to past inputs."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import gemproj  # noqa: E402
from examples.study.gpm import SubspaceProjector, grow  # noqa: E402

nn = torch.nn


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def orthonormal(M, accuracy):
    torch.testing.assert_close(M.mT @ M, torch.eye(M.shape[1], dtype=M.dtype), rtol=0, atol=accuracy)


def learn(model, batch):
    """Gradients of something, on other inputs than those that are remembered."""
    model.zero_grad()
    (model(batch).square().sum() + model(batch).sum()).backward()


@pytest.mark.parametrize("rank", [1, 4])
def test_it_is_the_projection_with_equalities(rank):
    model = nn.Linear(12, 5).double()
    projector = SubspaceProjector(model, threshold=1.0)
    projector.remember([torch.randn(50, rank).double() @ torch.randn(rank, 12).double()], model)
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


@pytest.mark.parametrize("threshold", [0.5, 0.97])
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


def test_a_basis_is_never_more_than_a_basis():
    M = torch.empty(5, 0, dtype=torch.float64)
    for k in range(8):
        x = torch.randn(3, 5, dtype=torch.float64) * 10.0 ** -(k % 5)
        M = grow(M, x.mT @ x, 1.0)
        assert M.shape[1] <= 5
        orthonormal(M, 1e-13)
    assert M.shape == (5, 5)
    assert grow(M[:, :2], torch.zeros(5, 5).double(), 1.0).shape == (5, 2)


def test_a_network_keeps_its_tasks():
    model = nn.Sequential(nn.Linear(20, 30, bias=False), nn.ReLU(), nn.Linear(30, 4, bias=False))
    projector = SubspaceProjector(model, threshold=1.0)
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), []
    for task in (torch.randn(6, 3) @ torch.randn(3, 20) for _ in range(2)):
        projector.remember(task.split(4), model)
        kept.append((task, model(task).detach()))
    assert [M.shape for M in projector.bases.values()] == [(20, 6), (30, 12)]
    assert not any(m._forward_pre_hooks for m in model.modules())
    new = torch.randn(8, 20)
    before = model(new).detach()
    for _ in range(5):
        learn(model, new)
        projector.project_()
        optimizer.step()
    for task, output in kept:
        torch.testing.assert_close(model(task), output, rtol=0, atol=1e-5)
    assert (model(new) - before).norm() > 0.1 * before.norm()
