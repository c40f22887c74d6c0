"""The quality of answers, from x alone, in float64."""

from collections.abc import Iterator

import numpy as np
import scipy.linalg
import scipy.optimize
import torch


def grade(G: torch.Tensor, g: torch.Tensor, answers: list[torch.Tensor]) -> np.ndarray:
    """Return two numbers for each answer to one problem whose rows are far from dependent.

    These are the largest violation of a constraint over ``|g_i| |g|``, and the distance ``|x - x*| / |g|``.
    x* comes from SciPy's non-negative least squares on the Cholesky factor of the Gram matrix.
    """
    t, vectors = len(G), torch.stack([g, *answers])
    total = sum(rows @ np.vstack([rows, others]).T for rows, others in _tiles(G, vectors))
    K, b, s = total[:, :t], total[:, t], total[:, t + 1 :]
    L = scipy.linalg.cholesky(K, lower=True)
    lam = scipy.optimize.nnls(L.T, -scipy.linalg.solve_triangular(L, b, lower=True))[0]
    squares = np.zeros(len(answers) + 1)
    for rows, others in _tiles(G, vectors):
        others[1:] -= others[0] + lam @ rows
        squares += np.sum(others**2, axis=1)
    norm, *distances = np.sqrt(squares)
    violations = np.max(-s / np.sqrt(np.diagonal(K))[:, None], axis=0, initial=0.0)
    return np.column_stack([violations, distances]) / norm


def _tiles(G: torch.Tensor, vectors: torch.Tensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield tiles of columns of both in float64."""
    for rows, others in zip(G.split(1 << 15, dim=1), vectors.split(1 << 15, dim=1), strict=True):
        yield rows.double().numpy(), others.double().numpy()
