"""`DualSolution`, the result of stage 2: multipliers and their certificates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gemproj import _certificate
from gemproj._arrays import Array, device_of, from_numpy, namespace, on_host, to_numpy
from gemproj._bounds import Bounds
from gemproj._constants import (
    EPS,
    GRAM_RESOLVES,
    MISSED,
    NEAR_ZERO,
    OPTIMAL_WITHIN,
    RESOLVED,
    ROWS_RESOLVE,
    WIDE_ROUNDING,
)
from gemproj._coordinates import Rows, dual_basis, from_gram
from gemproj._tspace import Gram, drop_rows, inverse, matvec, smallest_pivot
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
    iterations : array, shape (...)
        Steps or pivots of the method; 0 on a device that was not read.

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
    _status: Any  # None on a device that was not read: computed on demand, because `project` never needs it
    _rounding: float = WIDE_ROUNDING
    # Whether the method is exact. If so, the free rows have zero slack, and x may be moved to satisfy that.
    _exact: bool = False
    _rows: Rows | None = None
    _finite: Any = field(default=None, init=False)  # on a device, see `_known`

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
        if self._status is None:
            object.__setattr__(self, "_status", self._status_on_device())
        return self._status

    @property
    def lower(self) -> Array:
        """Lower bounds, shape (..., t): 0, the margin, or -inf or -penalty for an equality."""
        lam, lower = self.multipliers, self.bounds.lower
        return namespace(lam).zeros_like(lam) if lower is None else lower

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
        lam, lower = self.multipliers, self.bounds.lower
        return lam > 0 if lower is None else namespace(lam).where(lower < 0, lam != 0, lam > lower)

    @property
    def violated(self) -> Array:
        """Boolean (..., t): True for constraints that g violates."""
        lower, _, h = self.bounds
        s = self.gram.b if h is None else self.gram.b - h
        return s < 0 if lower is None else (s < 0) | ((lower < 0) & (s > 0))

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
        """Boolean (...): True for problems that were solved in coordinates from G instead of K.

        These are problems whose K is ill-conditioned, and those with no more columns than rows.
        """
        gg = self.gram.gg
        where = np.zeros(tuple(gg.shape), dtype=bool) if self._rows is None else self._rows.where
        return from_numpy(where, namespace(gg), device_of(gg))

    def slack(self) -> Array:
        """Return ``G @ x - h``, shape (..., t); negative where x violates a constraint."""
        s, off = self._slack()[0], self.bounds.off
        return s if off is None else namespace(s).where(off, math.inf, s)

    def kkt_residual(self) -> Array:
        """Return the largest scale-free violation of the optimality conditions, shape (...).

        If the solution was computed from G, this is the residual of the float64 x that `project` returns. It
        includes the distance of x from ``g + G.T @ lam``, which is caused by rounding of large multipliers.
        """
        s, moved = self._slack()
        size, xp = self.size(), namespace(s)
        norms = xp.sqrt(xp.linalg.diagonal(self._gram().K))
        found = _certificate.kkt_residual(norms, s, size, self.multipliers, self.lower, self.upper)
        return self._or_infinity(xp.maximum(found, moved * inverse(size)))

    def duality_gap(self) -> Array:
        """Return (primal - dual objective) / size^2, shape (...); can be negative if x is infeasible."""
        (s, moved), size = self._slack(), self.size()
        gap = _certificate.duality_gap(s, size, self.multipliers, self.lower, self.upper)
        return self._or_infinity(gap + (moved * inverse(size)) ** 2)

    def error_bound(self) -> Array:
        """Return an upper bound on ``|x - x*| / |g|``, shape (...). Synchronises a device.

        x* is the exact projection for rows perturbed by rounding. The bound applies to the x that `combine`
        computes in float64, before rounding to the dtype of g. If K does not determine the solution (nearly
        dependent rows, on a device), the bound is ``|x|``.
        """
        gram, size = Gram(*map(to_numpy, self._gram())), to_numpy(self.size())
        bounds = Bounds(*(None if a is None else to_numpy(a) for a in self.bounds))
        lam, lower, upper = map(to_numpy, (self.multipliers, self.lower, self.upper))
        h = np.zeros_like(lam) if bounds.h is None else np.where(bounds.off, 0.0, bounds.h)
        asked = bounds.asked(np.broadcast_to(np.sqrt(np.diagonal(gram.K, axis1=-2, axis2=-1)), lam.shape))
        bound = np.zeros(size.shape)
        for i, V, a, read in self._coordinates(gram):
            if size[i]:
                known = (ROWS_RESOLVE, ROWS_RESOLVE) if read else (self._rounding, GRAM_RESOLVES)
                given = V, a, h[i], lam[i], lower[i], upper[i], asked[i], *known
                bound[i] = _certificate.error_bound(*given) / size[i]
        return self._or_infinity(from_numpy(bound, namespace(self.gram.gg), device_of(self.gram.gg)))

    def cosine(self) -> Array:
        """Return the cosine between g and x, shape (...); 1 if g is zero, 0 if x is zero to rounding."""
        cosine, zero = _certificate.cosine(self._gram(), self.multipliers), self._vanishes()
        return namespace(zero).where(zero & (self.gram.gg > 0), cosine * 0.0, cosine)

    def to(self, move: Callable[[Array], Array]) -> DualSolution:
        """Return this solution with its arrays converted by `move`."""

        def moved(a: Any) -> Any:
            return type(a)(*map(moved, a)) if isinstance(a, tuple) else a if a is None else move(a)

        lam = move(self.multipliers)
        if lam is self.multipliers:
            return self
        gram, bounds, iterations, status = map(moved, (self.gram, self.bounds, self.iterations, self._status))
        return replace(self, multipliers=lam, gram=gram, bounds=bounds, iterations=iterations, _status=status)

    def dual_basis(self) -> Array:
        """Return F (..., t, t) with ``F'F = K_PP^-1`` for the free rows P; synchronises a device."""
        lam, free = self.multipliers, to_numpy(self.free)
        found = np.zeros((*lam.shape, lam.shape[-1]))
        for i, V, _, _ in self._coordinates(Gram(*map(to_numpy, self._gram()))):
            found[i] = dual_basis(V, free[i])
        return from_numpy(found, namespace(lam), device_of(lam))

    def _coordinates(self, gram: Gram) -> Iterator[tuple[Any, ...]]:
        """Yield the index of each problem, its coordinates V and a, and whether they are from G."""
        known, rows, number = from_gram(gram), self._rows, 0
        for i in np.ndindex(known.shape[:-2]):
            if rows is not None and rows.where[i]:
                yield i, rows.V[number if len(rows.V) > 1 else 0], rows.a[number], True
                number += 1
            else:
                yield i, known[i][:-1], known[i][-1], False

    def size(self) -> Array:
        """Return the size of the problem, shape (...), to which certificates are relative; see Notes."""
        (K, b, gg), lower = self._gram(), self.bounds.lower
        xp = namespace(gg)
        if lower is not None:
            margin = xp.maximum(lower, xp.zeros_like(lower))
            gg = gg + xp.sum(margin * (2.0 * b + matvec(K, margin)), axis=-1)
        size = xp.sqrt(xp.maximum(gg, xp.zeros_like(gg)))
        if self.bounds.h is None:
            return size
        norms = xp.sqrt(xp.linalg.diagonal(K))
        return xp.maximum(size, self.bounds.asked(xp.broadcast_to(norms, self.multipliers.shape)))

    def _gram(self) -> Gram:
        """Return K, b and |g|^2; on a device, rows that are not finite are zero."""
        return self.gram if on_host(device_of(self.gram.gg)) else Gram(*self._known()[:2], self.gram.gg)

    def _known(self) -> tuple[Array, Array, Array]:
        """Return K and b on a device without the rows that are not finite, and the mask of the others."""
        if self._finite is None:
            object.__setattr__(self, "_finite", drop_rows(*self.gram[:2]))
        return self._finite

    def _or_infinity(self, value: Array) -> Array:
        """Return a certificate, with infinity for problems of size zero whose x is not zero."""
        xp = namespace(value)
        undefined = (self.size() == 0) & ~self._vanishes()
        return xp.where(undefined, xp.full_like(value, math.inf), value)

    def _vanishes(self) -> Array:
        """Return the mask (...) of problems whose x is zero, to the rounding of K."""
        (K, b, gg), lam, lower = self._gram(), self.multipliers, self.bounds.lower
        xp = namespace(gg)
        square = gg + xp.sum(lam * (2.0 * b + matvec(K, lam)), axis=-1)
        lengths = lam * xp.sqrt(xp.linalg.diagonal(K))
        whole, most = gg + xp.sum(lengths * lengths, axis=-1), 8 * (lam.shape[-1] + 1)
        zero = square <= most * self._rounding * whole
        if lower is not None:  # lam has the rounding of the margin
            origin = xp.where(xp.isfinite(lower), lower, 0.0) * xp.sqrt(xp.linalg.diagonal(K))
            zero = zero | (square <= (most * EPS) ** 2 * xp.sum(origin * origin, axis=-1))
        return zero

    def _slack(self) -> tuple[Array, Array]:
        """Return the slack ``G x - h`` (..., t), and the rounding error of ``g + G'lam`` (...).

        Rows that are switched off have zero. In coordinates, x is computed as in stage 3.
        """
        (K, b, gg), lam, (_, _, h) = self._gram(), self.multipliers, self.bounds
        xp, off = namespace(gg), self.bounds.off
        h = xp.zeros_like(b) if off is None else xp.where(off, xp.zeros_like(h), h)
        s, moved = matvec(K, lam) + b - h, xp.zeros_like(gg)
        if not self._exact:  # this error is negligible for an exact method without coordinates
            moved = EPS * xp.sum(xp.abs(lam) * xp.sqrt(xp.linalg.diagonal(K)), axis=-1)
        if self._rows is not None:
            found = s, moved, lam, self.free, h
            s, moved, lam, free, h = (np.broadcast_to(to_numpy(a), a.shape).copy() for a in found)
            where, V, a, _ = self._rows
            x = a + np.matmul(lam[where][:, None, :], V)[:, 0]
            there = np.matmul(V, x[..., None])[..., 0] - h[where]
            step = np.matmul(self._rows.step(np.where(free[where], there, 0.0))[:, None, :], V)[:, 0]
            moved[where] += np.linalg.norm(step, axis=-1)
            s[where] = np.matmul(V, (x + step)[..., None])[..., 0] - h[where]
            s, moved = (from_numpy(v, xp, device_of(gg)) for v in (s, moved))
        return s if off is None else xp.where(off, xp.zeros_like(s), s), moved

    def _status_on_device(self) -> Array:
        """Return the status of a solution on a device; nothing is read."""
        (K, b, kept), h, off = self._known(), self.bounds.h, self.bounds.off
        xp, lam, residual = namespace(b), self.multipliers, self.kkt_residual()
        norms = xp.sqrt(xp.linalg.diagonal(K))
        size = self.size()[..., None] + xp.sum(xp.abs(lam) * norms, axis=-1, keepdims=True)
        near = (norms > 0) & (self.active | (self.slack() <= NEAR_ZERO * norms * size))
        cosines = K * inverse(norms)[..., :, None] * inverse(norms)[..., None, :]
        flags = {
            Status.STALLED: ~(residual <= OPTIMAL_WITHIN * xp.finfo(lam.dtype).eps),  # also for NaN
            Status.ROW_DROPPED: ~xp.all(kept if off is None else kept | off, axis=-1),
            Status.UNRESOLVED: smallest_pivot(cosines, near) < RESOLVED**2,
        }
        if h is not None:
            void = xp.any(kept & (norms == 0) & (h > 0), axis=-1)  # no x moves along a row of zeros
            flags[Status.INFEASIBLE] = (residual > MISSED) | void
        return sum(xp.astype(where, xp.int64) * int(flag) for flag, where in flags.items())
