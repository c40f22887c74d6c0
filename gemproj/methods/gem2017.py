"""GEM as its authors implemented it, for comparison and for migration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gemproj._arrays import Array
from gemproj._checks import check_number
from gemproj._tspace import matvec
from gemproj.methods._method import Method, Outcome, Status
from gemproj.methods.exact import Exact


@dataclass(frozen=True)
class GEM2017(Method):
    """The reference implementation of Lopez-Paz and Ranzato (NeurIPS 2017), with its ridge.

    If a constraint is violated, it solves ``min 1/2 lam'(K + eps I) lam + b'lam`` subject to
    ``lam >= memory_strength``; otherwise x = g. Prefer `Exact`, because this method differs from GEM as
    published in two ways. First, the absolute ridge ``eps`` leaves a fraction ``eps / (n**2 + eps)`` of
    the violation of a row of norm n (91 % at n = 0.01). Second, x is a discontinuous function of g for a
    positive memory strength, because the lower bound applies only if a constraint is violated.

    Parameters
    ----------
    memory_strength : float, default 0.5
        Lower bound on every multiplier if a constraint is violated.
    eps : float, default 1e-3
        Ridge added to the Gram matrix of the raw rows.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import GEM2017, project
    >>> G = np.array([[0.01, 0.0]])  # of norm 0.01: most of the violation stays
    >>> project(G, np.array([-1.0, 1.0]), method=GEM2017(memory_strength=0.0)).round(3)
    array([-0.909,  1.   ])
    """

    memory_strength: float = 0.5
    eps: float = 1e-3

    accepts: ClassVar[frozenset[str]] = frozenset()  # `memory_strength` is its only bound

    def __post_init__(self) -> None:
        check_number(self.memory_strength, "memory_strength", 0.0)
        check_number(self.eps, "eps", 0.0)

    def solve(  # noqa: D102
        self, K: Array, b: Array, lower: Array = None, upper: Array = None, warm_start: Array = None
    ) -> Outcome:
        violated = np.any(b < 0, axis=-1, keepdims=True)
        ridged = K + self.eps * np.eye(K.shape[-1])
        floor = np.full_like(b, self.memory_strength)
        free, iterations, *_ = Exact().solve(ridged, b + matvec(ridged, floor))
        lam = np.where(violated, free + floor, 0.0)
        return Outcome(lam, iterations, int(Status.APPROXIMATE))  # exact for the problem with a ridge
