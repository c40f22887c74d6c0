"""The reference: the stages in array-API operations, on any library and device."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemproj._arrays import Array, from_numpy, namespace, to_numpy
from gemproj._checks import drop_not_finite
from gemproj._constants import CHUNK, EPS, LARGE, NARROW_RANGE, NARROW_ROUNDING, WIDE_ROUNDING
from gemproj._problem import Problem
from gemproj._tiles import stacked, tiles
from gemproj._tspace import Gram, Measured, Standard
from gemproj.methods import Method, Outcome


class Portable:
    """Tiles of columns, converted to float64 and multiplied; see `gemproj.backends.Backend`."""

    name = "portable"

    # NumPy would warn of infinities that stage 2 reports, with the row that holds them.
    @np.errstate(over="ignore", invalid="ignore", under="ignore")
    def gram(self, problem: Problem) -> Measured:
        """Sum the products of tiles; those of large float32 problems on the CPU in float32 first."""
        rounding = WIDE_ROUNDING * float(problem.xp.finfo(problem.wide).eps) / EPS
        if not problem.host or problem.columns < LARGE or problem.has_float64():
            return Measured(_sum_products(problem, problem.wide), rounding)
        narrow = _sum_products(problem, problem.xp.float32)
        squares = np.diagonal(narrow.K, axis1=-2, axis2=-1)
        low, high = NARROW_RANGE
        fits = np.all((squares > low) & (squares < high), axis=-1) & (narrow.gg > low) & (narrow.gg < high)
        if not fits.all():
            # Problem by problem, so that none of a batch changes the bits of another.
            wide = _sum_products(problem, problem.wide)
            rows = np.all(fits) if problem.shared else fits[..., None, None]
            fits = [rows, fits[..., None], fits]
            narrow = Gram(*(np.where(ok, a, b) for ok, a, b in zip(fits, narrow, wide, strict=True)))
        return Measured(narrow, NARROW_ROUNDING)

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + diag(1/w) G'lam`` to x, tile by tile in float64, rounded once."""
        xp, t = problem.xp, problem.t
        flat = (-1, t) if problem.shared else (*lam.shape[:-1], 1, t)
        weights = namespace(lam).reshape(lam, flat)
        with problem.without_autocast():
            for k, lead, index, size in tiles(problem):
                part, vector, piece = weights[(*lead, ...)], problem.vector[k][index], x[k][index]
                batch = () if problem.shared else part.shape[:-2]
                rows = xp.astype(xp.reshape(problem.rows[k][index], (*batch, t, size)), problem.wide)
                step = _product(part, rows, problem)
                step = xp.reshape(step, vector.shape)
                if problem.weight is not None:
                    step = step / problem.weight[k][index]
                piece[...] = xp.astype(vector + step, piece.dtype)


def solve(method: Method, dual: Standard, start: Array | None, *, only_multipliers: bool = False) -> Outcome:
    """Call the method, on a device where asked without rows that are not finite."""
    if not only_multipliers:
        return method.solve(*dual, start)
    K, b, dropped = drop_not_finite(dual.K, dual.b)
    found, xp = method.solve(K, b, dual.lower, dual.upper, start), namespace(b)
    return found._replace(multipliers=xp.where(dropped, xp.zeros_like(b), found.multipliers))


def _product(weights: Array, rows: Array, problem: Problem) -> Array:
    """Return weights (..., m, t) times rows (..., t, n), without rows that no weight uses.

    Zero times what is not finite is not zero, and a row that was left out may hold that. On the CPU
    NumPy multiplies, with the same bits whatever the size of the batch.
    """
    if problem.host:
        rows, xp = to_numpy(rows), namespace(weights)
    else:
        xp = problem.xp
    used = xp.any(weights != 0, axis=-2)[..., None]
    product = xp.matmul(weights, xp.where(used, rows, xp.zeros_like(rows)))
    return from_numpy(product, problem.xp, problem.device) if problem.host else product


def _sum_products(problem: Problem, dtype: Any) -> Gram:
    """Return K, b and |g|^2, from products in `dtype` that are summed in the widest dtype."""
    t, batch = problem.t, problem.batch
    lead = () if problem.shared else batch
    m = int(np.prod(batch)) if problem.shared else 1
    shape = (*lead, t + m, t)
    if problem.host:
        total, squares = np.zeros(shape), np.zeros((*lead, m))
    else:
        options = {"dtype": problem.wide, "device": problem.device}
        total, squares = problem.xp.zeros(shape, **options), problem.xp.zeros((*lead, m), **options)
    xp = namespace(total)
    with problem.without_autocast():
        for at, tile in stacked(problem, dtype):
            G, g = tile[..., :t, :], tile[..., t:, :]
            # Not the tile times its own transpose, which takes a path in NumPy that is slow for few rows.
            multiply = _sum_chunks if dtype != problem.wide else _times_transpose
            total[(*at, ...)] += multiply(tile, G)
            g = xp.astype(g, total.dtype, copy=False)
            squares[(*at, ...)] += xp.sum(g * g, axis=-1)
    K, b = total[..., :t, :], xp.reshape(total[..., t:, :], (*batch, t))
    return Gram(K, b, xp.reshape(squares, batch))


def _times_transpose(left: Array, right: Array) -> Array:
    xp = namespace(left)
    return xp.matmul(left, xp.matrix_transpose(right))


def _sum_chunks(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return left (..., p, n) times right' (..., t, n)', with float32 sums over 512 columns at most."""
    n = left.shape[-1] // CHUNK * CHUNK
    total = np.matmul(
        left[..., n:].astype(np.float64), np.swapaxes(right[..., n:], -1, -2).astype(np.float64)
    )
    if n:
        chunks = [
            np.moveaxis(a[..., :n].reshape(*a.shape[:-1], n // CHUNK, CHUNK), -2, -3) for a in (left, right)
        ]
        products = np.matmul(chunks[0], np.swapaxes(chunks[1], -1, -2))
        total += products.sum(axis=-3, dtype=np.float64)
    return total
