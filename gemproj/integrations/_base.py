"""Base of the objects for frameworks: options, attaching, the memory, checkpoints."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gemproj.methods import AnyMethod
from gemproj.torch import GEM, EpisodicMemory, GradientProjector, Projection
from gemproj.torch.batches import Batch, Loss
from gemproj.torch.constraint_gradients import model_loss
from gemproj.torch.optimizer_step import Metric, On


class FrameworkGEM:
    """A `gemproj.torch.GEM` that is made when a framework hands out the model and the optimizer.

    Parameters
    ----------
    memory : EpisodicMemory
        The past tasks. In several processes each has its own examples of the same tasks.
    loss, method, margin, penalty, equality, on, metric, interval, microbatch, training, sample
        As in `gemproj.torch.GEM`.

    Attributes
    ----------
    memory : EpisodicMemory
    gem : gemproj.torch.GEM or None
        That of the present or last training.
    """

    def __init__(
        self,
        memory: EpisodicMemory,
        loss: Loss = model_loss,
        *,
        method: AnyMethod = "exact",
        margin: float | Tensor = 0.0,
        penalty: float | Tensor | None = None,
        equality: bool | Tensor = False,
        on: On = "gradient",
        metric: Metric = "euclidean",
        interval: int = 1,
        microbatch: int | None = None,
        training: bool = False,
        sample: int | None = None,
    ) -> None:
        self.memory = memory
        self.gem: GEM | None = None
        self._loss = loss
        self._options: dict[str, Any] = {
            "method": method,
            "margin": margin,
            "penalty": penalty,
            "equality": equality,
            "on": on,
            "metric": metric,
            "interval": interval,
            "microbatch": microbatch,
            "training": training,
            "sample": sample,
        }
        self._resumed: Mapping[str, Any] | None = None
        trial = torch.nn.Linear(1, 1)  # bad options are reported now, not when training begins
        GEM(trial, torch.optim.Adam(trial.parameters()), loss, memory=memory, **self._options).remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, too: it is attached to nothing."""
        return self.__dict__ | {"gem": None}

    @property
    def projector(self) -> GradientProjector | None:
        """The projector of the present or last training."""
        return None if self.gem is None else self.gem.projector

    @property
    def last(self) -> Projection | None:
        """Statistics of the last step; see `gemproj.torch.Projection`."""
        return None if self.gem is None else self.gem.last

    def end_task(self, batches: Iterable[Batch], task: Hashable = None) -> None:
        """Store examples of the task that has been learned, and forget its warm start.

        Parameters
        ----------
        batches : iterable
            The examples, such as the loader of the task; padded to a fixed length.
        task : hashable, optional
            By default the number of tasks stored before.
        """
        task = len(self.memory) if task is None else task
        for batch in batches:
            self.memory.add(batch, task)
        if self.projector is not None:
            self.projector.reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the memory and the state of the projector."""
        if self.gem is None:
            return {"memory": self.memory.state_dict(), "projector": None}
        return self.gem.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back the memory, and the projector's state when training begins, or now if it has begun."""
        self.memory.load_state_dict(state["memory"])
        self._resumed = state["projector"]

    def _attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss | None = None,
        group: Any = None,
        scaler: Any = None,
    ) -> None:
        self._detach()
        self.gem = GEM(
            model,
            optimizer,
            self._loss if loss is None else loss,
            memory=self.memory,
            group=group,
            scaler=scaler,
            **self._options,
        )
        self._resume()

    def _resume(self) -> None:
        if self._resumed is not None and self.gem is not None:
            self.gem.projector.load_state_dict(self._resumed)
        self._resumed = None

    def _detach(self) -> None:
        if self.gem is not None:
            self.gem.remove()


def world_group() -> Any:
    """Return the group of all processes, None where there is one."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return torch.distributed.group.WORLD if several else None
