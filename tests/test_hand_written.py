"""docs/from_hand_written.md: projections as they are written by hand, and the line that takes their place."""

import doctest
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import arbitrary

from gemproj import GEM2017, project

torch = pytest.importorskip("torch")
quadprog = pytest.importorskip("quadprog")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "from_hand_written.md"


def gem(g, memories, margin=0.5, eps=1e-3):
    M, v = memories.t().double().numpy(), g.double().numpy()
    if not (M @ v < 0).any():
        return g
    K = M @ M.T + eps * np.eye(len(M))
    lam = quadprog.solve_qp(K, -M @ v, np.eye(len(M)), np.full(len(M), margin))[0]
    return torch.from_numpy(v + lam @ M).to(g.dtype)


def agem(g, r):
    dot = g @ r
    return g - dot / (r @ r) * r if dot < 0 else g


def per_tensor(grads, refs, eps=0.0):
    x = []
    for v, r in zip(grads, refs, strict=True):
        x.append(v - (v * r).sum().clamp(max=0.0) / ((r * r).sum() + eps) * r)
    return x


def pcgrad(grads):
    x = []
    for i, v in enumerate(grads):
        for j, other in enumerate(grads):
            if i != j and v @ other < 0:
                v = v - v @ other / (other @ other) * other
        x.append(v)
    return torch.stack(x)


def orthogonalise(g, G, eps=1e-6):
    K = G @ G.T + eps * torch.eye(len(G), dtype=G.dtype)
    return g - G.T @ torch.linalg.solve(K, G @ g)


def safe_step(grads, refs, ema, decay=0.8):
    for e, r in zip(ema, refs, strict=True):
        e.mul_(decay).add_(r, alpha=1 - decay)
    dot = sum((v * e).sum().item() for v, e in zip(grads, ema, strict=True))
    square = sum((e * e).sum().item() for e in ema)
    return [v - dot / square * e if dot < 0 else v for v, e in zip(grads, ema, strict=True)]


BY_HAND = [gem, agem, per_tensor, pcgrad, orthogonalise, safe_step]
SHAPES = [(3, 4), (4,), (5, 3, 2)]


def close(x, y, tolerance=1e-10):
    torch.testing.assert_close(x, y, rtol=0, atol=tolerance * (1.0 + float(torch.as_tensor(y).norm())))
