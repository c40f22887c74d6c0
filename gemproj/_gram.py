"""Stage 1: K, b and |g|^2, computed in one read of G and g or given, and checks that they are finite."""

from __future__ import annotations

import math

import numpy as np

from gemproj._arrays import (
    Array,
    Blocks,
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
from gemproj._checks import refuse_masked
from gemproj._constants import EPS, WIDE_RANGE, WIDE_ROUNDING
from gemproj._problem import Problem, check_problem
from gemproj._tiles import stacked
from gemproj._tspace import Gram, Measured, inverse
from gemproj.backends import select


def gram(G: Blocks, g: Blocks, *, metric: Blocks | None = None) -> Gram:
    """Return the Gram matrix of the constraints, the linear term and the squared norm of g.

    Products are computed and summed in float64 for every input dtype (float32 on devices without float64),
    and no array of the size of `G` is allocated.

    Parameters
    ----------
    G, g, metric
        As in `solve_dual`. The Gram matrix of blocks is the sum over the blocks.

    Returns
    -------
    Gram
        ``K`` (..., t, t), ``b`` (..., t) and ``gg`` (...), on the device of `G`.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import gram
    >>> K, b, gg = gram(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([-2.0, 1.0]))
    >>> K.tolist(), b.tolist(), float(gg)
    ([[1.0, 1.0], [1.0, 2.0]], [-2.0, -1.0], 5.0)
    """
    problem = check_problem(G, g, metric)
    return Gram(*map(problem.to_caller, measure(problem).gram))


def measure(problem: Problem) -> Measured:
    """Return K, b and |g|^2 of a problem, and the problem itself for later reads of G."""
    rounding = WIDE_ROUNDING * float(problem.xp.finfo(problem.wide).eps) / EPS
    return Measured(select(problem).gram(problem), rounding, problem.to_caller, problem)


def check_range(gram: Gram, problem: Problem | None) -> None:
    """On the CPU, raise if g or a row of G is not finite, or its squared norm is out of float64's range."""
    low, high = WIDE_RANGE
    if gram.gg.ndim == 0:  # Python floats are compared faster than NumPy scalars
        inside = all(low < v < high for v in (*gram.K.diagonal().tolist(), float(gram.gg)))
    else:
        squares = np.diagonal(gram.K, axis1=-2, axis2=-1), gram.gg
        inside = all(low < v.min(initial=1.0) and v.max(initial=1.0) < high for v in squares)
    if inside:
        return
    G, g, free = "G", "g", "rows of G"
    if problem is not None and problem.weight is not None:
        G, g, free = "G / sqrt(metric)", "g * sqrt(metric)", "rows of G, and the whole metric,"
    _check_finite(gram, G, g)
    if problem is None or not problem.has_float64():
        return  # squares of numbers in float32 and narrower dtypes are in range
    shared = problem.shared
    rows = problem.t + (gram.gg.size if shared else 1)
    largest = np.zeros((*(() if shared else problem.batch), rows), np.longdouble)
    xp, arrays = problem.xp, [*problem.rows, *problem.vector]
    # In float64, small numbers of a long double array would underflow to zero.
    dtype = next((a.dtype for a in arrays if xp.finfo(a.dtype).bits > 64), problem.wide)
    for lead, tile in stacked(problem, dtype):
        part = largest[(*lead, ...)]
        np.maximum(part, np.max(np.abs(tile), axis=-1, initial=0.0), out=part)
    tiny = (largest > 0) & (largest < 1e-140)
    for i in map(tuple, np.argwhere(tiny)):
        name, row = (g, "") if i[-1] >= problem.t else (G, f"row {i[-1]} of ")
        most = np.format_float_scientific(largest[i], precision=1)
        raise ValueError(
            f"{row}{name} is too small: entries of at most {most}, whose squares leave the range "
            f"of float64. Scale {name} up; {free} may be scaled freely."
        )


def _check_finite(gram: Gram, G: str = "G", g: str = "g") -> None:
    """Raise if G or g is not finite or its squares overflow; the message names the array and its rows."""
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
            raise ValueError(f"{G} is not finite: {found}, which {hold} {cause}.")
        if not np.isfinite(gg[i]):
            raise ValueError(f"{g} is not finite{': ' + where if where else ''}; it holds {cause}.")
        if not (np.isfinite(K[i]).all() and np.isfinite(b[i]).all()):
            place = f" in {where}" if where else ""
            raise ValueError(
                f"{G} and {g} are not finite, or too large{place}: products of their entries overflow. Scale "
                "them down."
            )


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
    xp, device = namespace(*given.values()), device_of(b)
    of_K, of_b = tuple(K.shape), tuple(b.shape)
    if K.ndim < 2 or of_K[-1] != of_K[-2]:
        raise ValueError(f"K must be a Gram matrix of shape (..., t, t); found {of_K}.")
    if of_b[-1:] != of_K[-1:]:
        raise ValueError(f"b must have shape (..., {of_K[-1]}) to go with K of shape {of_K}; found {of_b}.")
    try:
        batch = of_b[:-1] if of_K[:-2] in ((), of_b[:-1]) else np.broadcast_shapes(of_K[:-2], of_b[:-1])
    except ValueError:
        raise ValueError(f"The leading dimensions of K {of_K} and b {of_b} do not broadcast.") from None
    if gg is not None and tuple(gg.shape) != batch:
        raise ValueError(
            f"gg must have shape {batch}, one squared norm per problem; found {tuple(gg.shape)}."
        )
    wide, t = wide_dtype(xp, device), b.shape[-1]
    # Copied, because the solution keeps these arrays, and the caller may change the originals.
    K, b, gg = (a if a is None else xp.astype(detach(a), wide, copy=True) for a in (K, b, gg))
    if of_b[:-1] != batch:
        b = xp.broadcast_to(b, (*batch, t))
    if K.ndim > 2 and of_K[:-2] != batch:
        K = xp.broadcast_to(K, (*batch, t, t))
    if on_host(device):
        K, b, gg = (a if a is None else to_numpy(a) for a in (K, b, gg))
        if not (_is_positive_definite(K) and np.isfinite(b).all()):
            _check_finite(Gram(K, b, np.abs(b).max(axis=-1, initial=0.0)), "K", "b")
            _check_products(K)
        if gg is not None and (wrong := ~((gg >= 0.0) & (gg < math.inf))).any():
            raise ValueError(f"gg must be the squared norm of g; found {gg[wrong][0]}.")
    if gg is None:
        xp = namespace(b)
        squares = b * b * inverse(xp.linalg.diagonal(K))
        if not on_host(device):  # rows that are not finite are left out on a device
            squares = xp.where(xp.isfinite(squares), squares, xp.zeros_like(squares))
        gg = xp.max(squares, axis=-1) if t else xp.sum(b, axis=-1)
    return Gram(K, b, gg)


def _is_positive_definite(K: np.ndarray) -> bool:
    """Return whether K is finite, symmetric and positive definite; for a singular K, rounding decides."""
    if not (K.swapaxes(-1, -2) == K).all():
        return False
    try:
        return bool(np.isfinite(np.linalg.cholesky(K)).all())
    except np.linalg.LinAlgError:
        return False


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
        if (np.abs(part - np.swapaxes(part, -1, -2)) > 0.01 * most).any():
            raise ValueError("K must be a Gram matrix; found a matrix that is not symmetric.")
        if t > 2:  # for two rows the first check suffices
            try:
                np.linalg.cholesky(part / most + 0.01 * t * np.eye(t))
            except np.linalg.LinAlgError:
                raise ValueError(
                    "K must be a Gram matrix, positive semidefinite: found a negative eigenvalue."
                ) from None
