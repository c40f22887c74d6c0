"""The portable backend: the stages in operations of the array API, for any library and device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemproj._arrays import Array, empty_as, is_row_major, namespace
from gemproj._constants import CHUNK, EPS, LARGE, NARROW_RANGE, NARROW_ROUNDING, WIDE_ROUNDING
from gemproj._problem import Problem
from gemproj._tiles import stacked, tiles
from gemproj._tspace import Gram, Standard, times_rows
from gemproj.methods import Exact, Method, Outcome
from gemproj.methods.exact import solve_portable


class Portable:
    """Stages 1 and 3 tile by tile, in float64; see `gemproj.backends.Backend`."""

    name = "portable"

    # NumPy's warnings of overflow are switched off, because stage 2 raises an error that names the row.
    @np.errstate(over="ignore", invalid="ignore", under="ignore")
    def gram(self, problem: Problem) -> tuple[Gram, float]:
        """Return K, b and |g|^2, and their rounding error; large float32 problems use float32 sums."""
        rounding = WIDE_ROUNDING * float(problem.xp.finfo(problem.wide).eps) / EPS
        if not problem.host or problem.columns < LARGE or problem.has_float64():
            return _sum_products(problem, problem.wide), rounding
        narrow = _sum_products(problem, problem.xp.float32)
        fits = fits_float32(narrow)
        if not fits.all():
            # The dtype is chosen per problem: no problem of a batch changes the bits of another problem.
            wide = _sum_products(problem, problem.wide)
            rows = np.all(fits) if problem.shared else fits[..., None, None]
            masks = rows, fits[..., None], fits
            narrow = Gram(*(np.where(ok, a, b) for ok, a, b in zip(masks, narrow, wide, strict=True)))
        return narrow, NARROW_ROUNDING

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + diag(1/w) G'lam`` to x, tile by tile in float64, rounded once."""
        xp, t, batch = problem.xp, problem.t, problem.batch
        weights = namespace(lam).reshape(lam, (-1, t) if problem.shared else (*lam.shape[:-1], 1, t))
        # Blocks with one axis of columns: views, except where entries are not in row-major order.
        views = [is_row_major(a) or a.ndim == len(batch) + 1 for a in x]
        flat = [
            xp.reshape(a if view else empty_as(a), (*batch, n))
            for a, view, n in zip(x, views, problem.sizes, strict=True)
        ]
        with problem.without_autocast():
            for k, lead, at, (rows, vector, *weight) in tiles(problem):
                rows = xp.astype(rows, problem.wide, copy=False)
                # On the CPU NumPy multiplies, because its products have the same bits for any batch size.
                step = problem.to_caller(times_rows(weights[(*lead, ...)], problem.to_host(rows)))
                step = xp.reshape(step, vector.shape)
                if weight:
                    step = step / weight[0]
                flat[k][at] = xp.astype(vector + step, flat[k].dtype, copy=False)
        for a, view, part in zip(x, views, flat, strict=True):
            if not view:
                a[...] = xp.reshape(part, a.shape)


def solve(method: Method, dual: Standard, start: Array | None) -> Outcome:
    """Return the outcome of ``method.solve``; for `Exact`, the outcome of `solve_portable`."""
    run = solve_portable if type(method) is Exact else method.solve
    return run(*dual, start)


def drop_not_finite(K: Array, b: Array) -> tuple[Array, Array, Array]:
    """Return K and b with zeros for the rows that are not finite, and the mask (..., t) of the finite rows.

    No value is read, so a device is not synchronised. If g is not finite, no entry of b is finite: all rows
    are left out, and x is g.
    """
    xp = namespace(b)
    # `isfinite` would take four operations in torch.
    kept, zero = xp.abs(xp.linalg.diagonal(K) + xp.abs(b)) < math.inf, xp.zeros_like(b)
    rows = kept
    if K.ndim <= b.ndim:  # one K for many b: if row i is finite but b_i is not, g is not finite
        rows = xp.abs(xp.linalg.diagonal(K)) < math.inf
        kept = rows & xp.all(kept | ~rows, axis=-1, keepdims=True)
    K = xp.where(rows[..., :, None] & rows[..., None, :], K, xp.zeros_like(K))
    return K, xp.where(kept, b, zero), kept


def fits_float32(gram: Gram) -> np.ndarray:
    """Return the mask (...) of problems whose products all fit into float32; for arrays on the CPU."""
    low, high = NARROW_RANGE
    squares = np.diagonal(gram.K, axis1=-2, axis2=-1)
    return np.all((squares > low) & (squares < high), axis=-1) & (gram.gg > low) & (gram.gg < high)


def _sum_products(problem: Problem, dtype: Any) -> Gram:
    """Return K, b and |g|^2, from products in `dtype` that are summed in the widest dtype of the device."""
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
        for lead, tile in stacked(problem, dtype):
            # Views, because for `total[...] += ` torch would copy the sum onto itself.
            part, right, g = total[(*lead, ...)], tile[..., : t + whole, :], tile[..., t:, :]
            part += (
                xp.matmul(tile, xp.matrix_transpose(right))
                if dtype == problem.wide
                else _sum_chunks(tile, right)
            )
            if not whole:
                g = xp.astype(g, total.dtype, copy=False)
                squares[(*lead, ...)] += xp.sum(g * g, axis=-1)
    K, b = total[..., :t, :t], xp.reshape(total[..., t:, :t], (*batch, t))
    return Gram(K, b, xp.reshape(squares, batch))


def _sum_chunks(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return left (..., p, n) times the transpose of right (..., t, n), with float32 sums per chunk."""
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
