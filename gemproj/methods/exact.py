"""The exact projection: an active-set method on the normalised Gram matrix, without a ridge."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gemproj._array import device_of, from_numpy, namespace, on_host, to_numpy
from gemproj._threads import share
from gemproj.compiled import installed
from gemproj.methods._active_set import Tableau, solve_active_set
from gemproj.methods._constants import NEAR_ZERO
from gemproj.methods._enumeration import enumerate_active_sets, smallest_pivot
from gemproj.methods._method import (
    Array,
    Method,
    Outcome,
    Status,
    exact_status,
    matvec,
    normalise,
)
from gemproj.methods.fista import FISTA

# Enumeration holds all active sets of all problems at once: 2^8, or 3^5 with an upper bound.
_MOST_SETS = 256
_MOST_ELEMENTS = 1 << 22
# Entries of K that a thread takes at a time.
_WORK = 1 << 14
# Rows that are so far apart, by a bound that is cheap, are not looked at more closely.
CLOSE = 0.05
_NONE = np.empty((0, 0))
# From here on it pays to let a first-order method guess the active set.
_LARGE = 168
# The resolution below which K has lost too many digits: x is then off by 1e-16 / 1e-4 or more.
RESOLVED = 1e-4


@dataclass(frozen=True)
class Exact(Method):
    """The solution of GEM's quadratic program to rounding; the default.

    Rows are normalised, so that norms of 1e-6 are projected like norms of one, and no ridge is
    added. On the CPU Lawson and Hanson's active-set method runs problem by problem, compiled where
    numba is installed; without it, all active sets of up to 8 rows (5 with a penalty) are tried at
    once. On a CUDA device with Triton either is one launch, up to 168 rows, that waits for nothing. On
    other devices sets are tried up to t = 8 too, without waiting; above, the search runs on the CPU and
    waits once to fetch t*t numbers. Linearly dependent rows (repeated tasks, opposite tasks, t > d)
    need no special care. Where K cannot tell whether rows are dependent, the status says so; on the
    CPU, `solve_dual` and `project` then return to G.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import Exact
    >>> Exact()(np.array([[1.0, 0.5], [0.5, 1.0]]), np.array([-1.0, 1.0]))
    array([1., 0.])
    """

    accepts: ClassVar[frozenset[str]] = Method.accepts | {"refine"}

    def solve(self, K, b, warm_start=None, upper=None):  # noqa: D102
        t = b.shape[-1]
        if t == 0:
            return Outcome(b * 0.0, 0, int(Status.OPTIMAL))
        if type(b) is np.ndarray and installed():
            return _compiled(K, b, warm_start, upper)
        xp, device = namespace(b), device_of(b)
        if on_host(device) and installed():
            found = _compiled(*(a if a is None else to_numpy(a) for a in (K, b, warm_start, upper)))
            return Outcome(*(a if a is None else from_numpy(a, xp, device) for a in found))
        K, b, start, upper, scale = normalise(K, b, warm_start, upper)
        if (2 if upper is None else 3) ** t <= _MOST_SETS:
            lam, iterations = _in_slabs(K, b, upper), 0
        else:
            lam, iterations = _one_by_one(K, b, upper, start)
        s = matvec(K, lam) + b
        resolved = resolution(K, _deciding(lam, s))
        lost = xp.astype(resolved < RESOLVED, xp.int64) * int(Status.UNRESOLVED)
        return Outcome(lam * scale, iterations, exact_status(lam, s, upper) + lost, resolved)


def _compiled(K, b, start, upper):
    """Solve a batch of NumPy arrays, one problem after the other, in compiled loops."""
    from gemproj.compiled.search import search

    batch, t, dtype = b.shape[:-1], b.shape[-1], b.dtype
    count = math.prod(batch)

    totals = np.ones((count, t + 1, t + 1))
    totals[:, :t, :t], totals[:, :t, t] = K.reshape(count, t, t), b.reshape(count, t)

    def read(a):
        if a is None:
            return _NONE
        return np.array(np.broadcast_to(a, b.shape), dtype=np.float64, order="C").reshape(count, t)

    start, upper = read(start), read(upper)
    lam, pivots = np.empty((count, t)), np.empty(count, dtype=np.int64)
    status, apart = np.empty(count, dtype=np.int64), np.empty(count)
    step, unusual = max(1, _WORK // t**2), []

    def work(i):
        first, last = i * step, min(count, (i + 1) * step)
        unusual.append(
            search(
                totals, start, _NONE, upper, first, last, -1.0, math.inf, CLOSE, lam, pivots, status, apart
            )
        )

    share(work, -(-count // step))
    if any(unusual):
        for i in np.flatnonzero(apart < CLOSE):
            one = normalise(totals[i, :t, :t], totals[i, :t, t], lam[i], None)
            apart[i] = resolution(one.K, _deciding(one.start, matvec(one.K, one.start) + one.b))
        status[apart < RESOLVED] |= int(Status.UNRESOLVED)
    if np.issubdtype(dtype, np.floating):
        lam = lam.astype(dtype, copy=False)
    lam = lam.reshape((*batch, t))
    return Outcome(lam, pivots.reshape(batch), status.reshape(batch), apart.reshape(batch))


def _deciding(lam: Array, s: Array) -> Array:
    """Tell which rows, (..., t), decide what x is: others are inactive, whatever the rounding of K."""
    xp = namespace(lam)
    return (lam > 0) | (s <= NEAR_ZERO * (1.0 + xp.sum(lam, axis=-1, keepdims=True)))


def resolution(K: Array, rows: Array) -> Array:
    """Return how far from dependent the chosen `rows`, boolean (..., t), of norm one are, 1 at best.

    The smallest eigenvalue of their cosines, or a lower bound that is not small. On a device the
    smallest pivot, which is never below it.
    """
    xp, device = namespace(K), device_of(K)
    if not on_host(device):
        return smallest_pivot(K, rows)
    K, rows = to_numpy(K), to_numpy(rows)
    # Rows are independent where the diagonal dominates (Gershgorin): enough to clear most problems at once.
    across = np.sum(np.abs(K), axis=-1, where=rows[..., None, :]) - 1.0
    result = np.asarray(1.0 - np.max(across, axis=-1, where=rows, initial=0.0))
    for i in map(tuple, np.argwhere(result < CLOSE)):
        result[i] = np.linalg.eigvalsh(K[i][np.ix_(rows[i], rows[i])])[0]
    return from_numpy(result, xp, device)


def _in_slabs(K, b, upper):
    """Enumerate a batch in slabs, so that memory stays bounded whatever its size."""
    xp = namespace(K)
    batch, t = b.shape[:-1], b.shape[-1]
    sets = (2 if upper is None else 3) ** t
    count = int(np.prod(batch))
    slab = max(1, _MOST_ELEMENTS // (sets * t * (t + 1)))
    if count <= slab:
        return enumerate_active_sets(K, b, upper)
    K, b = xp.reshape(K, (count, t, t)), xp.reshape(b, (count, t))
    upper = None if upper is None else xp.reshape(upper, (count, t))
    parts = []
    for i in range(0, count, slab):
        bound = None if upper is None else upper[i : i + slab]
        parts.append(enumerate_active_sets(K[i : i + slab], b[i : i + slab], bound))
    return xp.reshape(xp.concat(parts, axis=0), (*batch, t))


def _one_by_one(K, b, upper, start):
    """Solve problem after problem on the CPU and bring the answers back to the device."""
    xp, device, dtype = namespace(K), device_of(b), b.dtype
    K, b, upper, start = (
        a if a is None else to_numpy(a).astype(np.float64, copy=False) for a in (K, b, upper, start)
    )
    if b.shape[-1] > _LARGE:
        start = FISTA(steps=200, normalize=False).solve(K, b, start, upper).multipliers
    lam, pivots = np.empty_like(b), np.empty(b.shape[:-1], dtype=np.int64)
    for i in np.ndindex(b.shape[:-1]):
        bound, first = (a if a is None else a[i] for a in (upper, start))
        lam[i], pivots[i], _ = solve_active_set(Tableau(K[i], b[i]), None, bound, first)
    return xp.astype(from_numpy(lam, xp, device), dtype, copy=False), from_numpy(pivots, xp, device)
