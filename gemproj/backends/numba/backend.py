"""The three stages on a table of addresses."""

from __future__ import annotations

import math

import numpy as np

from gemproj._arrays import Array
from gemproj._constants import NARROW_RANGE, NARROW_ROUNDING, RESOLVED, WIDE_ROUNDING
from gemproj._problem import Problem
from gemproj._tspace import Gram, Measured, matvec, normalise
from gemproj.backends.numba.addresses import AddressTable
from gemproj.backends.numba.threads import share
from gemproj.backends.portable import Portable
from gemproj.methods import Exact, Method, Outcome, Status
from gemproj.methods.exact import CLOSE, nearly_active, resolution

# Entries of K that a thread takes at a time.
_WORK = 1 << 14
_NONE = np.empty((0, 0))


class Numba:
    """Compiled loops over arrays where they lie; see `gemproj.backends.Backend`."""

    name = "numba"

    def __init__(self, table: AddressTable) -> None:
        self.table = table

    def gram(self, problem: Problem) -> Measured:
        """Sum the products of chunks of columns in all threads."""
        t = problem.t
        total = self.table.gram()
        K = total.reshape(-1, t + 1, t + 1)[0, :t, :t] if problem.shared else total[..., :t, :t]
        gram = Gram(K, total[..., t, :t], total[..., t, t])
        if self.table.wide:
            return Measured(gram, WIDE_ROUNDING)
        squares = np.diagonal(K, axis1=-2, axis2=-1)
        low, high = NARROW_RANGE
        # Problem by problem, so that none of a batch changes the bits of another.
        fits = np.all((squares > low) & (squares < high), axis=-1) & (gram.gg > low) & (gram.gg < high)
        if problem.shared and not fits.all():
            return Portable().gram(problem)
        for i in map(tuple, np.argwhere(~fits)):
            one = Portable().gram(problem.at(i) if problem.batch else problem).gram
            for to, value in zip(gram, one, strict=True):
                to[i] = value
        return Measured(gram, NARROW_ROUNDING)

    def solve(
        self,
        method: Method,
        K: Array,
        b: Array,
        lower: Array | None,
        upper: Array | None,
        start: Array | None,
    ) -> Outcome:
        """Search in compiled loops; methods other than Exact are array operations."""
        return solve(method, K, b, lower, upper, start)

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, chunk by chunk in float64, rounded once."""
        if not self.table.combine(lam, x):
            Portable().combine(problem, lam, x)


def solve(
    method: Method, K: Array, b: Array, lower: Array | None, upper: Array | None, start: Array | None
) -> Outcome:
    """Run stage 2 on NumPy arrays, see `gemproj.backends.Backend`."""
    if type(method) is Exact and b.shape[-1]:
        return solve_exact(K, b, lower, upper, start)
    return method.solve(K, b, lower, upper, start)


def solve_exact(
    K: np.ndarray, b: np.ndarray, lower: np.ndarray | None, upper: np.ndarray | None, start: np.ndarray | None
) -> Outcome:
    """Solve a batch exactly, one problem after the other, without Python in between."""
    from gemproj.backends.numba.search import search

    batch, t = b.shape[:-1], b.shape[-1]
    count = math.prod(batch)
    Ks = np.ascontiguousarray(K, dtype=np.float64).reshape(-1, t, t)
    bs = np.ascontiguousarray(b, dtype=np.float64).reshape(count, t)

    def rows(a: np.ndarray | None) -> np.ndarray:
        if a is None:
            return _NONE
        return np.ascontiguousarray(np.broadcast_to(a, b.shape), dtype=np.float64).reshape(count, t)

    bounds = rows(lower), rows(upper), rows(start)
    lam, apart = np.empty((count, t)), np.empty(count)
    pivots, status = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    step, unclear = max(1, _WORK // t**2), []

    def work(i: int) -> None:
        first, last = i * step, min(count, (i + 1) * step)
        unclear.append(search(Ks, bs, *bounds, first, last, CLOSE, lam, pivots, status, apart))

    share(work, -(-count // step))
    if any(unclear):
        for i in np.flatnonzero(apart < CLOSE):
            low = None if lower is None else bounds[0][i]
            one = normalise(Ks[i if len(Ks) > 1 else 0], bs[i], low, None, lam[i])
            near = nearly_active(one.start, matvec(one.K, one.start) + one.b, low)
            apart[i] = resolution(one.K, near)
        status[apart < RESOLVED] |= int(Status.UNRESOLVED)
    lam = lam.reshape(b.shape).astype(b.dtype, copy=False)
    return Outcome(lam, pivots.reshape(batch), status.reshape(batch), apart.reshape(batch))
