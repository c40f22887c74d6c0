"""The exact projection: an active-set method on the normalised Gram matrix, without a ridge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gemproj._arrays import Array, device_of, from_numpy, is_torch, namespace, on_host, to_numpy
from gemproj._checks import check_count
from gemproj._constants import CLOSE, MOST_ROWS, MOST_SETS, NEAR_ZERO, RESOLVED, SLAB
from gemproj._tspace import Standard, matvec, normalise, smallest_pivot, submatrix
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._enumeration import enumerate_active_sets, factorise_active_sets
from gemproj.methods._faces import Tableau
from gemproj.methods._method import Method, Outcome, Status, exact_status
from gemproj.methods.pgd import FISTA

# Maximum number of elements of the tableaux that enumeration holds at once.
_MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Exact(Method):
    """The exact solution of GEM's quadratic program, to rounding; the default method.

    Rows are normalised, so that rows of norm 1e-6 are treated like rows of norm one, and no ridge is
    added. Up to 8 rows (5 with a penalty), all active sets are solved at once, without synchronisation.
    For more rows, Lawson and Hanson's active-set method runs on the CPU, problem by problem; from a
    device this takes one synchronising copy of t*t numbers. On the CPU with numba, the active-set method
    is compiled and used for every t. Linearly dependent rows (repeated tasks, opposite tasks, t > d)
    need no special care. If K is too inaccurate to decide whether rows are dependent, the status is
    UNRESOLVED; on the CPU, `solve_dual` and `project` first solve again from G.

    Parameters
    ----------
    refine : int, default 0
        Number of refinement steps for numerically dependent rows on a device, without synchronisation.
        Each step reads G once more, computes ``s = G x - h`` from it and corrects the multipliers.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import Exact
    >>> Exact()(np.array([[1.0, 0.5], [0.5, 1.0]]), np.array([-1.0, 1.0]))
    array([1., 0.])
    """

    refine: int = 0

    def __post_init__(self) -> None:
        check_count(self.refine, "refine", 0)

    def solve(  # noqa: D102
        self, K: Array, b: Array, lower: Array = None, upper: Array = None, warm_start: Array = None
    ) -> Outcome:
        from gemproj.backends import stage_two  # `backends` imports the methods

        xp, device, dtype = namespace(b), device_of(b), b.dtype
        shape = (*np.broadcast_shapes(tuple(K.shape[:-2]), tuple(b.shape[:-1])), b.shape[-1])
        if K.ndim > 2:
            K = xp.broadcast_to(K, (*shape, shape[-1]))
        vectors = (b, lower, upper, warm_start)
        arrays = [K, *(a if a is None else xp.broadcast_to(a, shape) for a in vectors)]
        if on_host(device):  # arrays of t-space are NumPy arrays
            arrays = [a if a is None else to_numpy(xp.astype(a, xp.float64, copy=False)) for a in arrays]
        *dual, start = arrays
        # Exact() instead of self: if the `solve` of a derived class calls this function, self would recurse.
        found = stage_two(dual[1]).solve(Exact(), Standard(*dual), start)
        if callable(found.status):
            found = found._replace(status=found.status())
        elif isinstance(found.status, int):
            found = found._replace(status=np.full(shape[:-1], found.status))
        lam, *others = (from_numpy(a, xp, device) for a in found)
        return Outcome(xp.astype(lam, dtype, copy=False), *others)


def solve_portable(
    K: Array, b: Array, lower: Array | None, upper: Array | None, start: Array | None
) -> Outcome:
    """Return the outcome for arrays of any library: by enumeration for few rows, else problem by problem.

    On a device the status is a function that computes it on demand: `project` never reads the status, and
    computing it takes more operations than the solution. `resolution` is None on a device.
    """
    t = b.shape[-1]
    if t == 0:
        return Outcome(b * 0.0, 0, int(Status.OPTIMAL))
    given, iterations = Standard(K, b, lower, upper), 0
    if upper is None and enumerable(t, upper) and is_torch(b):
        lam = _in_slabs(factorise_active_sets, *given)
    else:
        K, b, lower, upper, start, scale = normalise(*given, start)
        if enumerable(t, upper):
            lam = _in_slabs(enumerate_active_sets, K, b, lower, upper)
        else:
            lam, iterations = _one_by_one(K, b, lower, upper, start)
        if isinstance(b, np.ndarray):
            return Outcome(lam * scale, iterations, *_judge(K, b, lower, upper, lam))
        lam = lam * scale
    return Outcome(lam, iterations, status_later(given, lam))


def status_later(dual: Standard, lam: Array) -> Callable[[], Array]:
    """Return a function that computes the status of a solution on a device."""
    return lambda: _judge(*normalise(*dual, lam)[:5])[0]


def enumerable(t: int, upper: Array | None) -> bool:
    """Return whether t rows have few enough active sets for enumeration."""
    return (2 if upper is None else 3) ** t <= MOST_SETS


def _judge(K: Array, b: Array, lower: Array | None, upper: Array | None, lam: Array) -> tuple[Array, Array]:
    """Return the status of the solution of a normalised problem, and its resolution."""
    xp, s = namespace(b), matvec(K, lam) + b
    resolved = resolution(K, nearly_active(lam, s, lower))
    unresolved = xp.astype(resolved < RESOLVED, xp.int64) * int(Status.UNRESOLVED)
    return exact_status(lam, s, lower, upper) + unresolved, resolved


def nearly_active(lam: Array, s: Array, lower: Array | None) -> Array:
    """Return the mask (..., t) of active and nearly active rows; all other rows have positive slack."""
    xp = namespace(lam)
    size = 1.0 + xp.sum(xp.abs(lam), axis=-1, keepdims=True)
    near = (lam != 0) | (s <= NEAR_ZERO * size)
    return near if lower is None else near | (lower < 0)


def resolution(K: Array, rows: Array) -> Array:
    """Return the smallest eigenvalue of K (..., t, t) on the rows of a mask (..., t), for rows of norm one.

    If the eigenvalue is not small, a lower bound is returned instead. On a device the smallest pivot, an
    upper bound, is returned instead.
    """
    xp, device = namespace(K), device_of(K)
    if not on_host(device):
        return smallest_pivot(K, rows)
    K, rows = to_numpy(K), to_numpy(rows)
    # Gershgorin's lower bound on the smallest eigenvalue suffices for most problems.
    K = np.broadcast_to(K, (*rows.shape, K.shape[-1]))
    across = np.sum(np.abs(K), axis=-1, where=rows[..., None, :]) - 1.0
    result = np.asarray(1.0 - np.max(across, axis=-1, where=rows, initial=0.0))
    close = result < CLOSE
    if np.count_nonzero(close) == 1:
        i = tuple(np.argwhere(close)[0])
        result[i] = np.linalg.eigvalsh(K[i][np.ix_(rows[i], rows[i])])[0]
    elif close.any():  # the identity in place of all other rows adds no smaller eigenvalue
        at, step = np.argwhere(close), max(1, SLAB // K.shape[-1] ** 2)
        for i in (tuple(at[k : k + step].T) for k in range(0, len(at), step)):
            result[i] = np.linalg.eigvalsh(submatrix(K[i], rows[i]))[..., 0]
    return from_numpy(result, xp, device)


def _in_slabs(
    enumerate_sets: Callable[..., Array], K: Array, b: Array, lower: Array | None, upper: Array | None
) -> Array:
    """Return the solutions of a batch, enumerated in slabs of problems to bound memory."""
    xp = namespace(b)
    batch, t = b.shape[:-1], b.shape[-1]
    sets = (2 if upper is None else 3) ** t
    count = math.prod(batch)
    slab = max(1, _MOST_ELEMENTS // (sets * t * (t + 1)))
    if count <= slab:
        return enumerate_sets(K, b, lower, upper)
    K = xp.reshape(xp.broadcast_to(K, (*batch, t, t)), (count, t, t))
    b, lower, upper = (
        a if a is None else xp.reshape(xp.broadcast_to(a, (*batch, t)), (count, t)) for a in (b, lower, upper)
    )
    parts = []
    for i in range(0, count, slab):
        low, high = (a if a is None else a[i : i + slab] for a in (lower, upper))
        parts.append(enumerate_sets(K[i : i + slab], b[i : i + slab], low, high))
    return xp.reshape(xp.concat(parts, axis=0), (*batch, t))


def _one_by_one(
    K: Array, b: Array, lower: Array | None, upper: Array | None, start: Array | None
) -> tuple[Array, Array]:
    """Return the multipliers and the numbers of pivots of active-set searches, on the CPU.

    For arrays on a device this takes one synchronising copy to the CPU, and one copy back.
    """
    if not isinstance(b, np.ndarray):
        return _on_host(K, b, lower, upper, start)
    if b.shape[-1] > MOST_ROWS:
        start = FISTA(steps=200, normalize=False).solve(K, b, lower, upper, start).multipliers
    K = np.broadcast_to(K, (*b.shape, b.shape[-1]))
    found, pivots = np.empty(b.shape), np.empty(b.shape[:-1], np.int64)
    for i in np.ndindex(b.shape[:-1]):
        low, high, first = (a if a is None else np.broadcast_to(a, b.shape)[i] for a in (lower, upper, start))
        found[i], pivots[i], _ = solve_active_set(Tableau(K[i], b[i]), low, high, first)
    return found, pivots


def _on_host(
    K: Array, b: Array, lower: Array | None, upper: Array | None, start: Array | None
) -> tuple[Array, Array]:
    """Return the result of `_one_by_one` for arrays on a device, from the fastest CPU backend."""
    xp, given = namespace(b), (K, b, lower, upper, start)
    found = Exact().solve(*_fetch([a if a is None else xp.astype(a, b.dtype, copy=False) for a in given]))
    both = np.concatenate([found.multipliers, found.iterations[..., None]], axis=-1)
    both = from_numpy(both.astype(found.multipliers.dtype), xp, device_of(b))
    return both[..., :-1], xp.astype(both[..., -1], xp.int64)


def _fetch(arrays: list[Array | None]) -> list[np.ndarray | None]:
    """Return arrays of one dtype as NumPy arrays, in one copy from the device."""
    given = [a for a in arrays if a is not None]
    xp = namespace(given[0])
    flat = to_numpy(xp.concat([xp.reshape(a, (-1,)) for a in given]))
    ends = np.cumsum([math.prod(a.shape) for a in given])
    parts = iter(np.split(flat, ends[:-1]))
    return [a if a is None else next(parts).reshape(tuple(a.shape)) for a in arrays]
