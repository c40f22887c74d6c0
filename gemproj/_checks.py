"""Checks of t-space numbers: finite, in range, feasible."""

from __future__ import annotations

from dataclasses import replace

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
    to_numpy,
    wide_dtype,
)
from gemproj._blocks import shape
from gemproj._certificate import infeasible_rows
from gemproj._constants import NARROW_RANGE, WIDE_RANGE
from gemproj._problem import Problem
from gemproj._solution import DualSolution
from gemproj._tiles import stacked
from gemproj._tspace import Gram, inverse
from gemproj.methods import Status


def check_gram(K: Array, b: Array, gg: Array | None) -> Gram:
    """Check the t-space numbers against each other, and return them as t-space has them."""
    given = {"K": K, "b": b} | ({} if gg is None else {"gg": gg})
    for name, a in given.items():
        if not is_array(a):
            raise TypeError(f"{name} must be an array (NumPy, torch, CuPy, ...); found {type(a).__name__}.")
        if not is_real_floating(a):
            raise TypeError(f"{name} must have a real floating-point dtype; found {a.dtype}.")
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
    K, b, gg = (a if a is None else xp.astype(detach(a), wide, copy=False) for a in (K, b, gg))
    b = xp.broadcast_to(b, (*batch, t))
    if K.ndim > 2 and shape(K)[:-2] != batch:
        K = xp.broadcast_to(K, (*batch, t, t))
    if on_host(device):
        K, b, gg = (a if a is None else to_numpy(a) for a in (K, b, gg))
        if (np.diagonal(K, axis1=-2, axis2=-1) < 0.0).any():
            raise ValueError("K must be a Gram matrix; found a negative number on its diagonal.")
    if gg is None:
        xp = namespace(b)
        squares = b * b * inverse(xp.linalg.diagonal(K))
        if not on_host(device):  # there rows that are not finite are left out
            squares = xp.where(xp.isfinite(squares), squares, xp.zeros_like(squares))
        gg = xp.max(squares, axis=-1) if t else xp.sum(b, axis=-1)
    return Gram(K, b, gg)


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
    largest = np.zeros((*(() if shared else problem.batch), problem.t + (gram.gg.size if shared else 1)))
    for lead, tile in stacked(problem, problem.wide):
        part = largest[(*lead, ...)]
        np.maximum(part, np.max(np.abs(tile), axis=-1, initial=0.0), out=part)
    tiny = (largest > 0) & (largest < 1e-140)
    for i in map(tuple, np.argwhere(tiny)):
        name, row = ("g", "") if i[-1] >= problem.t else ("G", f"row {i[-1]} of ")
        raise ValueError(
            f"{row}{name} is too small: entries of at most {largest[i]:.1e}, whose squares leave the range "
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
    cause = "which holds NaN or infinity, or numbers whose squares overflow; scale it down if it is finite"
    K = np.broadcast_to(K, (*b.shape, b.shape[-1]))
    for i in np.ndindex(gg.shape):
        where = f"problem {i if len(i) > 1 else i[0]}" if i else ""
        rows = np.flatnonzero(~np.isfinite(np.diagonal(K[i])))
        if len(rows):
            place = f" of {where}" if where else ""
            raise ValueError(f"G is not finite: row {', '.join(map(str, rows))}{place}, {cause}.")
        if not np.isfinite(gg[i]):
            raise ValueError(f"g is not finite{': ' + where if where else ''}, {cause}.")
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


def check_feasible(sol: DualSolution) -> DualSolution:
    """Report an infeasible h of an exact method: by an error on the CPU, by a status on a device."""
    h = sol.bounds.h
    if h is None:
        return sol
    stalled = (sol.status & int(Status.STALLED)) != 0
    xp = namespace(stalled)
    if not on_host(device_of(stalled)):
        return replace(sol, status=sol.status + xp.astype(stalled, xp.int64) * int(Status.INFEASIBLE))
    t = h.shape[-1]
    K = np.broadcast_to(sol.gram.K, (*h.shape, t))
    free, hard = np.isinf(sol.lower), np.isinf(sol.upper)
    zero = np.diagonal(K, axis1=-2, axis2=-1) == 0
    suspect = stalled | np.any(zero & hard & np.where(free, h != 0, h > 0), axis=-1)
    for i in map(tuple, np.argwhere(suspect)):
        rows = infeasible_rows(K[i], h[i], hard[i], free[i])
        if len(rows):
            where = f" of problem {i if len(i) > 1 else i[0]}" if i else ""
            raise ValueError(
                f"h is infeasible: no x satisfies G @ x >= h in rows {', '.join(map(str, rows))}{where} at "
                "once. Lower h there, or give a penalty, which allows violations."
            )
    return sol
