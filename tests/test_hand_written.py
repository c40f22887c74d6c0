"""Projections as docs/migrate.md writes them by hand, against the line that takes their place."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pages import blocks
from problems import arbitrary

from gemproj import GEM2017, project

pytest.importorskip("quadprog")  # which the page imports

PAGE = Path(__file__).parent.parent / "docs" / "migrate.md"
NAMES: dict = {}
for block in blocks(PAGE):
    if block.language == "python":
        exec(block.code, NAMES)
gem, agem, per_tensor = (NAMES[name] for name in ("gem", "agem", "per_tensor"))
pcgrad, orthogonalise, safe_step = (NAMES[name] for name in ("pcgrad", "orthogonalise", "safe_step"))
SHAPES = [(3, 4), (4,), (5, 3, 2)]


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=0, atol=tolerance * (1.0 + float(torch.as_tensor(y).norm())))


def draw(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def per_parameter(seed):
    return [draw(seed + i, *shape) for i, shape in enumerate(SHAPES)]


@given(arbitrary(max_t=12), st.sampled_from([0.0, 0.5]), st.sampled_from([1.0, 0.1, 0.01]))
def test_gem(problem, margin, norm):
    """GEM2017 is the reference recipe at any norm of the rows; at norm one the exact projection is close to it."""
    G, g = map(torch.from_numpy, problem)
    G *= norm
    memories = G.t().contiguous()  # one column per task
    close(project(memories.t(), g, method=GEM2017(margin, eps=1e-3)), gem(g, memories, margin), 1e-8)
    if norm == 1.0 and (G @ g < 0).any() and torch.linalg.matrix_rank(G) == len(G):
        close(project(memories.t(), g, margin=margin), gem(g, memories, margin, eps=1e-9), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("seed", range(6))
def test_agem_pcgrad_and_orthogonalise(seed, dtype):
    accuracy = 1e-10 if dtype is torch.float64 else 1e-6
    G = draw(seed, 9, 40).to(dtype)
    close(project(G[:1], G[8]), agem(G[8], G[0]), accuracy)
    for pair in (G[:2], torch.stack([G[0], G[1] - G[0]])):
        close(project(pair, pair), pcgrad(pair), accuracy)
    for t in (1, 3, 8):
        close(project(G[:t], G[8], equality=True), orthogonalise(G[8], G[:t], eps=0.0), accuracy)


@pytest.mark.parametrize("seed", range(0, 30, 10))
def test_per_tensor(seed):
    grads, refs = per_parameter(seed), per_parameter(seed + 5)
    by_hand = per_tensor(grads, refs)
    for v, r, x in zip(grads, refs, by_hand, strict=True):
        close(project([r[None]], [v])[0], x)
    whole = project([r[None] for r in refs], grads)
    flat = torch.cat([a.flatten() for a in grads])
    moved = [torch.cat([a.flatten() for a in x]).sub(flat).norm() for x in (by_hand, whole)]
    assert moved[1] <= moved[0] + 1e-12
    V, R = draw(seed, 2, 7, 30)  # tensors of one shape are a batch
    close(project(R[:, None], V), torch.stack(per_tensor(V, R)))


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_safe_step(seed):
    ema, mine = ([torch.zeros(shape, dtype=torch.float64) for shape in SHAPES] for _ in range(2))
    for step in range(3):
        grads, refs = per_parameter(seed + 100 * step), per_parameter(seed + 100 * step + 5)
        by_hand = safe_step(grads, refs, ema)
        for e, r in zip(mine, refs, strict=True):
            e.lerp_(r, 0.2)
        for x, y in zip(project([e[None] for e in mine], grads), by_hand, strict=True):
            close(x, y)
