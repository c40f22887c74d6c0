"""Every kernel, once, on problems so small that a sanitizer can watch: ``python -m ...each_kernel``."""

from __future__ import annotations

import sys

import torch

from asv_benchmarks.reports.gpu.device import DEVICE
from gemproj import FISTA, PGD, Exact
from gemproj.backends.triton._layout import lay_out, lay_out_batch
from gemproj.backends.triton.combine import combine
from gemproj.backends.triton.gram import gram
from gemproj.backends.triton.solve import solve

SIZES = (3, 9, 33)
# Columns of one problem, so many that partial sums are added in groups; of its first block; of each problem
# of a batch; and problems of that.
D, CUT, SMALL, BATCH = 20_001, 1000, 40, 3


def launch_all(t: int) -> float:
    """Launch all kernels for t rows; return the worst relative error of what they leave."""
    # Drawn and judged on the CPU: a sanitizer need not watch the kernels of others.
    G, g = torch.randn(t, D) + 0.1, torch.randn(D)
    Gs, gs = torch.randn(BATCH, t, SMALL) + 0.1, torch.randn(BATCH, SMALL)
    lam = torch.rand(BATCH, t, dtype=torch.float64)
    G_, g_, Gs_, gs_, lam_ = (a.to(DEVICE) for a in (G, g, Gs, gs, lam))
    rows, vector = [G_[:, :CUT], G_[:, CUT:]], [g_[:CUT], g_[CUT:]]
    errors = []

    def compare(found: torch.Tensor, right: torch.Tensor) -> None:
        errors.append(float((found.cpu().double() - right).abs().max() / right.abs().max()))

    whole, wide = G.double(), g.double()
    one, blocks, many = lay_out([G_], [g_]), lay_out(rows, vector), lay_out_batch(Gs_, gs_)
    assert one is not None
    assert blocks is not None
    assert many is not None
    stacked = torch.cat([whole, wide[None]])
    for at in (one, blocks):
        compare(gram(at)[0], stacked @ stacked.T)
    total = gram(many)
    compare(total[:, :-1, :-1], Gs.double() @ Gs.double().mT)
    K = total[:, :-1, :-1]
    b = total[:, :-1, -1] - 2.0 * K.sum(-1)  # so that many rows are active
    for method in (Exact(), PGD(), FISTA(steps=5)):
        for upper in (None, torch.ones_like(b)) if t <= 9 else (None,):
            found = solve(K, b, method=method, upper=upper).multipliers
            here = (a if a is None else a.cpu() for a in (K, b, None, upper))
            compare(found, method.solve(*here).multipliers)
    x, y, xs = torch.empty_like(g_), torch.empty_like(g_), torch.empty_like(gs_)
    combine(one, lam_[0], [x])
    combine(blocks, lam_[0], [y[:CUT], y[CUT:]])
    combine(many, lam_, [xs])
    for found in (x, y):
        compare(found, wide + lam[0] @ whole)
    compare(xs, gs.double() + (lam[:, None] @ Gs.double())[:, 0])
    return max(errors)


def main() -> int:
    """Launch everything; return 1 if an answer is wrong."""
    torch.manual_seed(20171208)
    worst = max(launch_all(t) for t in SIZES)
    print(f"worst relative error {worst:.0e}")
    return int(not worst < 1e-6)


if __name__ == "__main__":
    sys.exit(main())
