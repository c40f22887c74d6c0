"""The exact projection as a projector for TorchJD's aggregators, such as UPGrad and DualProj."""

from __future__ import annotations

from dataclasses import dataclass

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
from gemproj._warn import warn


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
    TorchJD computes G in the dtype of the model. Rows whose angle this dtype does not resolve, about 0.002 in
    float32, count as dependent. The remaining violations are then about 1e-6 of ``|J'u|``, and up to 1e-3 if
    weights are large, as with more rows than parameters. In float16, squares of row norms underflow if the
    norms are about 1e-3 or less: use bfloat16 or float32, or scale the losses.

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
            warn(
                "G has squares of row norms that underflow in float16, so the constraints of these rows may "
                "be violated. Use bfloat16 or float32, or scale the losses."
            )
        V, K = U.detach().to("cpu", torch.float64), G.detach().to("cpu", torch.float64)
        K = 0.5 * (K + K.mT)  # products on a device need not be symmetric to the last bit
        lam = solve_gram(K.to(G.dtype), V @ K).multipliers  # the dtype tells how K is rounded
        return (V + lam).to(G.device, G.dtype)
