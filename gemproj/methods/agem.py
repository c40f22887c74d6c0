"""A-GEM: one multiplier for the average of all constraints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gemproj._arrays import Array, namespace
from gemproj._tspace import clip, inverse
from gemproj.methods._method import Method, Outcome, Status


@dataclass(frozen=True)
class AGEM(Method):
    """Averaged GEM (Chaudhry et al., ICLR 2019): the mean of the rows is the only constraint.

    With the mean row r, ``x = g - min(0, g.r / r.r) r``: every row has the same multiplier
    ``max(0, -mean(b) / mean(K)) / t``. The method is exact for t = 1. For t > 1 constraints may stay
    violated, and the KKT residual measures the violation. In the paper r is the gradient on a random
    batch from all memories; pass this gradient as the only row of G. Also pass r as the only row if the
    rows nearly cancel, because r is then small and K has lost its digits.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import AGEM, project
    >>> project(np.eye(2), np.array([-3.0, 1.0]), method=AGEM())
    array([-2.,  2.])
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"h", "margin", "penalty"})

    def solve(  # noqa: D102
        self, K: Array, b: Array, lower: Array = None, upper: Array = None, warm_start: Array = None
    ) -> Outcome:
        xp = namespace(K)
        t = b.shape[-1]
        step = xp.sum(b, axis=-1, keepdims=True) * inverse(xp.sum(K, axis=(-2, -1))[..., None])
        lam = clip(xp.broadcast_to(-step, b.shape), None, upper)
        return Outcome(lam, 1 if t else 0, int(Status.APPROXIMATE))
