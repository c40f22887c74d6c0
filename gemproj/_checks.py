"""Checks of arguments: each error names the argument, what was found, and what to pass instead."""

from __future__ import annotations

import numbers
from typing import Any, TypeGuard

import numpy as np

from gemproj._arrays import (
    Array,
    detached,
    is_array,
    is_real_floating,
    namespace,
    on_host,
    to_numpy,
    wide_dtype,
)

# Names of GEM's memory strength: `project` has margin, a promise has weight.
STRENGTHS = {"gamma", "margin", "memory_strength", "strength", "weight"}


def check_count(value: Any, name: str, smallest: int) -> None:
    """Raise unless `value` is an integer of at least `smallest`."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer; found {value!r}.")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}; found {value}.")


def check_number(value: Any, name: str, low: float, *, strict: bool = False) -> None:
    """Raise unless `value` is a finite real number of at least `low` (above `low` if `strict`)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number; found {value!r}.")
    number = float(value)
    if not (low < number if strict else low <= number) or number == float("inf"):
        raise ValueError(
            f"{name} must be finite and {'above' if strict else 'at least'} {low:g}; found {value}."
        )


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a plain real number."""
    return type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def refuse_masked(a: Any, name: str) -> None:
    """Raise for a NumPy masked array, because the projection would ignore its mask."""
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array; pass {name}.filled(0.0).")


def check_array(
    a: Any, name: str, must: str = "an array (NumPy, torch, CuPy, ...)", remedy: str = "Convert it first"
) -> None:
    """Raise unless `a` is an array with a real floating-point dtype."""
    refuse_masked(a, name)
    if not is_array(a):
        listed = isinstance(a, (list, tuple)) or hasattr(a, "__array__")
        hint = "; convert it, for example with numpy.asarray" if listed else ""
        raise TypeError(f"{name} must be {must}; found {type(a).__name__}{hint}.")
    if not is_real_floating(a):
        raise TypeError(f"{name} must have a real floating-point dtype; found {a.dtype}. {remedy}.")


def check_multipliers(lam: Any, name: str, expected: tuple[int, ...], xp: Any, device: Any) -> Array:
    """Return checked multipliers (..., t) as an array of t-space: float64, and NumPy on the CPU."""
    check_metadata_of_multipliers(lam, name, expected, xp)
    lam = xp.asarray(detached([lam])[0], dtype=wide_dtype(xp, device), device=device)
    return to_numpy(lam) if on_host(device) else lam


def check_metadata_of_multipliers(lam: Any, name: str, expected: tuple[int, ...], xp: Any) -> None:
    """Raise unless multipliers have the right library, shape and dtype; their values are not read."""
    check_array(lam, name, f"an array of shape {expected}")
    if tuple(lam.shape) != expected:
        raise ValueError(
            f"{name} must have shape {expected}, one multiplier per constraint; found {tuple(lam.shape)}."
        )
    if namespace(lam) is not xp:
        library = xp.__name__.rpartition(".")[2]
        raise TypeError(
            f"{name} must be of the library of the other arrays, {library}; found {type(lam).__name__}."
        )
