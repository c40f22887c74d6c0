"""The published recipes in use today, and the memory floor."""

from typing import Any

import numpy as np


def floor(G: Any, g: Any, out: Any) -> Any:
    """Read G and g twice and write x once, without any use of them: no method needs less."""
    for _ in range(2):
        G.sum()
        g.sum()
    out[...] = 0.0
    return out


def agem_published(r: Any, g: Any) -> Any:
    """A-GEM on one reference gradient r."""
    dot = g @ r
    return g - dot / (r @ r) * r if dot < 0 else g


def gem_published(G: Any, g: Any, margin: float = 0.0, eps: float = 1e-3) -> Any:
    """GEM on torch: G to float64 on the CPU, quadprog on the ridged dual, if a constraint is violated."""
    import quadprog
    import torch

    if not (G @ g < 0).any():
        return g
    rows, vector = G.double().numpy(), g.double().numpy()
    t = len(rows)
    P = rows @ rows.T
    P = 0.5 * (P + P.T) + eps * np.eye(t)
    lam = quadprog.solve_qp(P, -(rows @ vector), np.eye(t), np.full(t, margin))[0]
    return torch.from_numpy(lam @ rows + vector).to(g.dtype)


def igem_published(G: Any, g: Any, steps: int = 3, c: float = 0.9) -> Any:
    """I-GEM on torch: normalised rows, power iteration, then steps that read G twice each."""
    import torch

    rows = G / G.norm(dim=1, keepdim=True)
    v = rows.new_ones(len(rows))
    for _ in range(2):
        v = rows @ (rows.T @ v)
        v = v / v.norm()
    eta = c / torch.dot(v, rows @ (rows.T @ v))
    lam = rows.new_zeros(len(rows))
    for _ in range(steps):
        lam = (lam - eta * (rows @ (rows.T @ lam) + rows @ g)).clamp(min=0.0)
    return g + rows.T @ lam
