"""Stage 1: K, b and |g|^2, in one read of G and g."""

from __future__ import annotations

from gemproj._arrays import Blocks
from gemproj._problem import Problem, check_problem
from gemproj._tspace import Gram, Measured
from gemproj.backends import select


def gram(G: Blocks, g: Blocks, *, metric: Blocks | None = None) -> Gram:
    """Return the Gram matrix of the constraints, the linear term and the squared norm of g.

    Sums run in float64, whatever the dtype of the input, and nothing of the size of `G` is allocated. There
    is one exception, on the CPU: in problems of 131,072 columns or more without float64 arrays, products of
    512 columns are summed in float32 first. With numba this applies to problems with more than 8 rows.
    Entries are then accurate to about 1e-8 of ``|g_i| |g_j|``, and to 8e-6 at worst.

    Parameters
    ----------
    G, g, metric
        As in `solve_dual`. The Gram matrix of blocks is the sum over them.

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
    """Return K, b and |g|^2 of a problem, together with the problem for later reads of G."""
    return Measured(*select(problem).gram(problem), problem.to_caller, problem)
