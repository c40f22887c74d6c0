"""Methods that store no examples: penalties that hold important weights near their old values."""

import torch
from torch import Tensor

from examples.common.batch import rows

from .learners import Learner, Setup
from .streams import Batch


class Penalty(Learner):
    """Adds ``strength / 2 * sum_i importance_i (theta_i - theta*_i)^2``."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.parameters = setup.parameters
        self.importance = [torch.zeros_like(p) for p in self.parameters]
        self.anchor = [p.detach().clone() for p in self.parameters]
        self.kept += [*self.importance, *self.anchor]

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the batch plus the penalty."""
        triples = zip(self.importance, self.parameters, self.anchor, strict=True)
        penalty = sum(((w * (p - a).square()).sum() for w, p, a in triples), torch.zeros(()))
        return super().loss(batch) + self.setup.knob / 2 * penalty

    @torch.no_grad()
    def end_task(self, task: int, batch: Batch) -> None:
        """Anchor the penalty at the current weights."""
        for p, a in zip(self.parameters, self.anchor, strict=True):
            a.copy_(p)


class EWC(Penalty):
    """Elastic weight consolidation (Kirkpatrick et al., 2017), with one penalty for all past tasks.

    Importances are the diagonal of the empirical Fisher matrix on as many examples as other methods store,
    summed over the tasks (the online form, Schwarz et al., 2018, without decay).
    """

    def end_task(self, task: int, batch: Batch) -> None:
        """Add the squared gradients of single examples."""
        super().end_task(task, batch)
        self.model.eval()
        count = len(batch["labels"])
        for i in range(count):
            loss = self.cross_entropy(self.model, rows(batch, slice(i, i + 1))).mean()
            for w, g in zip(self.importance, torch.autograd.grad(loss, self.parameters), strict=True):
                w.add_(g.square(), alpha=1 / count)
        self.model.train()


class SI(Penalty):
    """Synaptic intelligence (Zenke et al., 2017): importance is a weight's contribution to lower losses."""

    damping = 0.1

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.path = [torch.zeros_like(p) for p in self.parameters]
        self.before = [p.detach().clone() for p in self.parameters]
        self.kept += [*self.path, *self.before]

    @torch.no_grad()
    def end_step(self) -> None:
        """Add gradient times step to the path, with the gradient of the loss without the penalty."""
        lists = self.parameters, self.path, self.before, self.importance, self.anchor
        for p, path, before, w, a in zip(*lists, strict=True):
            if p.grad is not None:
                gradient = p.grad - self.setup.knob * w * (before - a)
                path.sub_(gradient * (p - before))
            before.copy_(p)

    @torch.no_grad()
    def end_task(self, task: int, batch: Batch) -> None:
        """Convert the contributions to lower losses into importances."""
        for w, path, p, a in zip(self.importance, self.path, self.parameters, self.anchor, strict=True):
            w.add_(2 * path.clamp(min=0.0) / ((p - a).square() + self.damping))
            path.zero_()
        super().end_task(task, batch)
