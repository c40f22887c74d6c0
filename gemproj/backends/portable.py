"""The portable backend: the stages in operations of the array API, for any library and device."""

from __future__ import annotations

import math

import numpy as np

from gemproj._arrays import Array, namespace
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
    def gram(self, problem: Problem) -> Gram:
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
            for lead, tile in stacked(problem, problem.wide):
                # Views, because for `total[...] += ` torch would copy the sum onto itself.
                part, right, g = total[(*lead, ...)], tile[..., : t + whole, :], tile[..., t:, :]
                part += xp.matmul(tile, xp.matrix_transpose(right))
                if not whole:
                    squares[(*lead, ...)] += xp.sum(g * g, axis=-1)
        K, b = total[..., :t, :t], xp.reshape(total[..., t:, :t], (*batch, t))
        return Gram(K, b, xp.reshape(squares, batch))

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + diag(1/w) G'lam`` to x, tile by tile in float64, rounded once."""
        xp, t = problem.xp, problem.t
        flat = (-1, t) if problem.shared else (*lam.shape[:-1], 1, t)
        weights = namespace(lam).reshape(lam, flat)
        with problem.without_autocast():
            for k, lead, at, size in tiles(problem):
                part, vector, piece = weights[(*lead, ...)], problem.vector[k][at], x[k][at]
                batch = () if problem.shared else part.shape[:-2]
                rows = xp.reshape(problem.rows[k][at], (*batch, t, size))
                rows = xp.astype(rows, problem.wide, copy=False)
                # On the CPU NumPy multiplies, because its products have the same bits for any batch size.
                step = problem.to_caller(times_rows(part, problem.to_host(rows)))
                step = xp.reshape(step, vector.shape)
                if problem.weight is not None:
                    step = step / problem.weight[k][at]
                piece[...] = xp.astype(vector + step, piece.dtype, copy=False)


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
