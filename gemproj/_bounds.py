"""Every variant of the problem as bounds of the multipliers and a right-hand side.

    minimise 1/2 lam'K lam + (b - h)'lam  subject to  lower <= lam <= upper

========================  ===================================================
GEM                       ``0 <= lam``
``margin=m``              ``lower = m``
``penalty=c``             ``upper = c``
``equality``              ``lower = -inf`` (``-c`` with a penalty) on its rows
``h``                     ``b - h``
========================  ===================================================
"""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

import numpy as np

from gemproj._arrays import Array, device_of, from_numpy, is_array, namespace, on_host, to_numpy
from gemproj._constants import LOOSE
from gemproj._tspace import Standard, inverse, matvec


class Bounds(NamedTuple):
    """Bounds of the multipliers, arrays (..., t) or None.

    Attributes
    ----------
    base : array or None
        Lower bounds where they are finite, and 0 elsewhere; None stands for 0.
    equality : array of bool or None
        Rows with ``G x = h``; None stands for none.
    upper : array or None
        None stands for infinity.
    h : array or None
        Right-hand side; None stands for 0.
    """

    base: Array | None = None
    equality: Array | None = None
    upper: Array | None = None
    h: Array | None = None

    @property
    def unbounded(self) -> Array | None:
        """Rows without a lower bound, bool, or None: equalities without a penalty."""
        if self.equality is None or self.upper is None:
            return self.equality
        return self.equality & namespace(self.upper).isinf(self.upper)

    def violated(self, slack: Array) -> Array:
        """Return which constraints slacks ``G x - h`` violate, boolean (..., t): equalities by any sign."""
        return slack < 0 if self.equality is None else (slack < 0) | (self.equality & (slack > 0))


PLAIN = Bounds()


def standard_form(K: Array, b: Array, bounds: Bounds) -> Standard:
    """Subtract h, and move finite lower bounds to zero: the projection of ``g + G'base``."""
    if bounds is PLAIN:
        return Standard(K, b, None, None)
    xp, base, upper = namespace(b), bounds.base, bounds.upper
    if base is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            b = b + matvec(K, base)
        if on_host(device_of(b)) and not np.isfinite(b).all():
            raise ValueError(
                "margin, or the penalty of an equality, times the rows of G overflows. Lower it, or scale G "
                "and g down."
            )
        upper = None if upper is None else upper - base
    if bounds.h is not None:
        b = _subtract(K, b, bounds)
    lower, unbounded = None, bounds.unbounded
    if unbounded is not None:
        lower = xp.where(unbounded, xp.full_like(b, -math.inf), xp.zeros_like(b))
    return Standard(K, b, lower, upper)


def _subtract(K: Array, b: Array, bounds: Bounds) -> Array:
    """Return b - h, where loose rows are less so: they would set the scale for all others."""
    xp, h = namespace(b), bounds.h
    norms = xp.sqrt(xp.linalg.diagonal(K))
    asked = xp.maximum(h, xp.zeros_like(h))
    most = xp.full_like(b, math.inf)
    if b.shape[-1]:
        size = xp.max(xp.maximum(xp.abs(b), asked) * inverse(norms), axis=-1, keepdims=True)
        most = LOOSE * size * norms
    if bounds.equality is not None:
        most = xp.where(bounds.equality, xp.full_like(b, math.inf), most)
    return xp.minimum(b - h, most)


def make_bounds(h: Any, margin: Any, penalty: Any, equality: Any, like: Array) -> Bounds:
    """Return the bounds that the options of `project` stand for, for multipliers shaped `like` b.

    Options of another shape are an error, and on the CPU values out of range.
    """
    no_margin = is_number(margin) and not margin
    none = penalty is None or (is_number(penalty) and penalty == math.inf)
    if h is None and none and no_margin and equality is False:
        return PLAIN
    xp = namespace(like)
    right = None if h is None else _per_row(h, "h", like)
    base = None if no_margin else _per_row(margin, "margin", like)
    upper = None if none else _per_row(penalty, "penalty", like)
    if on_host(device_of(like)):
        _check_values(right, base, upper)
    if equality is False:
        return Bounds(base, None, upper, right)
    mask, zero = _mask(equality, like), xp.zeros_like(like)
    if upper is not None:  # |G x - h| is penalised from both sides
        base = xp.where(mask, xp.where(xp.isinf(upper), zero, -upper), zero if base is None else base)
    elif base is not None:
        base = xp.where(mask, zero, base)
    return Bounds(base, mask, upper, right)


def is_number(value: Any) -> bool:
    """Return whether `value` is a plain real number."""
    return type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def check_scalar(value: Any, name: str) -> None:
    """Check an option that is one number, or leave arrays to `make_bounds`."""
    if is_array(value) or isinstance(value, (list, tuple)):
        return
    if not is_number(value):
        raise TypeError(f"{name} must be a number, or an array of one per constraint; found {value!r}.")
    if not value >= 0.0 or (value == math.inf and name == "margin"):
        finite = "finite and " if name == "margin" else ""
        raise ValueError(f"{name} must be {finite}at least 0; found {value}.")


def _per_row(value: Any, name: str, like: Array) -> Array:
    """Return an option as an array shaped like b."""
    xp = namespace(like)
    if is_number(value):
        return xp.full_like(like, float(value))
    return xp.astype(_shaped(value, name, like), like.dtype, copy=False)


def _mask(equality: Any, like: Array) -> Array:
    xp = namespace(like)
    if equality is True:
        return xp.ones_like(like, dtype=xp.bool)
    mask = _shaped(equality, "equality", like)
    if not xp.isdtype(mask.dtype, "bool"):
        raise TypeError(
            f"equality must be True, False or a boolean array of one per constraint; found {mask.dtype}."
        )
    return mask


def _shaped(value: Any, name: str, like: Array) -> Array:
    """Return an array of the library and device of b, broadcast to its shape."""
    xp, device = namespace(like), device_of(like)
    if not (is_array(value) and namespace(value) is xp and device_of(value) == device):
        host = to_numpy(value) if is_array(value) else np.asarray(value)
        if host.dtype.kind not in "bfiu":
            raise TypeError(f"{name} must hold real numbers; found dtype {host.dtype}.")
        value = from_numpy(host, xp, device)
    elif getattr(value, "requires_grad", False):
        value = value.detach()
    try:
        if value.ndim == 1 and value.shape[0] != like.shape[-1]:
            raise ValueError
        return xp.broadcast_to(value, like.shape)
    except (ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be a number or have shape {tuple(like.shape)}, one entry per constraint; "
            f"found {tuple(value.shape)}."
        ) from None


def _check_values(h: np.ndarray | None, margin: np.ndarray | None, penalty: np.ndarray | None) -> None:
    """Raise for values out of range, on the CPU, where looking at them is free."""
    for name, value in (("h", h), ("margin", margin)):
        if value is not None and not np.isfinite(value).all():
            raise ValueError(f"{name} must be finite; found {value}.")
    for name, value in (("margin", margin), ("penalty", penalty)):
        if value is not None and not (value >= 0.0).all():
            raise ValueError(f"{name} must be at least 0; found {value}.")
    if margin is not None and penalty is not None and (penalty < margin).any():
        raise ValueError(f"penalty must be at least margin, {margin}; found {penalty}.")
