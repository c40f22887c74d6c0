"""How far multipliers are from the solution, from t-space numbers alone and free of scale.

All functions judge ``min 1/2 lam'K lam + b'lam, 0 <= lam <= upper`` for a gradient of squared norm
gg. With s = K lam + b = G x, none of the results changes when g, or any row of G, is multiplied by
a positive number.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import combinations

import numpy as np

from gemproj._array import Array, namespace
from gemproj._rank import depends, independent, rank
from gemproj.methods._active_set import Factorisation, solve_active_set, solve_triangle
from gemproj.methods._method import inverse, matvec, snap
from gemproj.methods.equality import span
from gemproj.methods.exact import Exact

_EPS = float(np.finfo(np.float64).eps)
_MOST_NEAR = 8  # rows of which all subsets are looked at


def kkt_residual(K: Array, s: Array, gg: Array, lam: Array, upper: Array | None) -> Array:
    """Return the largest violation of the optimality conditions, shape (...).

    The maximum of primal feasibility ``-s_i / (|g_i||g|)``, dual feasibility ``-lam_i |g_i| / |g|``
    and complementarity ``|lam_i s_i| / |g|^2``. With an upper bound c, s_i may be negative at
    lam_i = c, so feasibility gives way to ``max(0, -s_i)`` times the distance of lam_i to c, or
    to one where that is larger: the rounding of s must not grow with c.
    """
    xp = namespace(K)
    if not s.shape[-1]:
        return gg * 0.0
    unit, per_gradient = _inverse_root(xp.linalg.diagonal(K)), _inverse_root(gg)[..., None]
    s = s * unit * per_gradient
    scaled = lam * xp.sqrt(xp.linalg.diagonal(K)) * per_gradient
    down, zero = xp.maximum(-s, xp.zeros_like(s)), xp.zeros_like(s)
    parts = [xp.maximum(-scaled, zero)]
    if upper is None:
        parts += [down, xp.abs(scaled * s)]
    else:
        bound = upper * xp.sqrt(xp.linalg.diagonal(K)) * per_gradient
        apart = xp.minimum(xp.abs(bound - scaled), xp.ones_like(bound))
        parts += [apart * down, xp.abs(scaled) * xp.maximum(s, zero)]
        parts += [xp.maximum(scaled - bound, zero)]
    return xp.max(xp.stack([xp.max(part, axis=-1) for part in parts]), axis=0)


def equality_residual(K: Array, s: Array, gg: Array) -> Array:
    """Return the largest ``|s_i| / (|g_i||g|)``, shape (...): all that ``G x = 0`` asks for."""
    xp = namespace(K)
    if not s.shape[-1]:
        return gg * 0.0
    unit = _inverse_root(xp.linalg.diagonal(K)) * _inverse_root(gg)[..., None]
    return xp.max(xp.abs(s * unit), axis=-1)


def duality_gap(s: Array, gg: Array, lam: Array, upper: Array | None) -> Array:
    """Return (primal - dual objective) / |g|^2, shape (...).

    Equal to ``lam's / |g|^2``, and to ``(lam's + c sum max(0, -s)) / |g|^2`` for hinge penalties of
    weight c. Where x is feasible it bounds the squared error: ``|x - x*|^2 <= gap |g|^2``.
    """
    xp = namespace(s)
    gap = lam * s
    if upper is not None:
        gap = gap + upper * xp.maximum(-s, xp.zeros_like(s))
    scale = _inverse_root(gg)[..., None]
    return xp.sum(gap * scale * scale, axis=-1)


def cosine(K: Array, b: Array, gg: Array, lam: Array, keep: Array | None = None) -> Array:
    """Return the cosine between g and x = keep g + G'lam, shape (...); 1 where either is zero."""
    xp = namespace(K)
    keep = xp.ones_like(gg) if keep is None else keep
    inner = keep * gg + xp.sum(b * lam, axis=-1)
    xx = keep * inner + xp.sum(lam * (matvec(K, lam) + keep[..., None] * b), axis=-1)
    used, one = (gg > 0) & (xx > 0), xp.ones_like(gg)
    gg, xx, inner = (xp.where(used, v, one) for v in (gg, xx, inner))
    return inner / gg / xp.sqrt(xx / gg)


def error_bound(
    K: np.ndarray,
    b: np.ndarray,
    gg: float,
    lam: np.ndarray,
    upper: np.ndarray | None,
    rounding: float,
    factor: tuple[np.ndarray, np.ndarray] | None,
    residues: np.ndarray | None,
    equality: bool = False,
) -> float:
    """Return an upper bound of ``|x - x*| / |g|`` for one problem, on the CPU.

    `rounding` is that of the entries of K and b, in units of ``|g_i| |g_j|`` and ``|g_i| |g|``.

    t-space is small, so the bound comes from a solution mu of the dual problem itself:
    ``|x - x*| <= |G'(lam - mu)| + |x(mu) - x*|``. The first term is known. For the second, x(mu) is
    exactly the projection of g onto the shifted cone ``{x : s >= -e}``, where e_i is what s_i misses
    of zero (for mu_i > 0) or falls below it, and rounding. As e goes to zero the projection moves by
    at most ``|e| / sigma``, if sigma is the smallest singular value of all unit rows that come
    within reach of zero on the way: a row whose s_i is larger than the whole move stays inactive.

    Where these rows are dependent to rounding, no such sigma exists. Those that depend, exactly, on rows
    which stay active all the way may be left out; `residues` tell, see `gemproj._rank`. Otherwise
    ``|x|`` bounds the distance of any x = g + G'lam, lam >= 0, to x* (weak duality at the feasible
    point 0), and with an upper bound the root of the duality gap does.

    For equalities ``x - x* = G^+ s`` whatever lam is, so ``|s| / sigma`` with the smallest singular value of
    all rows that is not zero does; or ``|x|``, where it is not known which ones are.
    """
    n, size = np.sqrt(np.diagonal(K)), math.sqrt(max(gg, 0.0))
    rows = n > 0
    if size == 0.0 or not rows.any():
        return 0.0 if not (lam * n).any() else math.inf
    n, lam = n[rows], (lam * n)[rows] / size
    upper = None if upper is None else (upper[rows] * n) / size
    if factor is None:
        geometry: _ByGram | _ByRows = _ByGram(
            K[np.ix_(rows, rows)] / np.outer(n, n), b[rows] / n / size, rounding
        )
    else:
        exact = None if residues is None else residues[:, rows]
        geometry = _ByRows(factor[0][:, rows] / n, factor[1] / size, rounding, exact)
    if equality:
        return min(geometry.length(lam), geometry.outside(lam))
    inside = np.maximum(lam, 0.0) if upper is None else np.clip(lam, 0.0, upper)
    mu = geometry.solve(upper, inside)
    fallback = geometry.length(inside) if upper is None else geometry.root_gap(inside, upper)
    return min(
        geometry.apart(lam, inside) + fallback,
        geometry.apart(lam, mu) + geometry.reach(mu, upper),
    )


class _Geometry(ABC):
    """Unit rows and a unit gradient, by their products or by their coordinates."""

    @abstractmethod
    def solve(self, upper: np.ndarray | None, start: np.ndarray) -> np.ndarray:
        """Return multipliers that solve the problem up to rounding."""

    @abstractmethod
    def slope(self, mu: np.ndarray, free: np.ndarray) -> tuple[np.ndarray, float, float]:
        """Return s, its rounding, and the rounding of x that does not show in s."""

    @abstractmethod
    def apart(self, lam: np.ndarray, mu: np.ndarray) -> float:
        """Bound ``|x(lam) - x(mu)|``."""

    @abstractmethod
    def length(self, lam: np.ndarray) -> float:
        """Bound ``|x(lam)|``."""

    def root_gap(self, lam: np.ndarray, upper: np.ndarray) -> float:
        """Bound ``|x(lam) - x*|`` by the duality gap, where the constraints are penalties."""
        s, fuzz, extra = self.slope(lam, np.zeros(len(lam), dtype=bool))
        s_low, s_high = s - fuzz, s + fuzz
        gap = np.sum(lam * np.maximum(s_high, 0.0)) + np.sum((upper - lam) * np.maximum(-s_low, 0.0))
        return math.sqrt(gap) + extra

    @abstractmethod
    def sigma(self, rows: np.ndarray) -> float:
        """Return a lower bound of the smallest singular value of `rows`; 0 where they may be dependent."""

    @abstractmethod
    def inside(self, free: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Tell which `rows` lie in the span of the free ones; none, where that cannot be told."""

    @abstractmethod
    def outside(self, lam: np.ndarray) -> float:
        """Bound the distance of ``x(lam)`` from what is orthogonal to all rows."""

    def sigma_of_subsets(self, rows: np.ndarray) -> float:
        """Return the smallest singular value of all independent subsets; 0 where they cannot be told."""
        return 0.0

    def reach(self, mu: np.ndarray, upper: np.ndarray | None) -> float:
        """Bound ``|x(mu) - x*|`` for multipliers that solve the problem up to rounding."""
        top = np.full_like(mu, np.inf) if upper is None else upper
        free, held = (mu > 0) & (mu < top), (mu >= top) & (top > 0)
        s, fuzz, extra = self.slope(mu, free)
        # What a row at a bound misses of zero, with the sign that keeps it there.
        gap = np.where(held, -s, s)
        missing = np.where(free, np.abs(s), np.maximum(0.0, -gap)) + fuzz
        idle = top <= 0
        near = free & ~idle
        moved = 0.0
        for _ in range(len(mu) + 1):
            moved = self._moved(free, near, missing, mu, top)
            joined = ~near & ~idle & (gap <= moved + fuzz)
            if not joined.any() or math.isinf(moved):
                break
            near |= joined
        return moved + extra

    def _moved(
        self, free: np.ndarray, near: np.ndarray, missing: np.ndarray, mu: np.ndarray, top: np.ndarray
    ) -> float:
        if not near.any():
            return 0.0
        sigma = self.sigma(near)
        if sigma == 0.0 and free.any():
            # Free rows stay free if their multipliers outlast the move; rows that depend on them follow.
            keep = near.copy()
            keep[near & ~free] = ~self.inside(free, near & ~free)
            sigma = self.sigma(keep)
            outlast = float(np.min(np.minimum(mu, top - mu)[free]))
            if sigma == 0.0 or outlast <= np.linalg.norm(missing[keep]) / sigma**2:
                sigma = 0.0
        if sigma == 0.0:
            sigma = self.sigma_of_subsets(near)
        return math.inf if sigma == 0.0 else float(np.linalg.norm(missing[near])) / sigma


class _ByGram(_Geometry):
    """Products known to `rounding`: what depends on others to its square root cannot be told from them."""

    def __init__(self, K: np.ndarray, b: np.ndarray, rounding: float) -> None:
        self.K, self.b, self.rounding = K, b, rounding + (4.0 + len(b)) * _EPS

    def solve(self, upper: np.ndarray | None, start: np.ndarray) -> np.ndarray:
        mu = Exact().solve(self.K, self.b, start, upper).multipliers
        return mu if upper is None else snap(mu, upper)

    def slope(self, mu: np.ndarray, free: np.ndarray) -> tuple[np.ndarray, float, float]:
        fuzz = self.rounding * (1.0 + float(np.abs(mu).sum()))
        return self.K @ mu + self.b, fuzz, fuzz

    def apart(self, lam: np.ndarray, mu: np.ndarray) -> float:
        step = lam - mu
        return math.sqrt(
            max(0.0, float(step @ self.K @ step)) + self.rounding * float(np.abs(step).sum()) ** 2
        )

    def length(self, lam: np.ndarray) -> float:
        squared = 1.0 + float(lam @ (self.K @ lam + 2.0 * self.b))
        return math.sqrt(max(0.0, squared) + self.rounding * (1.0 + float(np.abs(lam).sum())) ** 2)

    def sigma(self, rows: np.ndarray) -> float:
        smallest = float(np.linalg.eigvalsh(self.K[np.ix_(rows, rows)])[0]) - rows.sum() * self.rounding
        return math.sqrt(smallest) if smallest > 0 else 0.0

    def inside(self, free: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.zeros(int(rows.sum()), dtype=bool)

    def outside(self, lam: np.ndarray) -> float:
        s, fuzz, extra = self.slope(lam, np.zeros(len(lam), dtype=bool))
        sigma = self.sigma(np.ones(len(lam), dtype=bool))
        return math.inf if sigma == 0.0 else float(np.linalg.norm(np.abs(s) + fuzz)) / sigma + extra


class _ByRows(_Geometry):
    """Rows in the coordinates of a factor; exact remainders tell what rounding cannot."""

    def __init__(self, A: np.ndarray, a: np.ndarray, rounding: float, residues: np.ndarray | None) -> None:
        self.A, self.a, self.rounding = A, a, rounding + 4.0 * len(a) * _EPS
        self.residues = residues

    def solve(self, upper: np.ndarray | None, start: np.ndarray) -> np.ndarray:
        return solve_active_set(Factorisation(self.A, self.a), None, upper, start)[0]

    def slope(self, mu: np.ndarray, free: np.ndarray) -> tuple[np.ndarray, float, float]:
        return self._settled_slope(mu, np.linalg.qr(self.A[:, free])[0])

    def _settled_slope(self, mu: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, float, float]:
        x, left = settled(self.A, self.a, mu, basis)
        off = left + self.rounding * (1.0 + float(np.abs(mu).sum()))
        return self.A.T @ x, self.rounding * (float(np.linalg.norm(x)) + _EPS), 2.0 * off

    def apart(self, lam: np.ndarray, mu: np.ndarray) -> float:
        step = lam - mu
        return float(np.linalg.norm(self.A @ step)) + self.rounding * float(np.abs(step).sum())

    def length(self, lam: np.ndarray) -> float:
        return float(np.linalg.norm(self.a + self.A @ lam)) + self.rounding * (1.0 + float(np.abs(lam).sum()))

    def sigma(self, rows: np.ndarray) -> float:
        if rows.sum() > len(self.a):
            return 0.0
        smallest = float(np.linalg.svd(self.A[:, rows], compute_uv=False)[-1])
        return max(0.0, smallest - self.rounding)

    def sigma_of_subsets(self, rows: np.ndarray) -> float:
        indices, smallest = np.flatnonzero(rows), 1.0
        if len(indices) > _MOST_NEAR or self.residues is None:
            return 0.0
        for size in range(2, len(indices) + 1):
            for subset in map(list, combinations(indices, size)):
                singular = np.linalg.svd(self.A[:, subset], compute_uv=False)
                sigma = float(singular[-1]) if size <= len(self.a) else 0.0
                if sigma > 2.0 * self.rounding:
                    smallest = min(smallest, sigma)
                elif independent(self.residues[:, subset]):
                    return 0.0
        return smallest

    def inside(self, free: np.ndarray, rows: np.ndarray) -> np.ndarray:
        if self.residues is None:
            return np.zeros(int(rows.sum()), dtype=bool)
        return np.array([depends(self.residues, int(j), free) for j in np.flatnonzero(rows)], dtype=bool)

    def outside(self, lam: np.ndarray) -> float:
        basis, singular, _ = span(self.A)
        # Rows are known to rounding, and as many of them are independent as the remainders tell.
        sigma = float(singular[-1]) - math.sqrt(len(lam)) * self.rounding
        hidden = len(singular) < len(lam) and (self.residues is None or rank(self.residues) > len(singular))
        if hidden or sigma <= 0.0:
            return math.inf
        s, fuzz, extra = self._settled_slope(lam, basis)
        return float(np.linalg.norm(np.abs(s) + fuzz)) / sigma + extra


def near_span(A: np.ndarray, free: np.ndarray, rounding: float) -> np.ndarray:
    """Tell which unit columns of A are in the span of the free ones, to rounding."""
    Q, R = np.linalg.qr(A[:, free])
    weights, others = solve_triangle(R, Q.T @ A), A
    for _ in range(2):
        others = others - Q @ (Q.T @ others)
    return np.linalg.norm(others, axis=0) <= rounding * (1.0 + np.abs(weights).sum(axis=0))


def settled(A: np.ndarray, a: np.ndarray, lam: np.ndarray, basis: np.ndarray) -> tuple[np.ndarray, float]:
    """Return ``x = a + A lam`` without what is left of it along a basis of the free rows, and its length.

    What is left is rounding, large where rows nearly cancel and multipliers are large. Without it x is
    the projection of a gradient that is as much off, and projections do not expand that.
    """
    x = a + A @ lam
    left = basis @ (basis.T @ x)
    x = x - left
    return x - basis @ (basis.T @ x), float(np.linalg.norm(left))


def _inverse_root(squared: Array) -> Array:
    """Return 1/sqrt of squared norms, and 0 for those that are zero, or below by rounding."""
    xp = namespace(squared)
    return inverse(xp.sqrt(xp.maximum(squared, xp.zeros_like(squared))))
