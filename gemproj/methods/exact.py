"""The exact projection: an active-set method on the normalised Gram matrix, without a ridge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import array_api_compat
import numpy as np

from gemproj._array import from_numpy, on_host, to_numpy
from gemproj.methods._active_set import Tableau, solve_active_set
from gemproj.methods._enumeration import enumerate_active_sets, smallest_pivot
from gemproj.methods._method import Array, Method, Outcome, Status, exact_status, matvec, normalise
from gemproj.methods.fista import FISTA

# Enumeration holds all active sets of all problems at once: 2^8, or 3^5 with an upper bound.
_MOST_SETS = 256
_MOST_ELEMENTS = 1 << 22
# From here on it pays to let a first-order method guess the active set.
_LARGE = 168
# The resolution below which K has lost too many digits: x is then off by 1e-16 / 1e-4 or more.
RESOLVED = 1e-4


@dataclass(frozen=True)
class Exact(Method):
    """The solution of GEM's quadratic program to rounding; the default.

    Rows are normalised, so that norms of 1e-6 are projected like norms of one, and no ridge is
    added. Up to t = 8 (5 with a penalty) all active sets are tried at once, for a whole batch and
    without waiting for a device. Above, Lawson and Hanson's method runs on the CPU, problem by
    problem: on a device this synchronises once to fetch t*t numbers. Linearly dependent rows
    (repeated tasks, opposite tasks, t > d) need no special care. Where K cannot tell whether rows
    are dependent, the status says so; on the CPU, `solve_dual` and `project` then return to G.

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
        xp = array_api_compat.array_namespace(K, b)
        if t == 0:
            return Outcome(b * 0.0, 0, int(Status.OPTIMAL))
        K, b, start, upper, scale = normalise(K, b, warm_start, upper)
        if (2 if upper is None else 3) ** t <= _MOST_SETS:
            lam, iterations = _in_slabs(K, b, upper), 0
        else:
            lam, iterations = _one_by_one(K, b, upper, start)
        s = matvec(K, lam) + b
        # All other rows can be told to be inactive, whatever the rounding of K; these decide what x is.
        deciding = (lam > 0) | (s <= 1e-9 * (1.0 + xp.sum(lam, axis=-1, keepdims=True)))
        resolved = resolution(K, deciding)
        lost = xp.astype(resolved < RESOLVED, xp.int64) * int(Status.UNRESOLVED)
        return Outcome(lam * scale, iterations, exact_status(lam, s, upper) + lost, resolved)


def resolution(K: Array, rows: Array) -> Array:
    """Return how far from dependent the chosen `rows`, boolean (..., t), of norm one are, 1 at best.

    The smallest eigenvalue of their cosines, or a lower bound that is not small. On a device the
    smallest pivot, which is never below it.
    """
    xp, device = array_api_compat.array_namespace(K), array_api_compat.device(K)
    if not on_host(device):
        return smallest_pivot(K, rows)
    K, rows = to_numpy(K), to_numpy(rows)
    # Rows are independent where the diagonal dominates (Gershgorin): enough to clear most problems at once.
    across = np.sum(np.abs(K), axis=-1, where=rows[..., None, :]) - 1.0
    result = np.asarray(1.0 - np.max(across, axis=-1, where=rows, initial=0.0))
    for i in map(tuple, np.argwhere(result < 0.1)):
        result[i] = np.linalg.eigvalsh(K[i][np.ix_(rows[i], rows[i])])[0]
    return from_numpy(result, xp, device)


def _in_slabs(K, b, upper):
    """Enumerate a batch in slabs, so that memory stays bounded whatever its size."""
    xp = array_api_compat.array_namespace(K, b)
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
    xp, device, dtype = array_api_compat.array_namespace(K, b), array_api_compat.device(b), b.dtype
    K, b, upper, start = (
        a if a is None else to_numpy(a).astype(np.float64, copy=False) for a in (K, b, upper, start)
    )
    if b.shape[-1] > _LARGE:
        start = FISTA(steps=200, normalize=False).solve(K, b, start, upper).multipliers
    lam, pivots = np.empty_like(b), np.empty(b.shape[:-1], dtype=np.int64)
    for i in np.ndindex(b.shape[:-1]):
        bound, first = (a if a is None else a[i] for a in (upper, start))
        lam[i], pivots[i], _ = solve_active_set(Tableau(K[i], b[i]), bound, first)
    return xp.astype(from_numpy(lam, xp, device), dtype, copy=False), from_numpy(pivots, xp, device)
