"""`DualSolution`, the result of stage 2: multipliers and their certificates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gemproj import _certificate
from gemproj._arrays import Array, device_of, from_numpy, namespace, on_host, to_numpy
from gemproj._bounds import Bounds
from gemproj._constants import EPS, GRAM_RESOLVES, ROWS_RESOLVE, WIDE_ROUNDING
from gemproj._coordinates import from_gram, settle, unit_rows
from gemproj._tspace import Gram, inverse, matvec
from gemproj.methods._method import Status


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class DualSolution:
    """Multipliers of the constraints, with certificates that are computed on demand.

    Attributes
    ----------
    multipliers : array, shape (..., t)
        lam in float64 (float32 on devices without it); ``x = g + G.T @ lam``.
    gram : Gram
        ``K = G G'``, ``b = G g`` and ``gg = |g|^2``, see `gemproj.gram`.
    bounds : Bounds
        Bounds of the multipliers, and the right-hand side h; `lower` and `upper` return them as arrays.
    iterations : int or array, shape (...)
        Steps or pivots of the method; 0 for enumeration, which has none.

    Notes
    -----
    Certificates are relative to the size of the problem: the norm of g (with a margin, the norm of
    ``g + G.T @ margin``). With h, the size is at least the largest ``h_i / |g_i|``. The rounding of K limits
    the accuracy of certificates to 3e-14, or to 8e-6 if products of a large problem were summed in float32.
    """

    multipliers: Array
    gram: Gram
    bounds: Bounds
    iterations: Any
    # An array, or one int for all problems. On a device also a function that computes the status from this
    # solution on demand, because `project` never reads the status.
    _status: Any
    _rounding: float = WIDE_ROUNDING
    # Whether the method is exact. If so, the free rows have zero slack, and x may be moved to satisfy that.
    _exact: bool = False
    # Coordinates (..., t + 1, t + 1) of [G; g] for problems with an ill-conditioned K, else zeros.
    _coordinates: np.ndarray | None = None
    # K_PP^+ of the free rows P as two factors (..., 2, t, t) for the problems solved in coordinates, else
    # zeros. It maps the slack of x to a correction of the multipliers.
    _correction: np.ndarray | None = None

    def __repr__(self) -> str:
        t, batch, device = self.multipliers.shape[-1], tuple(self.gram.gg.shape), device_of(self.gram.gg)
        if not on_host(device):  # reading values would synchronise
            return f"DualSolution(t={t}, batch={batch}, on {device})"
        status = to_numpy(self.status)
        if batch:
            solved = (
                f"{np.count_nonzero(status == 0)} of {status.size} problems optimal, t={t}, batch={batch}"
            )
            worst = np.max(to_numpy(self.kkt_residual()), initial=0.0)
            return f"DualSolution({solved}, largest KKT residual {worst:.0e})"
        ended = "|".join(str(s.name).lower() for s in Status if s & int(status)) or "optimal"
        active = f"{np.count_nonzero(to_numpy(self.active))} of {t} active"
        return f"DualSolution({ended}, {active}, KKT residual {float(self.kkt_residual()):.0e})"

    @property
    def status(self) -> Array:
        """Status of each problem, a `gemproj.Status` as int, shape (...)."""
        found, gg = self._status, self.gram.gg
        if callable(found):
            found = found(self)
        if isinstance(found, int):
            xp = namespace(gg)
            found = xp.full(tuple(gg.shape), found, dtype=xp.int64, device=device_of(gg))
        object.__setattr__(self, "_status", found)
        return found

    @property
    def lower(self) -> Array:
        """Lower bounds of the multipliers, shape (..., t): 0, the margin, or -inf for an equality."""
        lam, base, unbounded = self.multipliers, self.bounds.base, self.bounds.unbounded
        xp = namespace(lam)
        lower = xp.zeros_like(lam) if base is None else base
        return lower if unbounded is None else xp.where(unbounded, xp.full_like(lam, -math.inf), lower)

    @property
    def upper(self) -> Array:
        """Upper bounds of the multipliers, shape (..., t): infinity, or the penalty."""
        lam, upper = self.multipliers, self.bounds.upper
        return namespace(lam).full_like(lam, math.inf) if upper is None else upper

    @property
    def active(self) -> Array:
        """Boolean (..., t): True for constraints whose multiplier is above its lower bound.

        An equality constraint is active if its multiplier is not zero.
        """
        lam, equality, xp = self.multipliers, self.bounds.equality, namespace(self.multipliers)
        active = lam > (0 if self.bounds.base is None else self.bounds.base)
        return active if equality is None else xp.where(equality, lam != 0, active)

    @property
    def violated(self) -> Array:
        """Boolean (..., t): True for constraints that g violates."""
        return self.bounds.violated(self.gram.b if self.bounds.h is None else self.gram.b - self.bounds.h)

    @property
    def free(self) -> Array:
        """Boolean (..., t): True for rows with a multiplier strictly between its bounds (and slack zero)."""
        return (self.multipliers > self.lower) & (self.multipliers < self.upper)

    @property
    def optimal(self) -> Array:
        """Boolean (...): whether the status is ``Status.OPTIMAL``."""
        return self.status == 0

    @property
    def refined(self) -> Array:
        """Boolean (...): True for problems whose G was read again, on the CPU, because K is ill-conditioned.

        This is independent of ``Exact(refine=...)``.
        """
        xp, device = namespace(self.status), device_of(self.status)
        if self._coordinates is None:
            return xp.zeros_like(self.status, dtype=xp.bool)
        return from_numpy(self._coordinates.any(axis=(-2, -1)), xp, device)

    def slack(self) -> Array:
        """Return ``G @ x - h``, shape (..., t); negative where x violates a constraint."""
        return self._slack()[0]

    def kkt_residual(self) -> Array:
        """Return the largest scale-free violation of the optimality conditions, shape (...).

        If the solution was computed from G, this is the residual of the float64 x that `project` returns. It
        includes the distance of x from ``g + G.T @ lam``, which is caused by rounding of large multipliers.
        """
        s, moved = self._slack()
        size, xp = self._size(), namespace(s)
        norms = xp.sqrt(xp.linalg.diagonal(self.gram.K))
        found = _certificate.kkt_residual(norms, s, size, self.multipliers, self.lower, self.upper)
        return self._or_infinity(xp.maximum(found, moved * inverse(size)))

    def duality_gap(self) -> Array:
        """Return (primal - dual objective) / size^2, shape (...); can be negative if x is infeasible."""
        (s, moved), size = self._slack(), self._size()
        gap = _certificate.duality_gap(s, size, self.multipliers, self.lower, self.upper)
        return self._or_infinity(gap + (moved * inverse(size)) ** 2)

    def error_bound(self) -> Array:
        """Return an upper bound on ``|x - x*| / |g|``, shape (...). Synchronises a device.

        x* is the exact projection for rows perturbed by rounding. The bound applies to the x that `combine`
        computes in float64, before rounding to the dtype of g. If K does not determine the solution (nearly
        dependent rows, on a device), the bound is ``|x|``.
        """
        known = from_gram(Gram(*map(to_numpy, self.gram)))
        lam, lower, upper, size = map(to_numpy, (self.multipliers, self.lower, self.upper, self._size()))
        h = None if self.bounds.h is None else to_numpy(self.bounds.h)
        bound = np.zeros(size.shape)
        for i in np.ndindex(size.shape):
            F, rounding, resolves = known[i], self._rounding, GRAM_RESOLVES
            if self._coordinates is not None and self._coordinates[i].any():
                F, rounding, resolves = self._coordinates[i], ROWS_RESOLVE, ROWS_RESOLVE
            unit = unit_rows(F, None if h is None else h[i], lower[i], upper[i], lam[i])
            if unit is None or size[i] == 0.0:
                continue
            # ``g + G'margin`` may cancel digits: rounding is then relative to the sum of the norms.
            lengths = np.linalg.norm(F, axis=0)
            whole = lengths[-1] + float(np.abs(unit.base) @ lengths[:-1])
            rounding = rounding * max(1.0, whole / unit.size)
            found = _certificate.error_bound(*unit[:6], rounding=rounding, resolves=resolves)
            bound[i] = found * unit.size / size[i]
        return self._or_infinity(from_numpy(bound, namespace(self.gram.gg), device_of(self.gram.gg)))

    def cosine(self) -> Array:
        """Return the cosine between g and x, shape (...); 1 if g is zero, 0 if x is zero to rounding."""
        cosine, zero = _certificate.cosine(self.gram, self.multipliers), self._vanishes()
        return namespace(zero).where(zero & (self.gram.gg > 0), cosine * 0.0, cosine)

    def to(self, move: Callable[[Array], Array]) -> DualSolution:
        """Return this solution with its NumPy arrays converted by `move` to the library of the caller."""

        def moved(a: Any) -> Any:
            if isinstance(a, tuple):  # Gram and Bounds
                return type(a)(*map(moved, a))
            return move(a) if isinstance(a, np.ndarray | np.generic) else a

        lam = move(self.multipliers)
        if lam is self.multipliers:
            return self
        gram, bounds, iterations, status = map(moved, (self.gram, self.bounds, self.iterations, self._status))
        return replace(self, multipliers=lam, gram=gram, bounds=bounds, iterations=iterations, _status=status)

    def _size(self) -> Array:
        """Return the size of the problem, shape (...), to which certificates are relative; see Notes."""
        K, b, gg = self.gram
        xp, base, h = namespace(gg), self.bounds.base, self.bounds.h
        if base is not None:
            margin = xp.maximum(base, xp.zeros_like(base))
            gg = gg + xp.sum(margin * (2.0 * b + matvec(K, margin)), axis=-1)
        size = xp.sqrt(xp.maximum(gg, xp.zeros_like(gg)))
        if h is not None and h.shape[-1]:
            demand = xp.maximum(h, xp.zeros_like(h))
            if self.bounds.equality is not None:
                demand = xp.where(self.bounds.equality, xp.abs(h), demand)
            size = xp.maximum(size, xp.max(demand * inverse(xp.sqrt(xp.linalg.diagonal(K))), axis=-1))
        return size

    def _or_infinity(self, value: Array) -> Array:
        """Return a certificate, with infinity for problems of size zero whose x is not zero."""
        xp = namespace(value)
        undefined = (self._size() == 0) & ~self._vanishes()
        return xp.where(undefined, xp.full_like(value, math.inf), value)

    def _vanishes(self) -> Array:
        """Return the mask (...) of problems whose x is zero, to the rounding of K."""
        (K, b, gg), lam = self.gram, self.multipliers
        xp = namespace(gg)
        square = gg + xp.sum(lam * (2.0 * b + matvec(K, lam)), axis=-1)
        lengths = lam * xp.sqrt(xp.linalg.diagonal(K))
        whole, most = gg + xp.sum(lengths * lengths, axis=-1), 8 * (lam.shape[-1] + 1)
        zero = square <= most * self._rounding * whole
        if self.bounds.base is not None:  # lam = base + mu has the rounding of base
            origin = self.bounds.base * xp.sqrt(xp.linalg.diagonal(K))
            zero = zero | (square <= (most * EPS) ** 2 * xp.sum(origin * origin, axis=-1))
        return zero

    def _slack(self) -> tuple[Array, Array]:
        """Return the slack ``G x - h`` (..., t), and the rounding error of ``g + G'lam`` (...)."""
        (K, b, gg), lam, h = self.gram, self.multipliers, self.bounds.h
        xp = namespace(gg)
        s = matvec(K, lam) + (b if h is None else b - h)
        # This error is negligible for an exact method without coordinates. The loop handles coordinates.
        moved = xp.zeros_like(gg)
        if not self._exact:
            moved = EPS * xp.sum(xp.abs(lam) * xp.sqrt(xp.linalg.diagonal(K)), axis=-1)
        if self._coordinates is None:
            return s, moved
        s, moved, lam, free = (np.array(to_numpy(a)) for a in (s, moved, self.multipliers, self.free))
        right = None if h is None else to_numpy(h)
        for i in map(tuple, np.argwhere(self._coordinates.any(axis=(-2, -1)))):
            A, a = self._coordinates[i][:, :-1], self._coordinates[i][:, -1]
            here = None if right is None else right[i]
            x, away = settle(A, a, lam[i], free[i] & self._exact, here)
            moved[i] += away
            s[i] = A.T @ x - (0.0 if here is None else here)
        device = device_of(gg)
        return from_numpy(s, xp, device), from_numpy(moved, xp, device)
