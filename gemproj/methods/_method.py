"""What a method is: a validated object that maps the t-space problem to multipliers."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gemproj._arrays import Array, namespace
from gemproj._constants import OPTIMAL_WITHIN
from gemproj._tspace import clip, complementarity, natural_residual


class Status(enum.IntFlag):
    """How a method ended, one integer per problem of a batch."""

    OPTIMAL = 0
    """The optimality conditions hold to rounding, or to that of large multipliers: `kkt_residual` tells."""
    APPROXIMATE = 1
    """A fixed budget or a shortcut: the certificates tell how far it is from the projection."""
    STALLED = 2
    """An exact method could not meet the conditions to the accuracy of OPTIMAL before its budget of
    pivots ran out; this is its best iterate."""
    ROW_DROPPED = 4
    """A row of G was not finite and was left out, on a device, where looking would wait for it. On the
    CPU such a row is an error."""
    UNRESOLVED = 8
    """Active rows are numerically dependent: the backward error is small, but x may be far from the exact
    projection. On the CPU the exact method first goes back from K to G; repeated, opposite or otherwise
    exactly dependent rows are not meant. On a device it speaks of K, and ``refine`` helps."""
    INFEASIBLE = 16
    """On a device, where it cannot be raised as an error: no x of up to a thousand times the size of the
    problem satisfies ``G x >= h``, as far as K tells, and contradictions below some 1e-3 are not told."""


class Outcome(NamedTuple):
    """What `Method.solve` returns: multipliers (..., t), and iterations and status as int or (...).

    `resolution`, of exact methods only, is the smallest eigenvalue of the normalised Gram matrix of the
    active and nearly active rows, shape (...), or a lower bound of it that is not small.
    """

    multipliers: Array
    iterations: Any
    status: Any
    resolution: Array | None = None


@dataclass(frozen=True)
class Method:
    """Base of the methods: ``method(K, b, warm_start) -> multipliers`` on the t-space problem.

    A subclass is a frozen dataclass of options that implements `solve`.
    """

    # The options of `solve_dual` that it takes; `h` and `margin` change nothing but b.
    accepts: ClassVar[frozenset[str]] = frozenset({"h", "margin", "penalty", "equality"})

    def __call__(self, K: Array, b: Array, warm_start: Array | None = None) -> Array:
        """Return the multipliers (..., t) for K (..., t, t) and b (..., t)."""
        start = None if warm_start is None else clip(warm_start, None, None)
        return self.solve(K, b, warm_start=start).multipliers

    def solve(
        self,
        K: Array,
        b: Array,
        lower: Array | None = None,
        upper: Array | None = None,
        warm_start: Array | None = None,
    ) -> Outcome:
        """Solve ``min 1/2 lam'K lam + b'lam`` subject to ``lower <= lam <= upper``.

        Parameters
        ----------
        K : array, shape (..., t, t)
            Gram matrix, symmetric positive semidefinite.
        b : array, shape (..., t)
            Linear term.
        lower : array, shape (..., t), optional
            0, or -inf for an equality constraint; None stands for zeros.
        upper : array, shape (..., t), optional
            At least 0; None stands for infinity.
        warm_start : array, shape (..., t), optional
            Multipliers to start from, within the bounds.
        """
        raise NotImplementedError


def exact_status(lam: Array, s: Array, lower: Array | None, upper: Array | None) -> Array:
    """Return OPTIMAL where lam meets the conditions of the normalised problem to about 1e-9, else STALLED."""
    xp = namespace(lam)
    residual = xp.maximum(natural_residual(lam, s, lower, upper), complementarity(lam, s, upper))
    met = residual <= OPTIMAL_WITHIN * xp.finfo(lam.dtype).eps
    return xp.astype(~met, xp.int64) * int(Status.STALLED)
