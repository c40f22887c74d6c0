"""Checks that K, b and |g|^2 are finite and in the range of their dtype."""

from __future__ import annotations

import math

import numpy as np

from gemproj._arrays import Array, namespace
from gemproj._constants import NARROW_RANGE, WIDE_RANGE
from gemproj._problem import Problem
from gemproj._tiles import stacked
from gemproj._tspace import Gram


def check_range(problem: Problem, gram: Gram) -> None:
    """Raise, on the CPU, if a row of G, or g, is not finite or its square leaves the range of float64."""
    low, high = WIDE_RANGE
    if gram.gg.ndim == 0:  # Python floats are compared faster than NumPy scalars
        inside = [low < v < high for v in (*gram.K.diagonal().tolist(), float(gram.gg))]
    else:
        squares = np.diagonal(gram.K, axis1=-2, axis2=-1)
        inside = [low < v.min(initial=1.0) and v.max(initial=1.0) < high for v in (squares, gram.gg)]
    if all(inside):
        return
    check_finite(gram)
    if not problem.has_float64():
        return  # squares of numbers in float32 and narrower dtypes are in range
    shared = problem.shared
    rows = problem.t + (gram.gg.size if shared else 1)
    largest = np.zeros((*(() if shared else problem.batch), rows), np.longdouble)
    xp, arrays = problem.xp, [*problem.rows, *problem.vector]
    # Small numbers in long double would be zero in float64.
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
    """Return the mask (...) of problems in which no product left the range of float32; on the CPU."""
    low, high = NARROW_RANGE
    squares = np.diagonal(gram.K, axis1=-2, axis2=-1)
    return np.all((squares > low) & (squares < high), axis=-1) & (gram.gg > low) & (gram.gg < high)


def check_finite(gram: Gram) -> None:
    """Raise if G or g is not finite or its squares overflow; the message names the rows."""
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
    """Return K and b with zeros for the rows that are not finite, and the mask (..., t) of the finite rows.

    No value is read, so a device is not synchronised. If g is not finite, all entries of b are not finite:
    then all rows are left out, and x is g.
    """
    xp = namespace(b)
    # Not `isfinite`, which is four operations in torch.
    kept, zero = xp.abs(xp.linalg.diagonal(K) + xp.abs(b)) < math.inf, xp.zeros_like(b)
    K = xp.where(kept[..., :, None] & kept[..., None, :], K, zero[..., None])
    return K, xp.where(kept, b, zero), kept
