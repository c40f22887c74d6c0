"""Checks of arguments: each error names the argument, what was found, and what to pass instead."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from gemproj._arrays import (
    Array,
    common_namespace,
    detach,
    device_of,
    is_array,
    is_real_floating,
    namespace,
    on_host,
    refuse_transformed,
    to_numpy,
    wide_dtype,
)
from gemproj._constants import WIDE_RANGE
from gemproj._tspace import Gram, inverse


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


def is_number(value: Any) -> bool:
    """Return whether `value` is a plain real number."""
    return type(value) is float or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def check_scalar(value: Any, name: str) -> None:
    """Raise unless an option is a valid number or an array; `make_bounds` checks the arrays."""
    if not is_number(value):
        if is_array(value) or isinstance(value, (list, tuple)):
            return
        raise TypeError(f"{name} must be a number, or an array of one per constraint; found {value!r}.")
    if not value >= 0.0 or (value == math.inf and name == "margin"):
        finite = "finite and " if name == "margin" else ""
        raise ValueError(f"{name} must be {finite}at least 0; found {value}.")


def real_numbers(value: Any, name: str) -> np.ndarray:
    """Return a list, or an array of any library, as a NumPy array of real numbers."""
    host = to_numpy(value) if is_array(value) else np.asarray(value)
    if host.dtype.kind not in "bfiu":
        raise TypeError(f"{name} must hold real numbers; found dtype {host.dtype}.")
    return host


def refuse_masked(a: Any, name: str) -> None:
    """Raise for a NumPy masked array, because the projection would ignore its mask."""
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array; pass {name}.filled(0.0).")


def shape(a: Array) -> tuple[int, ...]:
    """Return the shape of an array as a tuple of plain integers, for messages."""
    return tuple(a.shape)


def check_start(warm_start: Any, expected: tuple[int, ...], xp: Any, device: Any) -> Array | None:
    """Return the checked warm start as an array of t-space, or None."""
    return None if warm_start is None else check_multipliers(warm_start, "warm_start", expected, xp, device)


def check_multipliers(lam: Any, name: str, expected: tuple[int, ...], xp: Any, device: Any) -> Array:
    """Return checked multipliers (..., t) as an array of t-space: float64, and NumPy on the CPU."""
    check_look_of_multipliers(lam, name, expected, xp)
    lam = xp.asarray(detach(lam), dtype=wide_dtype(xp, device), device=device)
    return to_numpy(lam) if on_host(device) else lam


def check_look_of_multipliers(lam: Any, name: str, expected: tuple[int, ...], xp: Any) -> None:
    """Raise unless multipliers have the right library, shape and dtype; their values are not read."""
    refuse_masked(lam, name)
    if not is_array(lam):
        raise TypeError(f"{name} must be an array of shape {expected}; found {type(lam).__name__}.")
    if tuple(lam.shape) != expected:
        raise ValueError(
            f"{name} must have shape {expected}, one multiplier per constraint; found {shape(lam)}."
        )
    if namespace(lam) is not xp:
        library = xp.__name__.rpartition(".")[2]
        raise TypeError(
            f"{name} must be of the library of the other arrays, {library}; found {type(lam).__name__}."
        )
    if not is_real_floating(lam):
        raise TypeError(f"{name} must have a real floating-point dtype; found {lam.dtype}.")


def check_gram(K: Array, b: Array, gg: Array | None) -> Gram:
    """Return copies of K, b and gg as arrays of t-space; raise if they are invalid or do not fit together."""
    given = {"K": K, "b": b} | ({} if gg is None else {"gg": gg})
    for name, a in given.items():
        refuse_masked(a, name)
        if not is_array(a):
            raise TypeError(f"{name} must be an array (NumPy, torch, CuPy, ...); found {type(a).__name__}.")
        if not is_real_floating(a):
            raise TypeError(f"{name} must have a real floating-point dtype; found {a.dtype}.")
    refuse_transformed(list(given.values()))
    xp, device = common_namespace(list(given.values())), device_of(b)
    if K.ndim < 2 or K.shape[-1] != K.shape[-2]:
        raise ValueError(f"K must be a Gram matrix of shape (..., t, t); found {shape(K)}.")
    if b.ndim < 1 or b.shape[-1] != K.shape[-1]:
        raise ValueError(
            f"b must have shape (..., {K.shape[-1]}) to go with K of shape {shape(K)}; found {shape(b)}."
        )
    try:
        batch = np.broadcast_shapes(tuple(K.shape[:-2]), tuple(b.shape[:-1]))
    except ValueError:
        raise ValueError(
            f"The leading dimensions of K {shape(K)} and b {shape(b)} do not broadcast."
        ) from None
    if gg is not None and shape(gg) != batch:
        raise ValueError(f"gg must have shape {batch}, one squared norm per problem; found {shape(gg)}.")
    wide, t = wide_dtype(xp, device), b.shape[-1]
    # Copies, because the solution keeps them and must not change with the caller's arrays.
    K, b, gg = (a if a is None else xp.astype(detach(a), wide, copy=True) for a in (K, b, gg))
    b = xp.broadcast_to(b, (*batch, t))
    if K.ndim > 2 and shape(K)[:-2] != batch:
        K = xp.broadcast_to(K, (*batch, t, t))
    if on_host(device):
        K, b, gg = (a if a is None else to_numpy(a) for a in (K, b, gg))
        _check_products(K)
        if gg is not None and (gg < 0.0).any():
            raise ValueError(f"gg must be the squared norm of g; found {gg.min()}.")
    if gg is None:
        xp = namespace(b)
        squares = b * b * inverse(xp.linalg.diagonal(K))
        if not on_host(device):  # rows that are not finite are left out on a device
            squares = xp.where(xp.isfinite(squares), squares, xp.zeros_like(squares))
        gg = xp.max(squares, axis=-1) if t else xp.sum(b, axis=-1)
    return Gram(K, b, gg)


def _check_products(K: np.ndarray) -> None:
    """Raise if K is not a Gram matrix, with a tolerance of 1 % for rounded products."""
    diagonal = np.diagonal(K, axis1=-2, axis2=-1)
    if (diagonal < 0.0).any():
        raise ValueError("K must be a Gram matrix; found a negative number on its diagonal.")
    t = max(1, K.shape[-1])
    n = np.sqrt(np.maximum(diagonal, WIDE_RANGE[0])).reshape(-1, t)
    flat, step = K.reshape(-1, t, t), max(1, 65_536 // t**2)
    for i in range(0, len(flat), step):  # slabs of matrices that stay in cache
        part = flat[i : i + step]
        most = n[i : i + step, :, None] * n[i : i + step, None, :]
        if (np.abs(part) > 1.01 * most).any():
            raise ValueError(
                "K must be a Gram matrix, positive semidefinite: found K[i, j]**2 > K[i, i] * K[j, j]."
            )
        with np.errstate(invalid="ignore"):  # `check_finite` raises for NaN and infinity
            apart = np.abs(part - np.swapaxes(part, -1, -2))
        if (apart > 0.01 * most).any():
            raise ValueError("K must be a Gram matrix; found one that is not symmetric.")
        if t > 2 and np.isfinite(part).all():  # for two rows the first check suffices
            try:
                np.linalg.cholesky(part / most + 0.01 * t * np.eye(t))
            except np.linalg.LinAlgError:
                raise ValueError(
                    "K must be a Gram matrix, positive semidefinite: found one with a negative eigenvalue."
                ) from None
