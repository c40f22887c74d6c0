"""The base class of the methods, which map K and b to multipliers, with the classes of their results."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gemproj._arrays import Array, device_of, from_numpy, is_array, namespace, to_numpy
from gemproj._checks import check_array
from gemproj._tspace import clip


class Status(enum.IntFlag):
    """Status of a solution, one integer per problem of a batch."""

    OPTIMAL = 0
    """The optimality conditions hold to rounding, which grows with the multipliers: see `kkt_residual`."""
    APPROXIMATE = 1
    """The method is approximate by design: see `DualSolution.error_bound`."""
    STALLED = 2
    """The method did not reach the accuracy of OPTIMAL within its budget of pivots or iterations; the
    multipliers are its best iterate."""
    UNRESOLVED = 8
    """Active rows are numerically dependent: the backward error is small, but x may be far from the exact
    projection. The exact method first solves again from G; exactly dependent rows then do not set this flag.
    In `solve_gram` the flag refers to K."""


class Outcome(NamedTuple):
    """The result of `Method.solve`: multipliers (..., t), iterations and status (ints or integers (...))."""

    multipliers: Array
    iterations: Any
    status: Any


@dataclass(frozen=True)
class Method:
    """Base class of the methods; a method is called as ``method(K, b, warm_start) -> multipliers``.

    A subclass is a frozen dataclass of options that implements `solve`.
    """

    # The options of `solve_dual` that the method supports; `h` and `margin` change only b.
    accepts: ClassVar[frozenset[str]] = frozenset({"h", "margin", "penalty", "equality"})

    def __call__(self, K: Array, b: Array, warm_start: Array | None = None) -> Array:
        """Return the multipliers (..., t) for K (..., t, t) and b (..., t)."""
        for name, a in ("K", K), ("b", b):
            check_array(a, name)
        xp, device, dtype = namespace(b), device_of(b), b.dtype
        start = None if warm_start is None else clip(_wide(warm_start), None, None)
        wide = np.broadcast_to(_wide(b), np.broadcast_shapes(K.shape[:-1], b.shape)) + 0.0
        lam = self.solve(_wide(K), wide, warm_start=start).multipliers
        return xp.astype(from_numpy(lam, xp, device), dtype, copy=False)

    def solve(
        self,
        K: Array,
        b: Array,
        lower: Array | None = None,
        upper: Array | None = None,
        warm_start: Array | None = None,
    ) -> Outcome:
        """Return the outcome for ``min 1/2 lam'K lam + b'lam`` subject to ``lower <= lam <= upper``.

        Arrays are NumPy arrays; for a projection on a device, PGD, FISTA and AGEM get arrays of the device.

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


def call(
    method: Callable[..., Array], K: Array, b: Array, start: Array | None, to_caller: Callable[[Array], Array]
) -> Outcome:
    """Return the outcome of a user function; it is called with copies of K and b, which it may change."""
    K = np.broadcast_to(K, (*b.shape, b.shape[-1]))
    like = to_caller(b + 0.0)
    lam = method(to_caller(K + 0.0), like, None if start is None else to_caller(start + 0.0))
    xp = namespace(like)
    fits = isinstance(lam, type(like)) and is_array(lam) and lam.shape == like.shape
    if not (fits and xp.isdtype(lam.dtype, ("real floating", "integral"))):
        found = f"{type(lam).__name__} {tuple(lam.shape)} {lam.dtype}" if hasattr(lam, "shape") else repr(lam)
        raise TypeError(
            f"method {method!r} must return real multipliers of the type and shape of b, "
            f"{type(like).__name__} {tuple(like.shape)}; found {found}."
        )
    lam = np.array(_wide(lam))  # a copy: the function may use its array again
    if not np.isfinite(lam).all():
        raise ValueError(f"method {method!r} returned multipliers that are not finite: {lam}.")
    return Outcome(lam, 0, int(Status.APPROXIMATE))


def _wide(a: Array) -> np.ndarray:
    return np.asarray(to_numpy(a), dtype=np.float64)
