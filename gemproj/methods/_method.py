"""What a method is: a validated object that maps the t-space problem to multipliers."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from gemproj._array import Array, device_of, namespace
from gemproj.methods._constants import OPTIMAL_WITHIN


class Status(enum.IntFlag):
    """How a method ended, one integer per problem of a batch."""

    OPTIMAL = 0
    """The optimality conditions hold to rounding, or to that of large multipliers: `kkt_residual` tells."""
    APPROXIMATE = 1
    """A fixed budget or a shortcut: the certificates tell how far it is from the projection."""
    STALLED = 2
    """An exact method could not meet the conditions before its budget of pivots ran out, or to the
    accuracy of OPTIMAL; this is its best iterate."""
    ROW_DROPPED = 4
    """A row of G was not finite and was left out: on a device, where looking would stop it, or where
    ``check=False`` asks for that."""
    UNRESOLVED = 8
    """Rows that matter are so nearly dependent that the digits which tell them apart are lost: the answer
    is right for *some* rows that equal those of G to rounding. On the CPU the exact method goes back
    from K to G before it says so, and repeated, opposite or otherwise dependent rows are not meant;
    elsewhere it speaks of K, and ``refine`` helps."""


class Outcome(NamedTuple):
    """What `Method.solve` returns: multipliers (..., t), and iterations and status as int or (...).

    An exact method adds how far from dependent the rows are that decide, see `DualSolution.resolution`.
    A rule that is no projection adds the factor (...) of g in ``x = keep * g + G.T @ lam``; None is one.
    """

    multipliers: Array
    iterations: Any
    status: Any
    resolution: Array | None = None
    keep: Array | None = None


@dataclass(frozen=True)
class Method:
    """Base of the methods: ``method(K, b, warm_start) -> multipliers`` on the t-space problem.

    A subclass is a frozen dataclass of options that implements `solve` for
    ``min 1/2 lam' K lam + b' lam`` subject to ``0 <= lam <= upper``.
    """

    # The options of `solve_dual` that it takes; with "gg", `solve` is also given ``gg = |g|^2``.
    accepts: ClassVar[frozenset[str]] = frozenset({"margin", "penalty"})
    # Whether the answer depends on nothing but K, b and what the repr shows: a compiled graph relies on it.
    repeatable: ClassVar[bool] = True

    def __call__(self, K: Array, b: Array, warm_start: Array | None = None) -> Array:
        """Return the multipliers (..., t) for K (..., t, t) and b (..., t)."""
        return self.solve(K, b, None if warm_start is None else clip(warm_start, None)).multipliers

    def solve(
        self, K: Array, b: Array, warm_start: Array | None = None, upper: float | Array | None = None
    ) -> Outcome:
        """Return multipliers with the number of iterations and a `Status`.

        Parameters
        ----------
        K : array, shape (..., t, t)
            Gram matrix, symmetric positive semidefinite.
        b : array, shape (..., t)
            Linear term.
        warm_start : array, shape (..., t), optional
            Multipliers to start from, within the bounds.
        upper : float or array, shape (..., t), optional
            Upper bound of the multipliers.
        """
        raise NotImplementedError


class Unit(NamedTuple):
    """The t-space problem with constraints of norm one and a linear term of size one."""

    K: Array
    b: Array
    start: Array | None
    upper: Array | None
    scale: Array  # multipliers of the raw problem = scale * multipliers of this one


def normalise(K: Array, b: Array, start: Array | None, upper: Any) -> Unit:
    """Scale the rows of G to norm one and b to maximum one, which moves neither the cone nor x.

    A row of norm zero constrains nothing: its multiplier is decoupled and ends at zero.
    """
    xp = namespace(K)
    norm = xp.sqrt(xp.linalg.diagonal(K))
    one, per_norm = xp.ones_like(norm), inverse(norm)
    unit_K = (K * per_norm[..., :, None]) * per_norm[..., None, :]
    unit_K = unit_K + xp.where(norm > 0, xp.zeros_like(norm), one)[..., None] * identity_like(K)
    unit_b = b * per_norm
    # A method of zero rows has nothing to take the maximum of.
    size = xp.max(xp.abs(unit_b), axis=-1, keepdims=True) if b.shape[-1] else one
    size = xp.where(size > 0, size, xp.ones_like(size))
    scale = size * per_norm
    stretch = norm / size
    return Unit(
        unit_K,
        unit_b / size,
        None if start is None else start * stretch,
        None if upper is None else upper * stretch,
        scale,
    )


def inverse(a: Array) -> Array:
    """Return 1/a, and 0 where a is 0: what has no size has no scale and takes no steps."""
    xp = namespace(a)
    used = a > 0
    return xp.where(used, 1.0 / xp.where(used, a, xp.ones_like(a)), xp.zeros_like(a))


def identity_like(K: Array) -> Array:
    """Return the identity matrix (t, t) of the library, dtype and device of K."""
    xp = namespace(K)
    return xp.eye(K.shape[-1], dtype=K.dtype, device=device_of(K))


def matvec(K: Array, v: Array) -> Array:
    """Return K v for every problem of a batch, summed the same way wherever a problem stands."""
    xp = namespace(K)
    return xp.sum(K * v[..., None, :], axis=-1)


def natural_residual(lam: Array, s: Array, upper: Array | None) -> Array:
    """Return max |lam - clip(lam - s, 0, upper)| for s = K lam + b: zero exactly at the solution."""
    xp = namespace(lam)
    return xp.max(xp.abs(lam - clip(lam - s, upper)), axis=-1)


def exact_status(lam: Array, s: Array, upper: Array | None) -> Array:
    """Return OPTIMAL where lam meets the conditions of the normalised problem to about 1e-9, else STALLED."""
    xp = namespace(lam)
    at_upper = lam * 0.0 > 0 if upper is None else lam >= upper
    slack = lam * xp.where(at_upper, xp.maximum(s, s * 0.0), xp.abs(s))
    residual = xp.maximum(natural_residual(lam, s, upper), xp.max(slack, axis=-1))
    met = residual <= OPTIMAL_WITHIN * xp.finfo(lam.dtype).eps
    return xp.astype(~met, xp.int64) * int(Status.STALLED)


def clip(lam: Array, upper: Array | None) -> Array:
    """Return lam moved into 0 <= lam <= upper."""
    xp = namespace(lam)
    lam = xp.maximum(lam, xp.zeros_like(lam))
    return lam if upper is None else xp.minimum(lam, upper)


def snap(lam: Array, upper: Array) -> Array:
    """Return lam with the multipliers that miss their upper bound by the rounding of scales moved onto it."""
    xp = namespace(lam)
    return xp.where(lam >= upper * (1.0 - 1e-15), upper, lam)


def check_count(value: Any, name: str, smallest: int) -> None:
    """Raise unless `value` is an integer of at least `smallest`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer; found {value!r}.")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}; found {value}.")


def check_number(value: Any, name: str, low: float, *, strict: bool = False) -> None:
    """Raise unless `value` is a finite real number of at least `low` (above it, if `strict`)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number; found {value!r}.")
    number = float(value)
    if not (low < number if strict else low <= number) or number == float("inf"):
        raise ValueError(
            f"{name} must be finite and {'above' if strict else 'at least'} {low:g}; found {value}."
        )
