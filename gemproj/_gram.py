"""Stage 1: all that the dual problem needs to know about G and g, in one read of both."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from gemproj._array import Array, Blocks, Problem, read_problem, to_numpy

# Columns whose products are summed in the dtype of the input before the sums go on in float64. Matrix
# products keep 16 partial sums or more, so rounding adds up over a sixteenth of a chunk.
CHUNK, _PARTIAL_SUMS = 512, 16


class Gram(NamedTuple):
    """The projection problem in t-space, in float64 (float32 on devices that have no float64).

    Attributes
    ----------
    K : array, shape (..., t, t)
        Gram matrix of the constraints, ``G @ G.T`` (``G @ diag(1/w) @ G.T`` with a metric w).
    b : array, shape (..., t)
        Linear term, ``G @ g``: negative where g violates a constraint.
    gg : array, shape (...)
        Squared norm of g, ``g @ g`` (``g @ diag(w) @ g`` with a metric w).
    """

    K: Array
    b: Array
    gg: Array


def gram(G: Blocks, g: Blocks, *, metric: Blocks | None = None) -> Gram:
    """Compute the Gram matrix of the constraints, the linear term and the squared norm of g.

    Sums run in float64 whatever the dtype of the input, on pieces that stay in cache, so nothing of
    the size of `G` is allocated. (On the CPU, products of 512 columns of a large float32 problem are
    summed in float32 first: entries are then good to about 1e-8 of ``|g_i| |g_j|``, and to 1e-6 at
    worst.)

    Parameters
    ----------
    G : array, shape (..., t, d), or blocks
        Constraint gradients as rows. Or a sequence or mapping of arrays ``G[k]`` of shape
        ``(t, *shape_k)``: one problem whose Gram matrix is the sum over the blocks.
    g : array, shape (..., d), or blocks
        The proposed gradient; blocks ``g[k]`` have shape ``(*shape_k)``.
    metric : array or blocks, shaped like `g`, optional
        Positive weights w of the distance ``sum(w * (x - g)**2)``.

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
    return problem_gram(read_problem(G, g, metric))[0]


# NumPy would warn of infinities that stage 2 reports, with the row that holds them.
@np.errstate(over="ignore", invalid="ignore", under="ignore")
def problem_gram(problem: Problem) -> tuple[Gram, float]:
    """Stage 1 on checked arguments; and the rounding of its entries in units of ``|g_i| |g_j|``."""
    t = problem.t
    # Few chunks are few samples of float32 rounding; small problems lose nothing by being converted.
    native = problem.native and sum(math.prod(v.shape) for v in problem.vector) >= 256 * CHUNK
    with problem.in_full_precision():
        total = _gram_of_stack(problem, native)
        if native and not _in_range(to_numpy(total)):
            native = False
            total = _gram_of_stack(problem, native)
    dtype = problem.vector[0].dtype if native else problem.wide
    rounding = CHUNK / _PARTIAL_SUMS * float(problem.xp.finfo(dtype).eps) / 2
    return Gram(total[..., :t, :t], total[..., :t, t], total[..., t, t]), rounding


def _gram_of_stack(problem: Problem, native: bool) -> Array:
    """Return the Gram matrix of the stacked rows [G; g], (..., t + 1, t + 1), which holds K, b and gg."""
    xp, batch, t = problem.xp, problem.batch, problem.t
    total = xp.zeros((*batch, t + 1, t + 1), dtype=problem.wide, device=problem.device)
    stack = None
    for k, index, size in problem.tiles(large=native):
        rows = xp.reshape(problem.rows[k][index], (*batch, t, size))
        vector = xp.reshape(problem.vector[k][index], (*batch, size))
        if native:
            whole = size - size % CHUNK
            _add_chunks(total, rows[..., :whole], vector[..., :whole], problem)
            rows, vector, size = rows[..., whole:], vector[..., whole:], size - whole
        if stack is None or size > stack.shape[-1]:
            stack = xp.empty((*batch, t + 1, size), dtype=problem.wide, device=problem.device)
        tile = stack[..., :size]
        tile[..., :t, :] = rows
        tile[..., t, :] = vector
        if problem.weight is not None:
            root = xp.sqrt(xp.astype(xp.reshape(problem.weight[k][index], (*batch, size)), problem.wide))
            tile[..., :t, :] /= root[..., None, :]
            tile[..., t, :] *= root
        total += xp.matmul(tile, xp.matrix_transpose(tile))
    return total


def _add_chunks(total: Array, rows: Array, vector: Array, problem: Problem) -> None:
    """Add a tile without copying it: products of chunks in the dtype of the input, their sums in float64."""
    xp, batch, t, chunks = problem.xp, problem.batch, problem.t, vector.shape[-1] // CHUNK
    rows = xp.moveaxis(xp.reshape(rows, (*batch, t, chunks, CHUNK)), -2, -3)
    # One row like the others: torch multiplies a (CHUNK, 1) column ten times more slowly.
    vector = xp.moveaxis(xp.reshape(vector, (*batch, 1, chunks, CHUNK)), -2, -3)

    def product_sum(left: Array, right: Array) -> Array:
        return xp.sum(xp.matmul(left, xp.matrix_transpose(right)), axis=-3, dtype=problem.wide)

    total[..., :t, :t] += product_sum(rows, rows)
    total[..., :t, t] += product_sum(rows, vector)[..., 0]
    total[..., t, t] += product_sum(vector, vector)[..., 0, 0]


def _in_range(total: np.ndarray) -> bool:
    """Tell whether squares neither overflow nor lose digits in float32; zero rows cannot be told apart."""
    squares = np.diagonal(total, axis1=-2, axis2=-1)
    return bool(np.all((squares > 1e-24) & (squares < 1e30)))
