"""`DualSolution`, the result of stage 2: multipliers, and measures of their error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import numpy as np

from gemproj._arrays import Array, device_of, from_numpy, namespace, to_numpy
from gemproj._bounds import Bounds
from gemproj._constants import EPS
from gemproj._coordinates import Coordinates, dual_basis, whole_from_gram
from gemproj._error_bound import error_bound
from gemproj._search import OPTIMAL_WITHIN
from gemproj._tspace import Gram, drop_rows, fetch, inverse, matvec
from gemproj.methods._method import Status

# Relative rounding error of entries of the Gram matrix, in eps; the worst case, identical columns, gives 50.
ROUNDINGS = 128.0
# Smallest angles between rows that the error bound takes for resolved, in coordinates from G and from K: a
# little more than those of the search.
FROM_ROWS, FROM_GRAM = 3e-14, 1e-7


def in_numpy(function: Callable[[Any], Any]) -> Callable[[DualSolution], Array]:
    """Compute a method of `DualSolution` in NumPy, and return the result as an array like `multipliers`."""

    @wraps(function)
    def anywhere(self: DualSolution) -> Array:
        plain, lam = self.on_host(), self.multipliers
        with np.errstate(over="ignore", under="ignore"):
            found = function(plain)
        return found if plain is self else from_numpy(found, namespace(lam), device_of(lam))

    return anywhere


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class DualSolution:
    """Multipliers of the constraints, with measures of their error that are computed on demand.

    Attributes
    ----------
    multipliers : array, shape (..., t)
        lam in float64 (float32 on devices without it); ``x = g + G.T @ lam``.
    gram : Gram
        ``K = G G'``, ``b = G g`` and ``gg = |g|^2``, see `gemproj.gram`.
    bounds : Bounds
        Bounds of the multipliers, and the right-hand side h; `lower` and `upper` return them as arrays.
    iterations : array, shape (...)
        Steps or pivots of the method.
    status : array, shape (...)
        Status of each problem, a `gemproj.Status` as int.

    Notes
    -----
    Measures of error are relative to the size of the problem: the norm of g (with a margin, the norm of
    ``g + G.T @ margin``, at least 1e-8 of ``|g| + sum(margin_i |g_i|)``). With h, the size is at least the
    largest ``h_i / |g_i|``. The rounding of K limits their accuracy to 3e-14. All is computed by NumPy, and
    returned as arrays of the caller's library.
    """

    multipliers: Array
    gram: Gram
    bounds: Bounds
    iterations: Any = None  # and no status: on a device that `_read` has not read
    status: Any = None
    _eps: float = EPS  # of the sums in `gram`
    # Whether the method is exact. If so, the free rows have zero slack, and x may be moved to satisfy that.
    _exact: bool = False
    _rows: Coordinates | None = None
    # The same in NumPy, if the caller's arrays are of another library.
    _numpy: DualSolution | None = field(default=None, init=False)

    @in_numpy
    def __repr__(self) -> Any:
        lam, status, worst = self.multipliers, self.status, np.max(self.kkt_residual(), initial=0.0)
        found = "|".join(str(s.name).lower() for s in Status if not status.ndim and s & int(status))
        if status.ndim:
            found = f"{np.count_nonzero(status == 0)} of {status.size} problems optimal"
        active = f"{np.count_nonzero(self.active)} of {lam.size} active"
        return f"DualSolution({found or 'optimal'}, t={lam.shape[-1]}, {active}, KKT residual {worst:.0e})"

    @property
    @in_numpy
    def lower(self) -> Any:
        """Lower bounds, shape (..., t): 0, the margin, or -inf or -penalty for an equality."""
        lam, lower = self.multipliers, self.bounds.lower
        return np.zeros_like(lam) if lower is None else lower

    @property
    @in_numpy
    def upper(self) -> Any:
        """Upper bounds of the multipliers, shape (..., t): infinity, or the penalty."""
        lam, upper = self.multipliers, self.bounds.upper
        return np.full_like(lam, math.inf) if upper is None else upper

    @property
    @in_numpy
    def active(self) -> Any:
        """Boolean (..., t): True for constraints whose multiplier is above its lower bound.

        An equality constraint is active if its multiplier is not zero.
        """
        return np.where(self.lower < 0, self.multipliers != 0, self.multipliers > self.lower)

    @property
    @in_numpy
    def violated(self) -> Any:
        """Boolean (..., t): True for constraints that g violates."""
        s = self.gram.b if self.bounds.h is None else self.gram.b - self.bounds.h
        return (s < 0) | ((self.lower < 0) & (s > 0))

    @property
    @in_numpy
    def free(self) -> Any:
        """Boolean (..., t): True for rows with a multiplier strictly between its bounds (and slack zero)."""
        return (self.multipliers > self.lower) & (self.multipliers < self.upper)

    @property
    def optimal(self) -> Array:
        """Boolean (...): whether the status is ``Status.OPTIMAL``."""
        return self.status == 0

    @property
    @in_numpy
    def refined(self) -> Any:
        """Boolean (...): True for problems in coordinates from G instead of K.

        Their K is ill-conditioned, for the solution or, in `solve_dual`, for its measures of error, or they
        have no more columns than rows.
        """
        return np.zeros(np.shape(self.gram.gg), dtype=bool) if self._rows is None else self._rows.where

    @in_numpy
    def slack(self) -> Any:
        """Return ``G @ x - h``, shape (..., t); negative where x violates a constraint."""
        s, off = self._slack()[0], self.bounds.off
        return s if off is None else np.where(off, math.inf, s)

    @in_numpy
    def kkt_residual(self) -> Any:
        """Return the largest scale-free violation of the optimality conditions, shape (...).

        It is the maximum of primal feasibility ``-s_i / (|g_i| size)``, dual feasibility ``(lower_i - lam_i)
        |g_i| / size`` and complementarity ``(lam_i - lower_i) |s_i| / size^2``, with the slack ``s = G x -
        h``. Without a lower bound, a positive slack is also a violation. With an upper bound c, primal
        feasibility is multiplied by ``min(1, c - lam_i)``. (The minimum keeps a large c from magnifying the
        rounding of s.) The lower bound -c of an equality with a penalty is treated in the same way.

        If the solution was computed from G, this is the residual of the float64 x that `project` returns. It
        includes the distance of x from ``g + G.T @ lam``, which is caused by rounding of large multipliers.
        """
        (s, moved), size, norms = self._slack(), self.size(), self._norms()
        lam, lower, upper = self.multipliers, self.lower, self.upper
        per_size, bounded, open_above = inverse(size)[..., None], np.isfinite(lower), np.isinf(upper)
        s = s * inverse(norms) * per_size
        above = np.where(bounded, lam - lower, 0.0) * norms * per_size
        below = np.where(open_above, 0.0, upper - lam) * norms * per_size
        high = np.where(bounded, np.abs(above), 1.0)
        high = np.where(lower < 0, np.minimum(high, 1.0), high)
        low = np.where(open_above, np.maximum(high, 1.0), np.minimum(np.abs(below), 1.0))
        wrong = np.maximum(np.where(s > 0, s * high, -s * low), np.maximum(-above, -below))
        return self._or_infinity(np.maximum(np.max(wrong, axis=-1, initial=0.0), moved * inverse(size)))

    @in_numpy
    def duality_gap(self) -> Any:
        """Return (primal - dual objective) / size^2, shape (...); can be negative if x is infeasible.

        Row i contributes ``(lam - lower) max(0, s) + (upper - lam) max(0, -s)``. Without an upper bound, its
        contribution is ``(lam - lower) s``, which is negative if the constraint is violated: the primal
        objective contains no penalty for the violation. If x is feasible, ``|x - x*|^2 <= gap size^2``.
        """
        (s, moved), per_size, upper = self._slack(), inverse(self.size()), self.upper
        base = np.where(np.isfinite(self.lower), self.lower, 0.0)
        hinge = np.where(np.isfinite(upper), upper - base, 0.0) * np.maximum(-s, 0.0)
        gap = np.sum(((self.multipliers - base) * s + hinge) * (per_size * per_size)[..., None], axis=-1)
        return self._or_infinity(gap + (moved * per_size) ** 2)

    @in_numpy
    def error_bound(self) -> Any:
        """Return an upper bound on ``|x - x*|`` over the size of the problem, shape (...).

        x* is the exact projection for rows perturbed by rounding. The bound applies to the x that `combine`
        computes in float64, before rounding to the dtype of g. If K does not determine the solution, and G
        cannot be read (nearly dependent rows in `solve_gram`), the bound is ``|x|``.
        """
        size, lam, lower, upper, h = self.size(), self.multipliers, self.lower, self.upper, self._right()
        asked, bound = self._asked(), np.zeros(np.shape(size))
        for i, V, a, read in self._coordinates():
            if size[i]:
                known = (FROM_ROWS, FROM_ROWS) if read else (ROUNDINGS * self._eps, FROM_GRAM)
                bound[i] = error_bound(V, a, h[i], lam[i], lower[i], upper[i], asked[i], *known) / size[i]
                if not read and self._distorted(i, V):
                    bound[i] = max(bound[i], 1.0)
        return self._or_infinity(bound)

    def _distorted(self, i: tuple[int, ...], V: np.ndarray) -> bool:
        """Return whether coordinates of problem i have other angles than K, because |g|^2 is too small."""
        n, K = np.linalg.norm(V, axis=1), self.gram.K if self.gram.K.ndim == 2 else self.gram.K[i]
        apart = np.abs(V @ V.T - K) * inverse(n)[:, None] * inverse(n)
        return bool(apart.max(initial=0.0) > ROUNDINGS * self._eps)

    @in_numpy
    def cosine(self) -> Any:
        """Return the cosine between g and x, shape (...); 1 if g is zero, 0 if x is zero to rounding."""
        (_, b, gg), square = self.gram, np.maximum(self._square(), 0.0)
        inner = np.asarray(gg + np.sum(b * self.multipliers, axis=-1))
        if self._rows is not None:
            inner[self._rows.where] = np.sum(self._rows.a * self._x()[0], axis=-1)
        # One root after the other, because the product of the squares may overflow.
        cosine = inner * inverse(np.sqrt(gg)) * inverse(np.sqrt(square))
        cosine = np.where(self._vanishes(), 0.0, cosine)
        return np.where(gg > 0, cosine, 1.0)

    @in_numpy
    def dual_basis(self) -> Any:
        """Return F (..., t, t) with ``F'F = K_PP^-1`` for the free rows P."""
        lam, free = self.multipliers, self.free
        found = np.zeros((*lam.shape, lam.shape[-1]))
        for i, V, _, _ in self._coordinates():
            found[i] = dual_basis(V, free[i])
        return found

    @in_numpy
    def size(self) -> Any:
        """Return the size of the problem, shape (...), to which measures of error are relative; see Notes."""
        (K, b, gg), lower = self.gram, self.bounds.lower
        if lower is not None:
            margin = np.maximum(lower, 0.0)
            least = self._eps * (np.sqrt(gg) + np.sum(margin * self._norms(), axis=-1)) ** 2
            gg = np.maximum(gg + np.sum(margin * (2.0 * b + matvec(K, margin)), axis=-1), least)
        size = np.sqrt(np.maximum(gg, 0.0))
        return size if self.bounds.h is None else np.maximum(size, self._asked())

    def to(self, move: Callable[[Array], Array]) -> DualSolution:
        """Return this solution with its arrays, in NumPy, converted by `move`."""
        plain = self.on_host()
        found = plain._moved(move)
        if found.multipliers is plain.multipliers:
            return plain
        object.__setattr__(found, "_numpy", plain)
        return found

    def on_host(self) -> DualSolution:
        """Return this solution with NumPy arrays."""
        if type(self.multipliers) is np.ndarray:
            return self
        if self._numpy is None:  # of a solution that `replace` has made
            object.__setattr__(self, "_numpy", self._moved(to_numpy))
        assert self._numpy is not None
        return self._numpy

    def _moved(self, move: Callable[[Array], Array]) -> DualSolution:
        bounds = Bounds(*(a if a is None else move(a) for a in self.bounds))
        others = {name: move(getattr(self, name)) for name in ("multipliers", "iterations", "status")}
        return replace(self, gram=Gram(*map(move, self.gram)), bounds=bounds, **others)

    def _read(self) -> DualSolution:
        """Return a solution with a status, in NumPy, from one copy; rows that are not finite become zero."""
        K, b, gg, lam, *bounds = fetch([*self.gram, self.multipliers, *self.bounds])
        K, b, _ = drop_rows(K, b)
        zeros = np.zeros(gg.shape, dtype=np.int64)
        return DualSolution(lam, Gram(K, b, gg), Bounds(*bounds), zeros, zeros, self._eps)._judged()

    def _judged(self) -> DualSolution:
        """Return this solution with the status STALLED where it misses the optimality conditions."""
        within = OPTIMAL_WITHIN * max(1.0, self._eps / EPS)
        missed = ~(self.kkt_residual() <= within)  # also for NaN
        return replace(self, status=self.status | missed.astype(np.int64) * int(Status.STALLED))

    # What follows is called on NumPy's arrays.
    def _coordinates(self) -> Iterator[tuple[Any, ...]]:
        """Yield the index of each problem, its coordinates V and a, and whether they are from G."""
        known, rows, number = whole_from_gram(self.gram), self._rows, 0
        for i in np.ndindex(known.shape[:-2]):
            if rows is not None and rows.where[i]:
                yield i, rows.V[number if len(rows.V) > 1 else 0], rows.a[number], True
                number += 1
            else:
                yield i, known[i][:-1], known[i][-1], False

    def _norms(self) -> np.ndarray:
        return np.sqrt(self.gram.K.diagonal(0, -2, -1))

    def _right(self) -> np.ndarray:
        """Return h, with zeros for rows that are switched off."""
        h = self.bounds.h
        return np.zeros_like(self.multipliers) if h is None else np.where(self.bounds.off, 0.0, h)

    def _asked(self) -> np.ndarray:
        """Return the distance (...) that h asks x to move at least.

        A row asks for ``h_i / |g_i|`` if h_i is positive (for ``|h_i| / |g_i|`` as an equality), and a row
        with a penalty c cannot move x by more than ``c |g_i|``.
        """
        lower, norms, h = self.lower, self._norms(), self._right()
        h = np.where(np.isfinite(h), h, 0.0)  # on a device that was not read, it may be NaN
        asked = np.where(lower < 0, np.abs(h), np.maximum(h, 0.0)) * inverse(norms)
        most = (self.upper - np.maximum(lower, 0.0)) * np.where(norms > 0, norms, 1.0)
        return np.max(np.minimum(asked, np.where(norms > 0, most, asked)), axis=-1, initial=0.0)

    def _square(self) -> Any:
        """Return ``|x|^2``, which may be below zero by rounding."""
        (K, b, gg), lam = self.gram, self.multipliers
        square = np.asarray(gg + np.sum(lam * (2.0 * b + matvec(K, lam)), axis=-1))
        if self._rows is not None:  # where K has lost the digits of x
            square[self._rows.where] = np.sum(self._x()[0] ** 2, axis=-1)
        return square

    def _or_infinity(self, value: Any) -> Any:
        """Return a measure of error, with infinity for problems of size zero whose x is not zero."""
        return np.where((self.size() == 0) & ~self._vanishes(), math.inf, value)

    def _vanishes(self) -> Any:
        """Return the mask (...) of problems whose x is zero, to the rounding of K, or of rows read from G."""
        square, lower, norms, gg = self._square(), self.bounds.lower, self._norms(), self.gram.gg
        lengths, most = self.multipliers * norms, 8 * (self.multipliers.shape[-1] + 1)
        zero = square <= most * ROUNDINGS * self._eps * (gg + np.sum(lengths * lengths, axis=-1))
        zero = np.where(self.refined, square <= (most * EPS) ** 2 * gg, zero)
        if lower is not None:  # lam has the rounding of the margin
            origin = np.where(np.isfinite(lower), lower, 0.0) * norms
            zero = zero | (square <= (most * EPS) ** 2 * np.sum(origin * origin, axis=-1))
        return zero

    def _slack(self) -> tuple[Any, Any]:
        """Return the slack ``G x - h`` (..., t), and the rounding error of ``g + G'lam`` (...).

        Rows that are switched off have zero. In coordinates, x is computed as in stage 3.
        """
        (K, b, gg), lam, h, off = self.gram, self.multipliers, self._right(), self.bounds.off
        s, moved = matvec(K, lam) + b - h, np.zeros(np.shape(gg))
        if not self._exact:  # this error is negligible for an exact method without coordinates
            moved += EPS * np.sum(np.abs(lam) * self._norms(), axis=-1)
        if self._rows is not None:
            (x, step), where = self._x(), self._rows.where
            moved[where] += np.linalg.norm(step, axis=-1)
            s[where] = np.matmul(self._rows.V, x[..., None])[..., 0] - h[where]
        return s if off is None else np.where(off, 0.0, s), moved

    def _x(self) -> tuple[np.ndarray, np.ndarray]:
        """Return x, as stage 3 computes it, and its correction, where coordinates are from G."""
        assert self._rows is not None
        where, V, a, *_ = self._rows
        x = a + np.matmul(self.multipliers[where][:, None, :], V)[:, 0]
        there = np.matmul(V, x[..., None])[..., 0] - self._right()[where]
        step = np.matmul(self._rows.step(np.where(self.free[where], there, 0.0))[:, None, :], V)[:, 0]
        return x + step, step
