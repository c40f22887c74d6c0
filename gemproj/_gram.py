"""Stage 1: K, b and |g|^2, computed in one read of G and g or given, and checks that they are finite."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np

from gemproj._arrays import Array, Blocks, device_of, namespace, on_host, refuse_transformed, to_numpy
from gemproj._checks import check_array
from gemproj._constants import EPS, WIDE_RANGE
from gemproj._coordinates import own_coordinates
from gemproj._problem import Problem, check_problem
from gemproj._tspace import Gram, Measured, fetch, inverse
from gemproj.backends import select


def gram(G: Blocks, g: Blocks, *, metric: Blocks | None = None) -> Gram:
    """Return the Gram matrix of the constraints, the linear term and the squared norm of g.

    Products are computed and summed in float64 for every input dtype (float32 on devices without float64),
    and no array of the size of `G` is allocated.

    Parameters
    ----------
    G, g, metric
        As in `project`. The Gram matrix of blocks is the sum over the blocks.

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
    if (own := own_coordinates(problem)) is not None:
        return Measured(own.gram(problem), EPS, problem.to_caller, problem, own)
    eps = EPS if problem.host else float(problem.xp.finfo(problem.wide).eps)  # there may be no float64
    return Measured(select(problem).gram(problem), eps, problem.to_caller, problem)


def check_range(gram: Gram, problem: Problem | None) -> Gram:
    """Return K, b and |g|^2 on the CPU, with zeros for g and rows of G shorter than 1e-140.

    Their squares have lost digits in float64, so they count as zero. Raise if g or a row of G is not finite.
    """
    (low, high), diagonal = WIDE_RANGE, gram.K.diagonal(0, -2, -1)
    if gram.gg.ndim == 0:  # Python floats are compared faster than NumPy scalars, and a sum is never less
        numbers = [*diagonal.tolist(), float(gram.gg)]
        small, large = not low < min(numbers), not sum(numbers) < high
    else:
        small = not all(low < v.min(initial=1.0) for v in (diagonal, gram.gg))
        large = not all(v.max(initial=1.0) < high for v in (diagonal, gram.gg))
    if large:
        weighted = problem is not None and problem.weight is not None
        _check_finite(gram, *(("G / sqrt(metric)", "g * sqrt(metric)") if weighted else ("G", "g")))
    if not small:
        return gram
    rows, vector = diagonal > low, gram.gg > low
    K = np.where(rows[..., :, None] & rows[..., None, :], gram.K, 0.0)
    return Gram(K, np.where(rows & vector[..., None], gram.b, 0.0), np.where(vector, gram.gg, 0.0))


def _check_finite(gram: Gram, G: str = "G", g: str = "g") -> None:
    """Raise if G or g is not finite or its squares overflow; the message names the array and its rows."""
    K, b, gg = gram
    if np.isfinite(K).all() and np.isfinite(b).all() and np.isfinite(gg).all():
        return
    cause = "NaN or infinity, or numbers whose squares overflow; scale it down if it is finite"
    K = np.broadcast_to(K, (*b.shape, b.shape[-1]))
    for i in np.ndindex(gg.shape):
        where = f" of problem {i if len(i) > 1 else i[0]}" if i else ""
        rows = np.flatnonzero(~np.isfinite(np.diagonal(K[i])))
        if len(rows):
            name, hold = ("row", "holds") if len(rows) == 1 else ("rows", "hold")
            named = f"{name} {', '.join(map(str, rows))}{where}"
            raise ValueError(f"{G} is not finite: {named}, which {hold} {cause}.")
        if not np.isfinite(gg[i]):
            raise ValueError(f"{g}{where} is not finite: it holds {cause}.")
        if not (np.isfinite(K[i]).all() and np.isfinite(b[i]).all()):
            raise ValueError(
                f"{G} and {g}{where} are not finite, or too large: products of their entries overflow. Scale "
                "them down."
            )


def check_gram(K: Array, b: Array, gg: Array | None) -> Gram:
    """Return copies of K, b and gg in NumPy; raise if they are invalid or do not fit together."""
    given = {"K": K, "b": b} | ({} if gg is None else {"gg": gg})
    for name, a in given.items():
        check_array(a, name)
    namespace(*given.values())  # raises if there are several libraries
    refuse_transformed(list(given.values()))
    of_K, of_b = tuple(K.shape), tuple(b.shape)
    if len(of_K) < 2 or of_K[-1] != of_K[-2]:
        raise ValueError(f"K must be a Gram matrix of shape (..., t, t); found {of_K}.")
    try:
        if of_b[-1:] != of_K[-1:]:
            raise ValueError
        batch = of_b[:-1] if of_K[:-2] in ((), of_b[:-1]) else np.broadcast_shapes(of_K[:-2], of_b[:-1])
    except ValueError:
        raise ValueError(
            f"b must have shape (..., {of_K[-1]}), with leading dimensions that broadcast with those of K, "
            f"{of_K}; found {of_b}."
        ) from None
    if gg is not None and tuple(gg.shape) != batch:
        raise ValueError(
            f"gg must have shape {batch}, one squared norm per problem; found {tuple(gg.shape)}."
        )
    # Copied, because the solution keeps these arrays, and the caller may change the originals.
    if on_host(device_of(b)):
        K, b, gg = (a if a is None else np.array(to_numpy(a), dtype=np.float64) for a in (K, b, gg))
    else:
        K, b, gg = fetch([K, b, gg])
    b = b if of_b[:-1] == batch else np.broadcast_to(b, (*batch, of_b[-1]))
    K = K if of_K[:-2] in ((), batch) else np.broadcast_to(K, (*batch, *of_K[-2:]))
    if not (_is_positive_definite(K) and np.isfinite(b).all()):
        _check_finite(Gram(K, b, np.abs(b).max(axis=-1, initial=0.0)), "K", "b")
        _check_products(K)
    if gg is not None and (wrong := ~((gg >= 0.0) & (gg < math.inf))).any():
        raise ValueError(f"gg must be the squared norm of g; found {gg[wrong][0]}.")
    # A squared norm that has underflowed is below its lower bound.
    squares = K.diagonal(0, -2, -1)
    along = b * np.sqrt(inverse(np.where(squares > WIDE_RANGE[0], squares, 0.0)))
    least = np.max(along * along, axis=-1, initial=0.0)
    return Gram(K, b, least if gg is None else np.maximum(gg, least))


def _is_positive_definite(K: np.ndarray) -> bool:
    """Return whether K is finite, symmetric and positive definite; for a singular K, rounding decides."""
    with suppress(np.linalg.LinAlgError):
        return bool((K.swapaxes(-1, -2) == K).all() and np.isfinite(np.linalg.cholesky(K)).all())
    return False


def _check_products(K: np.ndarray) -> None:
    """Raise if K is not a Gram matrix, with a tolerance of 1 % for rounded products."""
    n, t = np.sqrt(np.maximum(np.diagonal(K, axis1=-2, axis2=-1), WIDE_RANGE[0])), K.shape[-1]
    with np.errstate(over="ignore"):
        unit = K / n[..., :, None] / n[..., None, :]
    if (np.abs(unit - np.swapaxes(unit, -1, -2)) > 0.01).any():
        raise ValueError("K must be a Gram matrix, symmetric: found K[i, j] != K[j, i].")
    if not _is_positive_definite(unit + np.swapaxes(unit, -1, -2) + 0.02 * t * np.eye(t)):
        raise ValueError("K must be a Gram matrix, positive semidefinite: found a negative eigenvalue.")
