"""Accelerated projected gradient (FISTA) on the dual problem."""

from __future__ import annotations

from dataclasses import dataclass

from gemproj._arrays import Array, namespace
from gemproj._checks import check_count
from gemproj._tspace import clip, inverse, matvec, normalise
from gemproj.methods._method import Method, Outcome, Status
from gemproj.methods.pgd import largest_eigenvalue_bound


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
            K, b, lower, upper, warm_start, scale = normalise(K, b, lower, upper, warm_start)
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
