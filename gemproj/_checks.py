"""Checks of t-space numbers: finite, in range, feasible."""

from __future__ import annotations

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
    refuse_masked,
    refuse_transformed,
    to_numpy,
    wide_dtype,
)
from gemproj._blocks import shape
from gemproj._constants import NARROW_RANGE, WIDE_RANGE
from gemproj._problem import Problem
from gemproj._tiles import stacked
from gemproj._tspace import Gram, inverse


def check_gram(K: Array, b: Array, gg: Array | None) -> Gram:
    """Check the t-space numbers against each other, and return them as t-space has them."""
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
    # Copies: a solution keeps them, and must not change with the arrays of the caller.
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
        if not on_host(device):  # there rows that are not finite are left out
            squares = xp.where(xp.isfinite(squares), squares, xp.zeros_like(squares))
        gg = xp.max(squares, axis=-1) if t else xp.sum(b, axis=-1)
    return Gram(K, b, gg)


def _check_products(K: np.ndarray) -> None:
    """Raise for a K that no rows have, whose products may be rounded to two digits."""
    diagonal = np.diagonal(K, axis1=-2, axis2=-1)
    if (diagonal < 0.0).any():
        raise ValueError("K must be a Gram matrix; found a negative number on its diagonal.")
    t = max(1, K.shape[-1])
    n = np.sqrt(np.maximum(diagonal, WIDE_RANGE[0])).reshape(-1, t)
    flat, step = K.reshape(-1, t, t), max(1, 65_536 // t**2)
    for i in range(0, len(flat), step):  # slabs that stay in cache
        part = flat[i : i + step]
        most = n[i : i + step, :, None] * n[i : i + step, None, :]
        if (np.abs(part) > 1.01 * most).any():
            raise ValueError(
                "K must be a Gram matrix, positive semidefinite: found K[i, j]**2 > K[i, i] * K[j, j]."
            )
        with np.errstate(invalid="ignore"):  # what is not finite is told later
            apart = np.abs(part - np.swapaxes(part, -1, -2))
        if (apart > 0.01 * most).any():
            raise ValueError("K must be a Gram matrix; found one that is not symmetric.")


def check_range(problem: Problem, gram: Gram) -> None:
    """Raise for rows, on the CPU, that are not finite or whose squares are not in the range of float64."""
    low, high = WIDE_RANGE
    if gram.gg.ndim == 0:  # plain numbers are the fastest to look at
        inside = [low < v < high for v in (*gram.K.diagonal().tolist(), float(gram.gg))]
    else:
        squares = np.diagonal(gram.K, axis1=-2, axis2=-1)
        inside = [low < v.min(initial=1.0) and v.max(initial=1.0) < high for v in (squares, gram.gg)]
    if all(inside):
        return
    check_finite(gram)
    if not problem.has_float64():
        return  # squares of what narrower dtypes hold are in range
    shared = problem.shared
    rows = problem.t + (gram.gg.size if shared else 1)
    largest = np.zeros((*(() if shared else problem.batch), rows), np.longdouble)
    xp, arrays = problem.xp, [*problem.rows, *problem.vector]
    # Numbers of long double may be zero in float64.
    dtype = next((a.dtype for a in arrays if xp.finfo(a.dtype).bits > 64), problem.wide)
    for lead, tile in stacked(problem, dtype):
        part = largest[(*lead, ...)]
        np.maximum(part, np.max(np.abs(tile), axis=-1, initial=0.0), out=part)
    tiny = (largest > 0) & (largest < 1e-140)
    for i in map(tuple, np.argwhere(tiny)):
        name, row = ("g", "") if i[-1] >= problem.t else ("G", f"row {i[-1]} of ")
        most = np.format_float_scientific(largest[i], precision=1)
        raise ValueError(
            f"{row}{name} is too small: entries of at most {most}, whose squares leave the range "
            f"of float64. Scale {name} up; rows of G may be scaled freely."
        )


def fits_float32(gram: Gram) -> np.ndarray:
    """Return for which problems, boolean (...), no product left the range of float32; on the CPU."""
    low, high = NARROW_RANGE
    squares = np.diagonal(gram.K, axis1=-2, axis2=-1)
    return np.all((squares > low) & (squares < high), axis=-1) & (gram.gg > low) & (gram.gg < high)


def check_finite(gram: Gram) -> None:
    """Raise for rows that are not finite, or whose squares overflow, naming them."""
    K, b, gg = gram
    if np.isfinite(K).all() and np.isfinite(b).all() and np.isfinite(gg).all():
        return
    cause = "NaN or infinity, or numbers whose squares overflow; scale it down if it is finite"
    K = np.broadcast_to(K, (*b.shape, b.shape[-1]))
    for i in np.ndindex(gg.shape):
        where = f"problem {i if len(i) > 1 else i[0]}" if i else ""
        rows = np.flatnonzero(~np.isfinite(np.diagonal(K[i])))
        if len(rows):
            place = f" of {where}" if where else ""
            name, hold = ("row", "holds") if len(rows) == 1 else ("rows", "hold")
            found = f"{name} {', '.join(map(str, rows))}{place}"
            raise ValueError(f"G is not finite: {found}, which {hold} {cause}.")
        if not np.isfinite(gg[i]):
            raise ValueError(f"g is not finite{': ' + where if where else ''}, which holds {cause}.")
        if not (np.isfinite(K[i]).all() and np.isfinite(b[i]).all()):
            place = f" in {where}" if where else ""
            raise ValueError(
                f"G and g are too large{place}: products of their entries overflow. Scale them down."
            )


def drop_not_finite(K: Array, b: Array) -> tuple[Array, Array, Array]:
    """Take rows that are not finite out of K and b, without looking at them; return which these are, too.

    Where g is not finite b is not either: then all rows are left out, and x is g.
    """
    xp = namespace(b)
    bad, zero = ~xp.isfinite(xp.linalg.diagonal(K) + xp.abs(b)), xp.zeros_like(b)
    K = xp.where(bad[..., :, None] | bad[..., None, :], zero[..., None], K)
    return K, xp.where(bad, zero, b), bad
