"""The portable backend: the stages in operations of the array API, for any library and device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemproj import _search
from gemproj._arrays import Array, empty_as, is_row_major, namespace
from gemproj._problem import Problem
from gemproj._tiles import stacked, tiles
from gemproj._tspace import Dual, Gram, times_rows
from gemproj.backends.enumeration import solve_few

__all__ = ["bind", "combine", "gram", "name", "solve", "solve_few"]

name = "portable"
# What stands for options that are not given.
_FLOAT64, _NONE, _USUAL = np.dtype(np.float64), np.empty((0, 0, 0)), (0.0, 0.0, math.inf, 0.0)


# NumPy's warnings of overflow are switched off, because stage 2 raises an error that names the row.
_silent = np.errstate(over="ignore", invalid="ignore", under="ignore")
_plain = _silent(_search.solve)


@_silent
def gram(problem: Problem) -> Gram:
    """Return K, b and |g|^2, summed in float64 (float32 on a device that has no float64)."""
    t, batch = problem.t, problem.batch
    # With a shared G there is one tile for all problems, with all gradients as rows.
    outer, m = ((), math.prod(batch)) if problem.shared else (batch, 1)
    # On a device, [G; g] times its transpose gives K, b and |g|^2 in one operation. NumPy is slow at this
    # product for few rows. For many gradients, it would also compute the products between gradients.
    whole = m == 1 and not problem.host

    def zeros(*shape: int) -> Array:
        return problem.to_host(problem.xp.zeros(shape, dtype=problem.wide, device=problem.device))

    total = zeros(*outer, t + m, t + whole)
    squares = total[..., t:, t] if whole else zeros(*outer, m)
    xp = namespace(total)
    with problem.without_autocast():
        for lead, tile in stacked(problem):
            # Views, because for `total[...] += ` torch would copy the sum onto itself.
            part, right, g = total[(*lead, ...)], tile[..., : t + whole, :], tile[..., t:, :]
            part += xp.matmul(tile, xp.matrix_transpose(right))
            if not whole:
                squares[(*lead, ...)] += xp.sum(g * g, axis=-1)
    K, b = total[..., :t, :t], xp.reshape(total[..., t:, :t], (*batch, t))
    return Gram(K, b, xp.reshape(squares, batch))


@_silent
def combine(problem: Problem, lam: Array, x: list[Array]) -> None:
    """Write ``g + diag(1/w) G'lam`` to x, tile by tile in float64, rounded once."""
    xp, t, batch = problem.xp, problem.t, problem.batch
    weights = namespace(lam).reshape(
        lam, (math.prod(batch), t) if problem.shared else (*lam.shape[:-1], 1, t)
    )
    # Blocks with one axis of columns: views, except where entries are not in row-major order.
    made = [a if is_row_major(a) or a.ndim == len(batch) + 1 else empty_as([a])[0] for a in x]
    flat = [xp.reshape(a, (*batch, n)) for a, n in zip(made, problem.sizes, strict=True)]
    with problem.without_autocast():
        for k, lead, at, (rows, vector, *weight) in tiles(problem):
            rows = xp.astype(rows, problem.wide, copy=False)
            # On the CPU NumPy multiplies, because its products have the same bits for any batch size.
            step = problem.to_caller(times_rows(weights[(*lead, ...)], problem.to_host(rows)))
            step = xp.reshape(step, vector.shape)
            if weight:
                step = step / weight[0]
            flat[k][at] = xp.astype(vector + step, flat[k].dtype, copy=False)
    for to, a in zip(x, made, strict=True):
        if a is not to:
            to[...] = a


def bind(problem: Problem) -> None:
    """Return None: this module serves every problem."""


def solve(dual: Dual, run: Any = _plain) -> tuple[np.ndarray, ...]:
    """Return multipliers (..., t), status, pivots and sums of multipliers, see `gemproj._search.solve`.

    `run` gets the arguments of that function, all arrays in float64 and row-major order.
    """
    batch, (t, m) = dual.linear.shape[:-1], dual.rows.shape[-2:]
    count = math.prod(batch)
    rows = _float64(dual.rows, (math.prod(dual.rows.shape[:-2]), t, m))
    lam, numbers, total = np.empty((count, t)), np.empty((2, count), np.int64), np.empty(count)
    options = _NONE
    if any(a is not None for a in dual[4:]):
        options = np.empty((count, 4, t))
        for k, (a, usual) in enumerate(zip(dual[4:], _USUAL, strict=True)):
            options[:, k] = usual if a is None else a.reshape((count, t))
    run(0, count, *dual[:2], rows, _float64(dual.linear, (count, m)), options, lam, numbers, total)
    return lam.reshape((*batch, t)), *[a.reshape(batch) for a in (*numbers, total)]


def _float64(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    a = a.reshape(shape)
    return a if a.dtype is _FLOAT64 and a.flags.carray else np.array(a, np.float64, order="C")
