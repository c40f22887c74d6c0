"""Projection onto the directions that leave all constraints where they are: G x = 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gemproj._array import Array, namespace
from gemproj.methods._method import Method, Outcome, Status, matvec, normalise
from gemproj.methods.exact import RESOLVED

# Eigenvalues of cosines below this many units of rounding per row, relative to the largest one, are
# taken for zero: such rows depend on the others. From the rows themselves, singular values.
_CUTOFF, _CUTOFF_ROWS = 128.0, 64.0


@dataclass(frozen=True)
class Equality(Method):
    """The projection with equalities: ``argmin_x 1/2 |x - g|^2 subject to G @ x = 0``.

    What gradient projection memory does (Saha, Garg and Roy, ICLR 2021) with a basis of past
    activations as rows, see `gemproj.torch.SubspaceProjector`; orthogonal gradient descent (Farajtabar
    et al., AISTATS 2020) with past gradients. Multipliers have any sign, ``lam = -K^+ b`` on normalised
    rows, with the pseudo-inverse from an eigenvalue decomposition: dependent, repeated and zero rows
    need no care. Of the multipliers that give x, those of dependent rows are the smallest ones.
    Where K cannot tell whether rows are dependent, the CPU returns to G, as for `Exact`.

    Certificates are those of this problem: no sign of a multiplier is wrong, every row with
    ``G @ x != 0`` is violated. On a device the decomposition waits for it.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import Equality, project
    >>> x = project(np.array([[1.0, 0.0], [2.0, 0.0]]), np.array([3.0, 1.0]), method=Equality())
    >>> x.round(12)
    array([0., 1.])
    """

    accepts: ClassVar[frozenset[str]] = frozenset({"refine"})

    def solve(self, K, b, warm_start=None, upper=None):  # noqa: D102
        xp = namespace(K)
        if not b.shape[-1]:
            return Outcome(b * 0.0, 0, int(Status.OPTIMAL))
        K, b, _, _, scale = normalise(K, b, None, None)
        lam, smallest = solve_in_range(K, b)
        lost = xp.astype(smallest < RESOLVED, xp.int64) * int(Status.UNRESOLVED)
        return Outcome(-lam * scale, 0, lost, smallest)


def solve_in_range(K: Array, u: Array) -> tuple[Array, Array]:
    """Return ``K^+ u`` for rows of norm one, (..., t), and the smallest eigenvalue of K, (...)."""
    xp = namespace(K)
    values, basis = xp.linalg.eigh(K)
    cutoff = _CUTOFF * K.shape[-1] * float(xp.finfo(K.dtype).eps) * values[..., -1:]
    used = values > cutoff
    inverse = xp.where(used, 1.0 / xp.where(used, values, xp.ones_like(values)), xp.zeros_like(values))
    inside = matvec(xp.matrix_transpose(basis), u) * inverse
    return matvec(basis, inside), values[..., 0]


def span(A: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return U, S and V with ``A V' = U S`` from columns scaled to norm one, without what is rounding.

    U (m, k) is an orthonormal basis of the columns of A (m, t), and ``V' S^-2 V = (A'A)^+`` on normalised
    columns.
    """
    n = np.linalg.norm(A, axis=0)
    n = np.where(n > 0, n, 1.0)
    U, sizes, V = np.linalg.svd(A / n, full_matrices=False)
    used = sizes > _CUTOFF_ROWS * float(np.finfo(np.float64).eps) * np.max(sizes, initial=0.0)
    return U[:, used], sizes[used], V[used] / n


def solve_rows(A: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Return the smallest lam for which ``a + A lam`` is orthogonal to all columns of A, (t,).

    From the coordinates of the rows and of g themselves, in which rows may be dependent up to 1e-14.
    """
    U, S, V = span(A)
    return -(V.T @ ((U.T @ a) / S))
