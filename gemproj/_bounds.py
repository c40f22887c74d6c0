"""The options of a projection: the method, the bounds of the multipliers and the right-hand side h.

    minimise 1/2 lam'K lam + (b - h)'lam  subject to  lower <= lam <= upper

========================  ===================================================
GEM                       ``0 <= lam``
``margin=m``              ``lower = m``
``penalty=c``             ``upper = c``
``equality``              ``lower = -inf`` (``-c`` with a penalty) for equalities
``h``                     ``b - h``; a row with ``h = -inf`` is switched off
========================  ===================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gemproj._arrays import (
    Array,
    detached,
    device_of,
    from_numpy,
    is_array,
    is_real_floating,
    namespace,
    on_host,
    to_numpy,
)
from gemproj._checks import is_number, refuse_masked
from gemproj._constants import WIDE_RANGE
from gemproj._tspace import matvec
from gemproj.methods import Method, as_method


@dataclass(eq=False)  # one that is frozen takes three times as long to make
class Options:
    """Options of a projection, checked as far as possible without b; see `make_bounds`.

    `given` holds the names of those that are not the default.
    """

    method: Any  # an object or a callable, once it is checked
    h: Any = None
    margin: Any = 0.0
    penalty: Any = None
    equality: Any = False
    given: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.method = as_method(self.method)
        given = self.given = [] if self.h is None else ["h"]
        if not (type(self.margin) is float or is_number(self.margin)) or self.margin:
            given.append("margin")
        given += ["penalty"] * (self.penalty is not None) + ["equality"] * (self.equality is not False)
        if given:
            check_accepted(self.method, zip(given, given, strict=True))


def check_accepted(method: Any, given: Iterable[tuple[str, str]]) -> None:
    """Raise for options that a method does not take; `given` holds pairs (name for the message, option)."""
    taken = method.accepts if isinstance(method, Method) else ("h", "margin")  # which change only b
    for name, option in given:
        if option not in taken:
            raise ValueError(f"{name} cannot be combined with method {method!r}, which does not take it.")


class Bounds(NamedTuple):
    """Bounds of the multipliers and the right-hand side h: arrays (..., t), or None for the default.

    Attributes
    ----------
    lower : array or None
        Lower bounds: 0 or the margin; -inf for an equality, minus the penalty for an equality with a penalty.
        None stands for 0.
    upper : array or None
        Upper bounds: the penalty. None stands for infinity.
    h : array or None
        Right-hand side, -inf for rows that are switched off. None stands for 0.
    """

    lower: Array | None = None
    upper: Array | None = None
    h: Array | None = None

    @property
    def off(self) -> Any:
        """Mask (..., t) of the rows that h switches off, or None."""
        return None if self.h is None else self.h == -math.inf

    def without(self, rows: np.ndarray) -> Bounds:
        """Return the bounds with the rows of a mask (..., t) switched off; on the CPU."""
        lower = None if self.lower is None else np.where(rows, 0.0, self.lower)
        upper = np.where(rows, 0.0, np.inf if self.upper is None else self.upper)
        return Bounds(lower, upper, np.where(rows, -np.inf, 0.0 if self.h is None else self.h))


PLAIN = Bounds()
_LARGEST = np.float64(WIDE_RANGE[1])  # no G @ x is larger; a number of Python would be rounded to a float32 h


def standard_form(K: Array, b: Array, bounds: Bounds) -> tuple[Any, ...]:
    """Return b and bounds of the dual problem in standard form, and the shift of the multipliers.

    b becomes ``b - h``, and lower bounds become zero. This is the dual problem of the projection of
    ``g + G'shift``; equalities without a penalty have no lower bound.
    """
    xp, lower, upper, shift = namespace(b), bounds.lower, bounds.upper, None
    if lower is not None:
        shift = xp.where(xp.isinf(lower), xp.zeros_like(lower), lower)
        b = b + matvec(K, shift)
        upper = None if upper is None else upper - shift
        lower = lower - shift
    if bounds.h is not None:  # infinity for a row that is switched off
        b = b - bounds.h
        # A row of norm zero allows for nothing, but may ask for what no x gives.
        b = xp.where(xp.linalg.diagonal(K) == 0, xp.minimum(b, xp.zeros_like(b)), b)
    return b, lower, upper, shift


def make_bounds(options: Options, like: Array) -> Bounds:
    """Return the bounds that the options specify, broadcast to the shape of b (`like`).

    Raises for options that do not broadcast and, for numbers and on the CPU, for values out of range.
    """
    given = options.given
    if not given:
        return PLAIN
    h, margin, penalty, equality = options.h, options.margin, options.penalty, options.equality
    xp = namespace(like)
    right = None if h is None else _per_row(h, "h", like)
    lower = None if "margin" not in given else _per_row(margin, "margin", like)
    upper = None if penalty is None else _per_row(penalty, "penalty", like)
    mask = None if equality is False else _per_row(equality, "equality", like)
    if isinstance(like, np.ndarray) and lower is not None and upper is not None:
        held = upper < lower if mask is None else (upper < lower) & ~mask  # equalities have no margin
        if held.any():
            raise ValueError(f"penalty must be at least margin, {margin}; found {penalty}.")
    if mask is not None:  # a penalty on |G x - h| bounds the multiplier from both sides
        least = xp.full_like(like, -math.inf) if upper is None else -upper
        lower = xp.where(mask, least, xp.zeros_like(like) if lower is None else lower)
    bounds = Bounds(lower, upper, right)
    if right is None:
        return bounds
    if isinstance(like, np.ndarray):  # no G @ x is below a number as low
        off = right < (-_LARGEST if mask is None else np.where(mask, -np.finfo(float).max, -_LARGEST))
        return bounds.without(off) if np.count_nonzero(off) else bounds
    if lower is None:  # on a device, the method leaves out rows that are switched off
        return bounds
    return bounds._replace(lower=xp.where(bounds.off, xp.zeros_like(like), lower))


def is_like(value: Any, like: Array) -> bool:
    """Return whether an option is an array of real numbers or a mask, with the library and device of b."""
    if not is_array(value) or namespace(value) is not namespace(like) or device_of(value) != device_of(like):
        return False
    return is_real_floating(value) or namespace(like).isdtype(value.dtype, ("bool", "integral"))


_NUMBERS = "a number or an array of one number per constraint"
# What an option must be, and whether values are in range.
_VALID: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "h": (
        _NUMBERS,
        "finite and below 1e280, or -inf for rows without a constraint",
        lambda a: a < _LARGEST,
    ),
    "margin": (_NUMBERS, "finite and at least 0", lambda a: (a >= 0.0) & (a < math.inf)),
    "penalty": (_NUMBERS, "at least 0", lambda a: a >= 0.0),
    "equality": ("True, False or an array of one boolean per constraint", "", np.isfinite),
}


def real_numbers(value: Any, name: str) -> np.ndarray:
    """Return an option that is a number, a list or an array on the CPU as a NumPy array; raise if invalid."""
    (kind, must, valid), found = _VALID[name], None
    refuse_masked(value, name)
    with suppress(TypeError, ValueError, RuntimeError):
        found = to_numpy(value) if is_array(value) else np.asarray(value)
        found = found if found.size else found.astype(bool if name == "equality" else float)
    if found is None or found.dtype.kind not in "bfiu" or (found.dtype.kind == "b") != (name == "equality"):
        raise TypeError(f"{name} must be {kind}; found {value!r}.")
    if np.count_nonzero(fits := valid(found)) < found.size:
        raise ValueError(f"{name} must be {must}; found {found[~fits].flat[0]:g}.")
    return found


def _per_row(value: Any, name: str, like: Array) -> Array:
    """Return an option as an array like b."""
    xp, device, mask = namespace(like), device_of(like), name == "equality"
    there = not on_host(device) and is_like(value, like)
    found = value if there else from_numpy(real_numbers(value, name), xp, device)
    if there and xp.isdtype(found.dtype, "bool") != mask:
        raise TypeError(f"{name} must be {_VALID[name][0]}; found an array of {found.dtype}.")
    # Copied, because the solution keeps this array, and the caller may change the original.
    found = xp.astype(detached([found])[0], found.dtype if mask else like.dtype, copy=True)
    try:
        if found.ndim == 1 and found.shape[0] != like.shape[-1]:
            raise ValueError
        return found if found.shape == like.shape else xp.broadcast_to(found, like.shape)
    except (ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be {'True, False' if mask else 'a number'} or have shape {tuple(like.shape)}, one "
            f"entry per constraint; found {tuple(found.shape)}."
        ) from None
