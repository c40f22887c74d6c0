"""The exact projection inside TorchJD's aggregators: UPGrad, DualProj and whatever takes a projector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

try:
    from torchjd.linalg import DualConeProjector
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.torchjd needs TorchJD 0.17 or newer: pip install 'gemproj[torchjd]'."
    ) from error

from gemproj._dual import solve_gram

# Steps of the proximal point method where rounding may have made rows dependent. Each divides what the ridge
# leaves of a violation by about the ridge.
_STEPS = 3


@dataclass(frozen=True)
class ConeProjector(DualConeProjector):
    """Projects onto the dual cone of the rows of a Jacobian J, for aggregators of TorchJD.

    ::

        from torchjd.aggregation import UPGrad

        jac_to_grad(model.parameters(), UPGrad(projector=ConeProjector()))

    For each vector u it returns the weights ``w = argmin v'G v subject to v >= u``, with ``G = J J'``: then
    ``J'w`` is the projection of ``J'u`` onto ``{x : J x >= 0}`` (Quinton and Rey, "Jacobian Descent for
    Multi-Objective Optimization", Proposition 1). With ``v = u + lam`` this is the dual problem of
    `gemproj.solve_gram` with ``K = G`` and ``b = G u``: ``min 1/2 lam'G lam + (G u)'lam, lam >= 0``. All
    vectors are solved in one call on one G.

    Takes the place of `torchjd.linalg.QuadprogProjector`, without its limits: there is no smallest gradient,
    rows may have any norms and may be dependent, and nothing but torch and NumPy is needed.

    Notes
    -----
    The weights are exact for G as it is given. TorchJD computes G in the dtype of the model, so in float32
    entries are off by some units of rounding, and dependent rows can make a G that is indefinite. Where G
    is not positive definite beyond such rounding, the projector takes a few steps of the proximal point
    method (Rockafellar, 1976): ``lam <- argmin 1/2 lam'G lam + (G u)'lam + 1/2 (lam - previous)'D(lam -
    previous)``, with D the rounding of the diagonal of G. The violation that remains is of the size of
    rounding, or of its root where G hides the angle between rows.

    The m x m problem is solved on the CPU in float64: on a device, one copy of G and U to the host and one
    back. Like TorchJD's own, the weights carry no derivative.

    Examples
    --------
    Two objectives in conflict: each row is projected onto the half-space of the other one.

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
        """Return the weights of the projections of ``J'u`` for all vectors u.

        Parameters
        ----------
        U : tensor, shape (..., m)
            Vectors of weights, of any sign.
        G : tensor, shape (m, m)
            Gram matrix of the rows of J; float16, bfloat16, float32 or float64.

        Returns
        -------
        tensor, shape (..., m)
            With the dtype and device of G; each entry is at least that of U.

        Raises
        ------
        ValueError
            If G or U is not finite, or where their shapes do not fit.
        """
        K = G.detach().to("cpu", torch.float64)
        V = U.detach().to("cpu", torch.float64)
        K = 0.5 * (K + K.mT)  # products on a device need not be symmetric to the last bit
        ridge = _ridge(K, G.dtype)
        b = V @ K
        lam = torch.zeros_like(b)
        K = K + torch.diag(ridge)
        for _ in range(_STEPS if ridge.any() else 1):
            # As NumPy arrays: gemproj works on these on the CPU, and they need no conversion.
            sol = solve_gram(K.numpy(), (b - ridge * lam).numpy(), warm_start=lam.numpy())
            lam = torch.from_numpy(sol.multipliers)
        return (V + lam).to(G.device, G.dtype)


def _ridge(K: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far the diagonal of a Gram matrix must be lifted above its rounding: zeros, if not at all.

    Eigenvalues of the matrix with unit diagonal are off by about sqrt(m) times the error of its entries.
    """
    precision, squares = torch.finfo(dtype), K.diagonal()
    # Sums of products of halves are made in float32 and rounded once; others are off by some units.
    rounding = (16 if precision.bits > 16 else 1) * precision.eps * len(K) ** 0.5
    inverse = torch.where(squares > 0, squares.rsqrt(), 0.0)
    unit = K * inverse * inverse[:, None]
    unit.diagonal().fill_(1.0 - rounding)  # a row of zeros depends on no other
    independent = int(torch.linalg.cholesky_ex(unit).info) == 0
    return torch.zeros_like(squares) if independent else rounding * squares
