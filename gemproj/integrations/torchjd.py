"""The exact projection as a projector for TorchJD's aggregators, such as UPGrad and DualProj."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

try:
    from torchjd.linalg import DualConeProjector
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.torchjd needs TorchJD 0.17 or newer: "
        "pip install '.[torchjd]' in a checkout of gemproj."
    ) from error

import torch
from torch import Tensor

from gemproj._dual import solve_gram

# Number of steps of the proximal point method, used if rounding may make K indefinite. After one step, the
# ridge would still change the result.
_STEPS = 2


@dataclass(frozen=True)
class ConeProjector(DualConeProjector):
    """Projector onto the dual cone of the rows of a Jacobian J, for aggregators of TorchJD.

    ::

        from torchjd.aggregation import UPGrad

        jac_to_grad(model.parameters(), UPGrad(projector=ConeProjector()))

    For each vector u, it returns the weights ``w = argmin v'G v subject to v >= u``, with ``G = J J'``: then
    ``J'w`` is the projection of ``J'u`` onto ``{x : J x >= 0}`` (Quinton and Rey, "Jacobian Descent for
    Multi-Objective Optimization", Proposition 1). With ``v = u + lam``, this is the dual problem of
    `gemproj.solve_gram` with ``K = G`` and ``b = G u``. One call solves for all vectors with one G.

    `ConeProjector` replaces `torchjd.linalg.QuadprogProjector`. It has no ridge relative to the largest rows
    and no minimum norm of a gradient. Rows may have any norm and may be dependent. No QP solver has to be
    installed. The problem is solved on the CPU in float64. As with TorchJD's own projector, the weights have
    no derivative.

    Notes
    -----
    TorchJD computes G in the dtype of the model, whose rounding can make G indefinite if rows are dependent.
    In this case the projector takes two steps of the proximal point method (Rockafellar, 1976),
    ``lam <- argmin 1/2 lam'G lam + (G u)'lam + 1/2 (lam - previous)'D (lam - previous)``, where D is the
    diagonal of G times a bound of the rounding. In float32, the remaining violations are about 1e-6 of
    ``|J'u|``, and up to 1e-3 if weights are large, as with more rows than parameters. In float16, squares of
    row norms underflow if the norms are about 1e-3 or less: use bfloat16 or float32, or scale the losses.

    Examples
    --------
    Two objectives in conflict: each row is projected onto the half-space of the other row.

    >>> import torch
    >>> from gemproj.integrations.torchjd import ConeProjector
    >>> J = torch.tensor([[1.0, 0.0], [-1.0, 1.0]])
    >>> W = ConeProjector()(torch.eye(2), J @ J.T)
    >>> W
    tensor([[1.0000, 0.5000],
            [1.0000, 1.0000]])
    >>> W @ J
    tensor([[0.5000, 0.5000],
            [0.0000, 1.0000]])
    """

    def __call__(self, U: Tensor, G: Tensor) -> Tensor:
        """Return weights W (..., m) with ``W >= U``, such that each ``J'w`` is the projection of ``J'u``.

        Parameters
        ----------
        U : tensor, shape (..., m)
            Vectors of weights, of any sign.
        G : tensor, shape (m, m)
            Gram matrix of the rows of J; float16, bfloat16, float32 or float64.
        """
        if G.ndim != 2 or G.shape[0] != G.shape[1] or U.shape[-1:] != G.shape[-1:]:
            raise ValueError(
                f"G must have shape (m, m) and U (..., m); found {tuple(G.shape)} and {tuple(U.shape)}."
            )
        if G.dtype == torch.float16 and (G.diagonal() < torch.finfo(G.dtype).tiny).any():
            warnings.warn(
                "G has squares of row norms that underflow in float16, so the constraints of these rows may "
                "be violated. Use bfloat16 or float32, or scale the losses.",
                stacklevel=2,
            )
        with np.errstate(over="ignore", invalid="ignore"):  # `solve_gram` raises for infinities and NaN
            K, V = (a.detach().to("cpu", torch.float64).numpy() for a in (G, U))
            K = 0.5 * (K + K.T)  # products on a device need not be symmetric to the last bit
            lam = _solve(K, V @ K, _rounding(len(K), G.dtype))
        return torch.from_numpy(V + lam).to(G.device, G.dtype)


def _rounding(m: int, dtype: torch.dtype) -> float:
    """Return a bound of the eigenvalue errors of a Gram matrix with unit diagonal.

    The bound is about sqrt(m) times the error of an entry. An entry in float16 or bfloat16 is rounded once,
    because its products are summed in float32.
    """
    precision = torch.finfo(dtype)
    return (16 if precision.bits > 16 else 1) * precision.eps * m**0.5


def _solve(K: np.ndarray, b: np.ndarray, rounding: float) -> np.ndarray:
    """Return the multipliers; use the proximal point method unless K is clearly positive definite."""
    squares = K.diagonal()
    norms = np.sqrt(np.where(squares > 0, squares, 1.0))
    unit = K / norms / norms[:, None]
    np.fill_diagonal(unit, 1.0 - rounding)  # makes zero rows independent
    try:
        np.linalg.cholesky(unit)
    except np.linalg.LinAlgError:
        ridge = rounding * squares
        lam = np.zeros_like(b)
        for _ in range(_STEPS):
            lam = solve_gram(K + np.diag(ridge), b - ridge * lam, warm_start=lam).multipliers
        return lam
    return solve_gram(K, b).multipliers
