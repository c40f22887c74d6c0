"""The projections that people use today, as published, for comparison in the same table."""

from __future__ import annotations

import numpy as np
import quadprog
import torch


def agem_published(r: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """A-GEM on one reference gradient r."""
    dot = torch.dot(g, r)
    return g - dot / torch.dot(r, r) * r if dot < 0 else g


def gem_published(G: torch.Tensor, g: torch.Tensor, margin: float = 0.0, eps: float = 1e-3) -> torch.Tensor:
    """GEM: all of G to float64 on the CPU, quadprog on the ridged dual, if a constraint is violated."""
    if not (G @ g < 0).any():
        return g
    rows, vector = G.double().numpy(), g.double().numpy()
    t = len(rows)
    P = rows @ rows.T
    P = 0.5 * (P + P.T) + eps * np.eye(t)
    lam = quadprog.solve_qp(P, -(rows @ vector), np.eye(t), np.full(t, margin))[0]
    return torch.from_numpy(lam @ rows + vector).to(g.dtype)


def igem_published(G: torch.Tensor, g: torch.Tensor, steps: int = 3, c: float = 0.9) -> torch.Tensor:
    """I-GEM: normalised rows, power iteration, then every step passes over G twice."""
    rows = G / G.norm(dim=1, keepdim=True)
    v = torch.ones(len(rows))
    for _ in range(2):
        v = rows @ (rows.T @ v)
        v = v / v.norm()
    eta = c / torch.dot(v, rows @ (rows.T @ v))
    lam = torch.zeros(len(rows))
    for _ in range(steps):
        lam = (lam - eta * (rows @ (rows.T @ lam) + rows @ g)).clamp(min=0.0)
    return g + rows.T @ lam
