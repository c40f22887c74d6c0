"""Stage 1: all that the dual problem needs to know about G and g, in one read of both."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from gemproj._array import Array, Blocks, Problem, read_problem


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

    Every sum is taken in float64 whatever the dtype of the input, on pieces that stay in cache, so
    nothing of the size of `G` is allocated.

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
    return problem_gram(read_problem(G, g, metric))


# NumPy would warn of infinities that stage 2 reports, with the row that holds them.
@np.errstate(over="ignore", invalid="ignore")
def problem_gram(problem: Problem) -> Gram:
    """Stage 1 on checked arguments: one Gram matrix of the stacked rows [G; g] holds K, b and |g|^2."""
    xp, batch, t = problem.xp, problem.batch, problem.t
    total = xp.zeros((*batch, t + 1, t + 1), dtype=problem.wide, device=problem.device)
    stack = None
    for k, index, size in problem.tiles():
        if stack is None or size > stack.shape[-1]:
            stack = xp.empty((*batch, t + 1, size), dtype=problem.wide, device=problem.device)
        tile = stack[..., :size]
        tile[..., :t, :] = xp.reshape(problem.rows[k][index], (*batch, t, size))
        tile[..., t, :] = xp.reshape(problem.vector[k][index], (*batch, size))
        if problem.weight is not None:
            root = xp.sqrt(xp.astype(xp.reshape(problem.weight[k][index], (*batch, size)), problem.wide))
            tile[..., :t, :] /= root[..., None, :]
            tile[..., t, :] *= root
        total += xp.matmul(tile, xp.matrix_transpose(tile))
    return Gram(total[..., :t, :t], total[..., :t, t], total[..., t, t])
