"""The options of a projection: the method, the bounds of the multipliers and the right-hand side h.

    minimise 1/2 lam'K lam + (b - h)'lam  subject to  lower <= lam <= upper

========================  ===================================================
GEM                       ``0 <= lam``
``margin=m``              ``lower = m``
``penalty=c``             ``upper = c``
``equality``              ``lower = -inf`` (``-c`` with a penalty) for equalities
``h``                     ``b - h``
========================  ===================================================
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
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
)
from gemproj._checks import check_scalar, is_number, real_numbers, refuse_masked
from gemproj._constants import LOOSE
from gemproj._tspace import Standard, inverse, matvec, snap
from gemproj.methods import AnyMethod, Method, as_method


@dataclass(frozen=True, eq=False)
class Options:
    """Checked options of a projection; `make_bounds` checks the shapes and values of arrays."""

    method: Any
    h: Any = None
    margin: Any = 0.0
    penalty: Any = None
    equality: Any = False


def check_options(
    method: AnyMethod,
    *,
    h: Any = None,
    margin: Any = 0.0,
    penalty: Any = None,
    equality: Any = False,
) -> Options:
    """Return the options of a projection, checked as far as possible without G and g."""
    plain = h is None and penalty is None and type(margin) is float and margin == 0.0
    if plain and equality is False:
        return _named(method) if type(method) is str else Options(as_method(method))
    found = as_method(method)
    check_scalar(margin, "margin")
    if penalty is not None:
        check_scalar(penalty, "penalty")
    for name, value in {"h": h, "margin": margin, "penalty": penalty, "equality": equality}.items():
        refuse_masked(value, name)
    if not (is_array(equality) or isinstance(equality, (bool, list, tuple))):
        raise TypeError(
            f"equality must be True, False or an array of one boolean per constraint; found {equality!r}."
        )
    given = {
        "h": h is not None,
        "margin": is_array(margin) or bool(margin),
        "penalty": penalty is not None,
        "equality": equality is not False,
    }
    check_accepted(found, [(name, name) for name in given if given[name]])
    return Options(found, h, margin, penalty, equality)


def accepted(method: Any) -> Collection[str]:
    """Return the options that a method takes; a callable takes `h` and `margin`, which change only b."""
    return method.accepts if isinstance(method, Method) else ("h", "margin")


def check_accepted(method: Any, given: Iterable[tuple[str, str]]) -> None:
    """Raise for options that a method does not take; `given` holds pairs (name for the message, option)."""
    for name, option in given:
        if option not in accepted(method):
            raise ValueError(f"{name} cannot be combined with method {method!r}, which does not take it.")


@lru_cache(maxsize=64)
def _named(method: str) -> Options:
    return Options(as_method(method))


class Bounds(NamedTuple):
    """Bounds of the multipliers and the right-hand side h: arrays (..., t), or None for the default.

    Attributes
    ----------
    base : array or None
        Finite lower bounds, with 0 in place of -inf; None stands for 0.
    equality : array of bool or None
        True for rows with ``G x = h``; None stands for False everywhere.
    upper : array or None
        Upper bounds; None stands for infinity.
    h : array or None
        Right-hand side; None stands for 0.
    """

    base: Array | None = None
    equality: Array | None = None
    upper: Array | None = None
    h: Array | None = None

    @property
    def unbounded(self) -> Array | None:
        """Mask (..., t) of the rows without a lower bound (equalities without a penalty), or None."""
        if self.equality is None or self.upper is None:
            return self.equality
        return self.equality & namespace(self.upper).isinf(self.upper)

    def violated(self, slack: Array) -> Array:
        """Return the mask (..., t) of violated constraints: slack < 0, or slack != 0 for equalities."""
        return slack < 0 if self.equality is None else (slack < 0) | (self.equality & (slack > 0))


PLAIN = Bounds()


def standard_form(
    K: Array, b: Array, bounds: Bounds, reach: float | Array = LOOSE
) -> tuple[Standard, Array | None]:
    """Return the dual problem in standard form: h subtracted from b, finite lower bounds moved to zero.

    This is the dual problem of the projection of ``g + G'base``.

    Also return the mask (..., t) of cut rows, or None. Cutting a row replaces its ``b - h`` by a limit,
    `reach` (a number or (..., 1)) times the size of the problem. Entries above this limit would dominate the
    scaling of all rows. `overstepped` tests whether the cut changed the solution.
    """
    if bounds is PLAIN:
        return Standard(K, b, None, None), None
    xp, base, upper = namespace(b), bounds.base, bounds.upper
    if base is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            b = b + matvec(K, base)
        if isinstance(b, np.ndarray) and not np.isfinite(b).all():
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
    """Return the mask (...) of problems whose solution lam depends on the limit at which rows were cut.

    For all other problems, lam also solves the problem without the cut: the multiplier of each cut row is
    zero if ``b - h`` is positive, and at its upper bound if ``b - h`` is negative.
    """
    xp = namespace(lam)
    inside = lam != 0
    if dual.upper is not None:
        inside = xp.where(dual.b > 0, inside, lam < snap(lam, dual.upper))
    return xp.any(cut & inside, axis=-1)


def _subtract(
    K: Array, b: Array, bounds: Bounds, upper: Array | None, reach: float | Array
) -> tuple[Array, Array]:
    """Return ``b - h``, cut at `reach` times the size of the problem, and the mask (..., t) of the cut rows.

    Rows with a large positive ``b - h`` are cut, because they are far from active. Rows with a penalty and a
    large negative ``b - h`` are cut, because x violates them despite the penalty. Equalities without a
    penalty are never cut. The size of the problem is the largest ``|b_i| / |g_i|`` or positive
    ``h_i / |g_i|`` (``|h_i| / |g_i|`` for an equality). With a penalty, ``h_i / |g_i|`` counts as at most
    ``penalty |g_i|``, the largest distance by which row i can move x.
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
    with np.errstate(over="ignore"):
        most = reach * size * norms
    if upper is not None:
        low = xp.where(xp.isinf(upper), low, -most)
    if hard is not None:
        most = xp.where(hard, infinite, most)
    s = b - h
    return xp.minimum(xp.maximum(s, low), most), (s > most) | (s < low)


def make_bounds(options: Options, like: Array) -> Bounds:
    """Return the bounds that the options specify, broadcast to the shape of b (`like`).

    Raises for options that do not broadcast and, on the CPU, for values out of range.
    """
    h, margin, penalty, equality = options.h, options.margin, options.penalty, options.equality
    if h is None and penalty is None and equality is False and type(margin) is float and not margin:
        return PLAIN
    no_margin = is_number(margin) and not margin
    none = penalty is None or (is_number(penalty) and penalty == math.inf)
    xp = namespace(like)
    right = None if h is None else _per_row(h, "h", like)
    base = None if no_margin else _per_row(margin, "margin", like)
    upper = None if none else _per_row(penalty, "penalty", like)
    mask, zero = None if equality is False else _mask(equality, like), xp.zeros_like(like)
    if isinstance(like, np.ndarray):
        _check_values(right, base, upper, mask)
    if mask is None:
        return Bounds(base, None, upper, right)
    if upper is not None:  # a penalty on |G x - h| bounds the multiplier from both sides
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
            f"equality must be True, False or an array of one boolean per constraint; found {mask.dtype}."
        )
    return mask


def _shaped(value: Any, name: str, like: Array) -> Array:
    """Return `value` as an array with the library, device and shape of b."""
    xp, device = namespace(like), device_of(like)
    if not (is_array(value) and namespace(value) is xp and device_of(value) == device):
        value = from_numpy(real_numbers(value, name), xp, device)
    elif not is_real_floating(value) and not xp.isdtype(value.dtype, ("bool", "integral")):
        raise TypeError(f"{name} must hold real numbers; found dtype {value.dtype}.")
    # Copied, because the solution keeps this array, and the caller may change the original.
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
    """Raise for values out of range; called only on the CPU, where reading values does not synchronise."""
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
