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
from typing import Any, NamedTuple

import numpy as np

from gemproj._arrays import (
    Array,
    detach,
    device_of,
    from_numpy,
    is_array,
    is_real_floating,
    namespace,
    on_host,
)
from gemproj._checks import is_number, real_numbers
from gemproj._constants import LOOSE
from gemproj._tspace import Standard, inverse, matvec, snap


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


def standard_form(
    K: Array, b: Array, bounds: Bounds, reach: float | Array = LOOSE
) -> tuple[Standard, Array | None]:
    """Subtract h, and move finite lower bounds to zero: the projection of ``g + G'base``.

    Also return which rows were cut, boolean (..., t), or None: slacks beyond `reach` times the size of the
    problem, (..., 1), would set the scale for all other rows; see `overstepped`.
    """
    if bounds is PLAIN:
        return Standard(K, b, None, None), None
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
    cut = None
    if bounds.h is not None:
        b, cut = _subtract(K, b, bounds, upper, reach)
    lower, unbounded = None, bounds.unbounded
    if unbounded is not None:
        lower = xp.where(unbounded, xp.full_like(b, -math.inf), xp.zeros_like(b))
    return Standard(K, b, lower, upper), cut


def overstepped(dual: Standard, cut: Array, lam: Array) -> Array:
    """Return for which problems, boolean (...), a row that was cut takes part in the solution lam.

    Elsewhere lam solves the problem that was asked, too: the multipliers of cut rows are zero where the
    slack is positive, and at the upper bound where it is negative.
    """
    xp = namespace(lam)
    inside = lam != 0
    if dual.upper is not None:
        inside = xp.where(dual.b > 0, inside, lam < snap(lam, dual.upper))
    return xp.any(cut & inside, axis=-1)


def _subtract(
    K: Array, b: Array, bounds: Bounds, upper: Array | None, reach: float | Array
) -> tuple[Array, Array]:
    """Return b - h, cut at `reach` times the size of the problem, and where.

    Rows that ask for little are cut, and soft rows that ask for more than they get; no equality without a
    penalty. The size is that of b and of the demands; a soft row gets no more than its penalty pulls.
    """
    xp, h, hard = namespace(b), bounds.h, bounds.unbounded
    norms, infinite = xp.sqrt(xp.linalg.diagonal(K)), xp.full_like(b, math.inf)
    per_norm = inverse(norms)
    asked = xp.maximum(h, xp.zeros_like(h))
    if bounds.equality is not None:
        asked = xp.where(bounds.equality, xp.abs(h), asked)
    asked = asked * per_norm
    low, size = -infinite, 0.0 * asked
    if upper is not None:
        asked = xp.minimum(asked, upper * xp.where(norms > 0, norms, xp.ones_like(norms)))
    if b.shape[-1]:
        size = xp.max(xp.maximum(xp.abs(b) * per_norm, asked), axis=-1, keepdims=True)
    most = reach * size * norms
    if upper is not None:
        low = xp.where(xp.isinf(upper), low, -most)
    if hard is not None:
        most = xp.where(hard, infinite, most)
    s = b - h
    return xp.minimum(xp.maximum(s, low), most), (s > most) | (s < low)


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
    mask, zero = None if equality is False else _mask(equality, like), xp.zeros_like(like)
    if on_host(device_of(like)):
        _check_values(right, base, upper, mask)
    if mask is None:
        return Bounds(base, None, upper, right)
    if upper is not None:  # |G x - h| is penalised from both sides
        base = xp.where(mask, xp.where(xp.isinf(upper), zero, -upper), zero if base is None else base)
    elif base is not None:
        base = xp.where(mask, zero, base)
    return Bounds(base, mask, upper, right)


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
        value = from_numpy(real_numbers(value, name), xp, device)
    elif not is_real_floating(value) and not xp.isdtype(value.dtype, ("bool", "integral")):
        raise TypeError(f"{name} must hold real numbers; found dtype {value.dtype}.")
    # A copy: a solution keeps it, and must not change with the array of the caller.
    value = xp.astype(detach(value), value.dtype, copy=True)
    try:
        if value.ndim == 1 and value.shape[0] != like.shape[-1]:
            raise ValueError
        return xp.broadcast_to(value, like.shape)
    except (ValueError, RuntimeError):
        raise ValueError(
            f"{name} must be {'True, False' if name == 'equality' else 'a number'} or have shape "
            f"{tuple(like.shape)}, one entry per constraint; "
            f"found {tuple(value.shape)}."
        ) from None


def _check_values(
    h: np.ndarray | None, margin: np.ndarray | None, penalty: np.ndarray | None, equality: np.ndarray | None
) -> None:
    """Raise for values out of range, on the CPU, where looking at them is free."""
    for name, value in (("h", h), ("margin", margin)):
        if value is not None and not np.isfinite(value).all():
            raise ValueError(f"{name} must be finite; found {value}.")
    for name, value in (("margin", margin), ("penalty", penalty)):
        if value is not None and not (value >= 0.0).all():
            raise ValueError(f"{name} must be at least 0; found {value}.")
    if margin is None or penalty is None:
        return
    if ((penalty < margin) & (True if equality is None else ~equality)).any():  # equalities have no margin
        raise ValueError(f"penalty must be at least margin, {margin}; found {penalty}.")
