"""Projected gradient on the dual problem: plain (the fixed budget of I-GEM) and accelerated (FISTA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gemproj._arrays import Array, namespace
from gemproj._checks import check_count, check_number
from gemproj._tspace import clip, inverse, matvec, normalise
from gemproj.methods._method import Method, Outcome, Status


@dataclass(frozen=True)
class PGD(Method):
    """I-GEM's method: a fixed number of projected gradient steps on the multipliers.

    ``lam <- max(0, lam - eta * (K lam + b))``, in t-space: a step takes t*t operations, not t*d.
    With ``step_size="safe"`` the objective never rises and, after k steps from lam0,
    ``F(lam) - F* <= L |lam0 - lam*|^2 / (2 k)``.

    Parameters
    ----------
    steps : int, default 3
        Number of steps.
    step_size : {"safe", "power"}, default "safe"
        "safe": ``eta = 1/L`` with L = min(trace, largest absolute row sum, Frobenius norm) of K,
        an upper bound on its largest eigenvalue. "power": the paper's ``eta = c / sigma``, with sigma
        from power iteration started at a vector of ones. sigma is at most the largest eigenvalue and
        can be far below it (two conflicting tasks are the worst case); then the steps diverge.
    c : float, default 0.9
        Safety factor of "power"; the paper uses 0.5 to 0.9.
    power_iterations : int, default 3
        Number of power iterations.
    normalize : bool, default True
        Scale every row of G to norm one first, as the paper does.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import PGD
    >>> PGD(steps=50)(np.array([[2.0]]), np.array([-1.0]))
    array([0.5])
    """

    steps: int = 3
    step_size: Literal["safe", "power"] = "safe"
    c: float = 0.9
    power_iterations: int = 3
    normalize: bool = True

    def __post_init__(self) -> None:
        check_count(self.steps, "steps", 1)
        if self.step_size not in ("safe", "power"):
            raise ValueError(f"step_size must be 'safe' or 'power'; found {self.step_size!r}.")
        check_number(self.c, "c", 0.0, strict=True)
        check_count(self.power_iterations, "power_iterations", 1)

    def solve(  # noqa: D102
        self, K: Array, b: Array, lower: Array = None, upper: Array = None, warm_start: Array = None
    ) -> Outcome:
        if self.normalize:
            K, b, upper, warm_start, scale = normalise(K, b, upper, warm_start)
        if self.step_size == "safe":
            eta = inverse(largest_eigenvalue_bound(K))
        else:
            eta = self.c * inverse(power_iteration(K, self.power_iterations))
        lam = b * 0.0 if warm_start is None else warm_start
        for _ in range(self.steps):
            lam = clip(lam - eta * (matvec(K, lam) + b), lower, upper)
        return Outcome(lam * scale if self.normalize else lam, self.steps, int(Status.APPROXIMATE))


@dataclass(frozen=True)
class FISTA(Method):
    """A fixed number of accelerated projected gradient steps on the multipliers.

    After k steps from lam0, ``F(lam) - F* <= 2 L |lam0 - lam*|^2 / (k + 1)^2`` (Beck and Teboulle,
    2009) with the safe bound L of `PGD`. The iterates are not monotone; the result is never worse
    than the start.

    Parameters
    ----------
    steps : int, default 50
        Number of steps.
    restart : bool, default True
        Reset the momentum when it points uphill (gradient restart, O'Donoghue and Candes, 2015). Restarts
        are much faster in practice. The proof of the bound above assumes no restarts.
    normalize : bool, default True
        Scale every row of G to norm one first.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import FISTA
    >>> K, b = np.array([[2.0, -1.0], [-1.0, 2.0]]), np.array([-1.0, -1.0])
    >>> FISTA(steps=100)(K, b).round(6)
    array([1., 1.])
    """

    steps: int = 50
    restart: bool = True
    normalize: bool = True

    def __post_init__(self) -> None:
        check_count(self.steps, "steps", 1)

    def solve(  # noqa: D102
        self, K: Array, b: Array, lower: Array = None, upper: Array = None, warm_start: Array = None
    ) -> Outcome:
        if self.normalize:
            K, b, upper, warm_start, scale = normalise(K, b, upper, warm_start)
        xp = namespace(K)
        eta = inverse(largest_eigenvalue_bound(K))
        start = lam = y = b * 0.0 if warm_start is None else warm_start
        momentum = eta * 0.0 + 1.0
        for _ in range(self.steps):
            new = clip(y - eta * (matvec(K, y) + b), lower, upper)
            faster = (1.0 + xp.sqrt(1.0 + 4.0 * momentum * momentum)) / 2.0
            if self.restart:
                uphill = xp.sum((y - new) * (new - lam), axis=-1, keepdims=True) > 0
                momentum, faster = (xp.where(uphill, xp.ones_like(m), m) for m in (momentum, faster))
            y = new + (momentum - 1.0) / faster * (new - lam)
            lam, momentum = new, faster

        def objective(v: Array) -> Array:
            return xp.sum(v * (0.5 * matvec(K, v) + b), axis=-1, keepdims=True)

        lam = xp.where(objective(lam) <= objective(start), lam, start)
        return Outcome(lam * scale if self.normalize else lam, self.steps, int(Status.APPROXIMATE))


def largest_eigenvalue_bound(K: Array) -> Array:
    """Return an upper bound on the eigenvalues of K, (..., 1): the smallest of three norms, see `PGD`."""
    xp = namespace(K)
    if not K.shape[-1]:
        return xp.sum(K, axis=(-2, -1))[..., None]
    trace = xp.sum(xp.linalg.diagonal(K), axis=-1)
    row_sum = xp.max(xp.sum(xp.abs(K), axis=-1), axis=-1)
    frobenius = xp.sqrt(xp.sum(K * K, axis=(-2, -1)))
    return xp.minimum(xp.minimum(trace, row_sum), frobenius)[..., None]


def power_iteration(K: Array, iterations: int) -> Array:
    """Return the Rayleigh quotient of K after power iterations from a vector of ones, (..., 1)."""
    xp = namespace(K)
    v = xp.ones_like(xp.linalg.diagonal(K))
    for _ in range(iterations):
        v = matvec(K, v)
        v = v * inverse(xp.sqrt(xp.sum(v * v, axis=-1, keepdims=True)))
    return xp.sum(v * matvec(K, v), axis=-1, keepdims=True)
