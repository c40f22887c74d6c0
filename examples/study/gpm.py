"""Gradient projection memory: weight changes are orthogonal to past inputs of their layer."""

from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from examples.lora_agnews.record import Recorder

from .learners import Learner, Setup
from .streams import Batch


class Subspaces(Learner):
    """Projects gradients of linear layers onto the complement of their past inputs (GPM).

    Saha, Garg and Roy (ICLR 2021). A change dW of a weight keeps its output for an input x if ``dW x = 0``.
    So each weight has an orthonormal basis M of the directions with most of the energy of its past inputs,
    and ``dW <- dW - dW M M'``; `knob` is the least share of the energy. Other parameters are not changed; the
    paper's networks have no biases. There are no constraint gradients and no dual problem, so GPM is not a
    method of gemproj.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.layers = {name: m for name, m in self.model.named_modules() if isinstance(m, nn.Linear)}
        self.bases = {name: m.weight.new_empty(m.in_features, 0) for name, m in self.layers.items()}

    @torch.no_grad()
    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Remove the component that acts on past inputs from the gradient of every weight."""
        record.turn("projection")
        for name, module in self.layers.items():
            M, dW = self.bases[name], module.weight.grad
            if dW is not None and M.shape[1]:
                dW -= (dW @ M) @ M.mT

    @torch.no_grad()
    def end_task(self, task: int, batch: Batch) -> None:
        """Add the subspaces of the inputs of this task, on as many examples as other methods store.

        The paper's rule adds the fewest singular vectors of the part outside the basis, so that the basis
        then holds the share of the energy.
        """
        moments: dict[str, Tensor] = {}

        def collect(name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
            """Sum ``x x'`` over the inputs x of a layer."""
            x = args[0].flatten(0, -2).double()
            moments[name] = x.mT @ x

        with ExitStack() as hooks:
            for name, module in self.layers.items():
                hooks.callback(module.register_forward_pre_hook(partial(collect, name)).remove)
            self.setup.stream.logits(self.model, batch)
        self.bases |= {name: grow(self.bases[name], C, self.setup.knob) for name, C in moments.items()}
        self.kept = list(self.bases.values())


def grow(M: Tensor, C: Tensor, threshold: float) -> Tensor:
    """Extend a basis M (n, k) to a share `threshold` of the energy of C (n, n), the sum of ``x x'``."""
    n, energy, wide = len(C), torch.trace(C), M.to(C.dtype)
    outside = C - wide @ (wide.mT @ C)
    outside = outside - (outside @ wide) @ wide.mT
    values, vectors = torch.linalg.eigh((outside + outside.mT) / 2.0)
    # Smallest first, so cumulative sums are the energy that is left out; below the cutoff all is rounding.
    values = torch.where(values > n * torch.finfo(C.dtype).eps * energy, values, torch.zeros_like(values))
    left_out = int((values.cumsum(0) <= (1.0 - threshold) * energy).sum())
    added = vectors[:, max(left_out, M.shape[1]) :].flip(1)  # at most n directions in all
    for _ in range(2):  # eigenvectors of small values lean towards the basis by rounding
        added = torch.linalg.qr(added - wide @ (wide.mT @ added))[0]
    return torch.cat([M, added.to(M.dtype)], dim=1)
