"""What stage 2 returns: multipliers, and certificates that judge them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from gemproj import _certificate
from gemproj._array import Array, device_of, from_numpy, namespace, to_numpy
from gemproj._gram import Gram
from gemproj.methods._active_set import solve_triangle
from gemproj.methods._enumeration import solve_on
from gemproj.methods._method import matvec, normalise
from gemproj.methods.equality import span


class Standard(NamedTuple):
    """The t-space problem ``min 1/2 lam'K lam + b'lam, 0 <= lam <= upper`` that a solution belongs to."""

    K: Array
    b: Array
    gg: Array
    upper: Array | None


@dataclass(frozen=True, eq=False)
class DualSolution:
    """Multipliers with all that is needed to judge them; no certificate costs anything until asked for.

    Attributes
    ----------
    multipliers : array, shape (..., t)
        lam >= 0 in float64 (float32 on devices without it); ``x = g + G.T @ lam``. Of any sign with
        `equality`.
    gram, linear, squared_norm : array, shapes (..., t, t), (..., t), (...)
        ``K = G G'``, ``b = G g`` and ``gg = |g|^2``, see `gemproj.gram`.
    margin, penalty : float
        Bounds of every multiplier, 0 and infinity for the plain projection.
    iterations : int or array, shape (...)
        Steps or pivots that the method took; 0 where it takes none.
    status : array of int, shape (...)
        A `gemproj.Status` per problem.
    rounding : float
        Relative rounding of the entries of `gram` and `linear`, which certificates cannot see beyond:
        below 3e-14, or 8e-6 where products of a large problem were summed in float32.
    units : array, shape (..., t + 1), or None
        Rare: float64 rows or gradients with norms beyond 1e-140 .. 1e140 are measured in units of
        powers of two. `gram`, `linear` and `squared_norm` are then those of ``units[i] * G[i]`` and
        ``units[t] * g``. None stands for ones.
    resolution : array, shape (...), or None
        By method "exact": how far from dependent the rows are that decide what x is (active, or with
        ``G @ x`` near zero). The smallest eigenvalue of their cosines, 1 at best; K knows it to 1e-16.
    factor : ndarray, shape (..., t + 1, t + 1), or None
        Where `gram` had lost the digits, a factor F of ``[G; g] = F' Q'`` with orthonormal Q, from
        which the multipliers come; zero for the other problems of a batch.
    residues : dict
        Where rows are dependent to rounding, by index in the batch: combinations of the columns of G
        modulo primes, which tell whether they are so exactly.
    keep : array, shape (...), or None
        By rules that are no projection (MEGA): the factor of g in ``x = keep * g + G.T @ lam``. Then there
        is nothing that certificates could certify, and they raise ValueError. None stands for ones.
    equality : bool
        Whether the problem is that of method "equality", ``G @ x = 0``.

    Notes
    -----
    Certificates are relative to the norm of the gradient that is projected: g, or with a margin
    ``g + margin * G.sum(0)``.
    """

    multipliers: Array
    gram: Array
    linear: Array
    squared_norm: Array
    margin: float
    penalty: float
    iterations: Any
    status: Array
    rounding: float = 1e-15
    units: Array | None = None
    resolution: Array | None = None
    factor: np.ndarray | None = None
    residues: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)
    keep: Array | None = None
    equality: bool = False

    @property
    def active(self) -> Array:
        """Boolean (..., t): the constraints whose multiplier is above its lower bound, the margin.

        With `equality`, those whose multiplier is not zero.
        """
        return self.multipliers != 0 if self.equality else self.multipliers > self.margin

    @property
    def violated(self) -> Array:
        """Boolean (..., t): the constraints that g itself violates."""
        return self.linear != 0 if self.equality else self.linear < 0

    @property
    def refined(self) -> Array:
        """Boolean (...): whether the multipliers come from G itself, because `gram` had lost the digits."""
        xp, device = namespace(self.status), device_of(self.status)
        if self.factor is None:
            return xp.zeros_like(self.status, dtype=xp.bool)
        return from_numpy(np.any(self.factor != 0, axis=(-2, -1)), xp, device)

    def to(self, xp: Any, device: Any) -> DualSolution:
        """Return the same with arrays of another library, for a solution whose arrays are NumPy's."""
        if not isinstance(self.multipliers, np.ndarray) or xp is namespace(self.multipliers):
            return self
        names = (
            "multipliers",
            "gram",
            "linear",
            "squared_norm",
            "iterations",
            "status",
            "units",
            "resolution",
            "keep",
        )
        arrays = {n: a for n in names if isinstance(a := getattr(self, n), np.ndarray | np.generic)}
        return replace(self, **{n: from_numpy(a, xp, device) for n, a in arrays.items()})

    def kkt_residual(self) -> Array:
        """Largest violation of the optimality conditions, shape (...), scale-free; 0 at the solution.

        Where there is a `factor`, of x as `project` returns it in float64, and including the distance
        of that x from ``g + G.T @ lam``, which is the rounding of large multipliers.
        """
        self._check_projection("kkt_residual")
        K, _, gg, upper = self.standard()
        s, left = self._slope()
        xp = namespace(K)
        if self.equality:
            return xp.maximum(_certificate.equality_residual(K, s, gg), left)
        return xp.maximum(_certificate.kkt_residual(K, s, gg, self._measure(), upper), left)

    def duality_gap(self) -> Array:
        """Primal minus dual objective over ``|g|^2``, shape (...); may be negative where x is infeasible."""
        self._check_projection("duality_gap")
        _, _, gg, upper = self.standard()
        return _certificate.duality_gap(self._slope()[0], gg, self._measure(), upper)

    def error_bound(self) -> Array:
        """Upper bound of ``|x - x*| / |g|``, shape (...), without x*. Waits for a device.

        For x as `combine` makes it in float64; rounding it to the dtype of g comes on top. Where K
        cannot tell what the solution is (nearly dependent rows, no `factor`), the bound is ``|x|``.
        """
        self._check_projection("error_bound")
        standard = self.standard()
        K, b, gg = (to_numpy(a) for a in standard[:3])
        upper = None if standard.upper is None else to_numpy(standard.upper)
        lam, xp = to_numpy(self._measure()), namespace(self.status)
        # Adding margin * (sum of rows) to g may cancel digits: rounding then counts against the sum.
        sizes = np.sqrt(np.diagonal(K, axis1=-2, axis2=-1)) * to_numpy(self._lower())
        whole = np.sqrt(to_numpy(self.squared_norm)) + sizes.sum(axis=-1)
        magnified = whole / np.sqrt(np.where(gg > 0, gg, 1.0))
        bound = np.zeros(gg.shape)
        for i in np.ndindex(gg.shape):
            R = None if self.factor is None or not self.factor[i].any() else self._shifted_factor(i)
            top = None if upper is None else upper[i]
            rounding = float(magnified[i]) * (self.rounding if R is None else min(self.rounding, 3e-14))
            bound[i] = _certificate.error_bound(
                K[i], b[i], float(gg[i]), lam[i], top, rounding, R, self.residues.get(i), self.equality
            )
        return from_numpy(bound, xp, device_of(self.status))

    def cosine(self) -> Array:
        """Cosine between g and x, shape (...)."""
        lam = self._measure() + self._lower()
        return _certificate.cosine(self.gram, self.linear, self.squared_norm, lam, self.keep)

    def standard(self) -> Standard:
        """Return the problem with lower bound zero that a margin stands for, in `units`."""
        gram = Gram(self.gram, self.linear, self.squared_norm)
        return shift(gram, self.margin, self.penalty, self.units)

    def free(self) -> Array:
        """Boolean (..., t): multipliers between their bounds, whose rows P have ``G_P x = 0``."""
        if self.equality:
            return self.multipliers == self.multipliers
        return (self.multipliers > self.margin) & (self.multipliers < self.penalty)

    def solve_free(self, u: Array) -> Array:
        """Return ``K_PP^-1 u_P`` for the free rows P and zero for the others, all in `units`.

        With `equality` free rows may be dependent: one of the solutions.
        """
        free = self.free()
        unit = normalise(self.gram, u, None, None)
        z = solve_on(unit.K, unit.b, free) * unit.scale
        if self.factor is None:
            return z
        z, u, free = to_numpy(z).copy(), to_numpy(u), to_numpy(free)
        for i in self._factored():
            A = self.factor[i][:, :-1][:, free[i]]
            if self.equality:
                _, S, V = span(A)
                z[i] = V.T @ ((V @ u[i]) / S**2)
                continue
            n = np.linalg.norm(A, axis=0)
            R: Any = np.linalg.qr(A / n, mode="r")
            z[i][free[i]] = solve_triangle(R, solve_triangle(R.T, u[i][free[i]] / n)) / n
        return from_numpy(z, namespace(unit.K), device_of(unit.K))

    def _factored(self) -> list[tuple[int, ...]]:
        assert self.factor is not None
        return list(map(tuple, np.argwhere(self.factor.any(axis=(-2, -1)))))

    def _check_projection(self, certificate: str) -> None:
        if self.keep is not None:
            raise ValueError(
                f"There is no {certificate}: x is keep * g + G.T @ multipliers by a rule that is no "
                "projection. `cosine` and `project` know that; method='exact' gives the projection."
            )

    def _measure(self) -> Array:
        """Return the multipliers of the standard problem."""
        return in_units(self.multipliers - self.margin, self.units)

    def _lower(self) -> Any:
        return in_units(0.0 * self.multipliers + self.margin, self.units)

    def _slope(self) -> tuple[Array, Array]:
        """Return s = G x in `units`, and the distance of x from g + G'lam over |g|."""
        K, b, gg, _ = self.standard()
        lam = self._measure()
        s, left = matvec(K, lam) + b, 0.0 * gg
        if self.factor is None:
            return s, left
        s, left, lam = to_numpy(s).copy(), np.zeros(gg.shape), to_numpy(lam)
        free = to_numpy(self.free())
        for i in self._factored():
            A, a = self._shifted_factor(i)
            basis = span(A)[0] if self.equality else np.linalg.qr(A[:, free[i]])[0]
            x, distance = _certificate.settled(A, a, lam[i], basis)
            s[i], left[i] = A.T @ x, distance and distance / np.linalg.norm(a)
        xp, device = namespace(gg), device_of(gg)
        return from_numpy(s, xp, device), from_numpy(left, xp, device)

    def _shifted_factor(self, i: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        assert self.factor is not None
        A, a = self.factor[i][:, :-1], self.factor[i][:, -1]
        return A, a + A @ to_numpy(self._lower())[i] if self.margin else a


def in_units(lam: Array, units: Array | None) -> Array:
    """Return multipliers of the rows ``units[i] * G[i]`` and the gradient ``units[t] * g``."""
    return lam if units is None else lam * units[..., -1:] / units[..., :-1]


def from_units(lam: Array, units: Array | None, *, check: bool) -> Array:
    """Return the multipliers of G and g themselves; with `check`, raise where float64 cannot hold them."""
    if units is None:
        return lam
    xp = namespace(lam)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        result = lam * units[..., :-1] / units[..., -1:]
    for size, lost in (("small", ~xp.isfinite(result)), ("large", (lam != 0) & (xp.abs(result) < 1e-307))):
        if check and bool(xp.any(lost)):
            flow = "overflow" if size == "small" else "underflow"
            raise ValueError(f"Rows of G are too {size} beside g: their multipliers {flow}. Scale G or g.")
    return result


def shift(gram: Gram, margin: float, penalty: float, units: Array | None) -> Standard:
    """Return the t-space problem of g + margin * (sum of rows), to which a lower bound is equivalent."""
    K, b, gg = gram
    xp = namespace(K)
    upper = None if math.isinf(penalty) else in_units(xp.full_like(b, penalty - margin), units)
    if margin == 0.0:
        return Standard(K, b, gg, upper)
    lower = in_units(xp.full_like(b, margin), units)
    with np.errstate(over="ignore", invalid="ignore"):  # reported as an error of its own
        pull = matvec(K, lower)
        return Standard(K, b + pull, gg + xp.sum(lower * (2.0 * b + pull), axis=-1), upper)
