"""Base of the objects for frameworks: options, attaching, the memory, checkpoints."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
import torch.distributed as dist

from gemproj.torch import GEM, EpisodicMemory, GradientProjector, Projection
from gemproj.torch.batches import Batch, Loss
from gemproj.torch.losses import model_loss
from gemproj.torch.remember import remember
from gemproj.torch.unprotected import Watch

_NOT_HERE = {"model", "optimizer", "loss", "memory", "per_task", "label"}
_OPTIONS = inspect.signature(GEM).parameters.keys() - _NOT_HERE
_NAMES_ELSEWHERE = {
    "memory_strength": "it is called margin here",
    "patterns_per_experience": "it is called per_task here, an option of the memory",
    "per_task": "it is one of the memory: EpisodicMemory(per_task=...)",
    "label": "it is one of the memory: EpisodicMemory(label=...)",
    "eps": "the projection is exact without a ridge; method=GEM2017(...) has one",
}


class FrameworkGEM:
    """A `gemproj.torch.GEM` that is made when a framework hands out the model and the optimizer."""

    def __init__(self, memory: EpisodicMemory | None = None, loss: Loss = model_loss, **options: Any) -> None:
        name = type(self).__name__
        if not isinstance(memory, EpisodicMemory):
            count = options.get("per_task", 100)
            raise TypeError(
                f"{name} needs a memory, such as {name}(EpisodicMemory({count})) with EpisodicMemory of "
                f"gemproj.torch; found {type(memory).__name__}."
            )
        _check_names(name, options)
        self.memory = memory
        self.gem: GEM | None = None
        self._loss, self._options = loss, options
        self._resumed: Mapping[str, Any] | None = None
        self._exclude: Hashable = None
        self._watch: Watch | None = None  # of what was stored before any training
        # Bad options are reported now, not when training begins.
        trial, options = torch.nn.Linear(1, 1), {"group": _everyone()} | options
        GEM(trial, torch.optim.Adam(trial.parameters()), loss, memory=memory, **options).remove()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, too: it is attached to nothing."""
        return self.__dict__ | {"gem": None, "_exclude": self.exclude, "_watch": None}

    @property
    def exclude(self) -> Hashable:
        """A task to leave out, see `gemproj.torch.GEM`."""
        return self._exclude if self.gem is None else self.gem.exclude

    @exclude.setter
    def exclude(self, task: Hashable) -> None:
        self._exclude = task
        if self.gem is not None:
            self.gem.exclude = task

    @property
    def projector(self) -> GradientProjector | None:
        """The projector of the present or last training."""
        return None if self.gem is None else self.gem.projector

    @property
    def last(self) -> Projection | None:
        """Statistics of the last step; see `gemproj.torch.Projection`."""
        return None if self.gem is None else self.gem.last

    def end_task(
        self, batches: Iterable[Batch], task: Hashable = None, *, model: torch.nn.Module | None = None
    ) -> None:
        """Store examples of the task that has been learned, and forget its warm start.

        Parameters
        ----------
        batches : iterable
            The examples, such as the loader of the task; padded to a fixed length.
        task : hashable, optional
            By default the number of tasks stored before, or the next integer that no task is named after.
        model : torch.nn.Module, optional
            The model whose outputs and losses are stored, where the loss or a bound needs them: by default
            that of the last training.
        """
        if self.gem is not None:
            self.gem.end_task(batches, task, model=model)
            return
        if self._watch is not None and self._watch.unseen(self.memory.tasks):
            warnings.warn(
                "The weights have changed since the last end_task, but in no training with this "
                f"{type(self).__name__}: if they were trained, earlier tasks were not protected. Pass it to "
                "the trainer, callbacks=[...].",
                stacklevel=2,
            )
        given = {name: self._options.get(name) for name in ("bound", "rows", "microbatch")}
        remember(self.memory, batches, task, model, self._loss, **given)
        self._watch = None if model is None else Watch(self.memory, model.parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, `exclude` and the state of the projector."""
        own = {"memory": self.memory.state_dict(), "exclude": self.exclude}
        if self._resumed is not None:  # nothing has been trained since it was loaded
            return {**self._resumed, **own}
        return {"projector": None} | own if self.gem is None else self.gem.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back the memory, and the rest when training begins."""
        self.memory.load_state_dict(state["memory"])
        self.exclude = state.get("exclude", self.exclude)
        self._resumed = None if state["projector"] is None else state

    def _attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Loss | None = None,
        scaler: Any = None,
    ) -> None:
        self._detach()
        exclude = self.exclude
        options = {"group": _everyone(), "scaler": scaler} | self._options
        self.gem = GEM(model, optimizer, loss or self._loss, memory=self.memory, **options)
        self.gem.exclude = exclude
        self._resume()

    def _resume(self) -> None:
        if self._resumed is not None and self.gem is not None:
            self.gem.load_state_dict(
                {**self._resumed, "memory": self.memory.state_dict(), "exclude": self.exclude}
            )
        self._resumed = None

    def remove(self) -> None:
        """Detach from the optimizer."""
        self._detach()

    def _detach(self) -> None:
        if self.gem is not None:
            self.gem.remove()


def _check_names(owner: str, given: Iterable[str]) -> None:
    """Raise for options that there are not, and name the one that may be meant."""
    for name in set(given) - _OPTIONS:
        close = get_close_matches(name, _OPTIONS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        hint = f": {_NAMES_ELSEWHERE[name]}." if name in _NAMES_ELSEWHERE else hint
        raise TypeError(f"{owner} has no option {name!r}{hint}")


def _everyone() -> Any:
    """Return the group of all processes, None where there is one."""
    return dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
