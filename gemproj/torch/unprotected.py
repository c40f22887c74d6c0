"""Warnings for trainings in which no task was protected."""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemproj.torch.parameters import local


@dataclass
class Use:
    """Counts the steps taken with a memory, and notes whether any step had a constraint.

    A first task has no constraints. Whether other tasks follow is known only at the end, when the memory is
    deleted or Python exits.
    """

    steps: int = 0
    protected: bool = False
    kept: bool = False  # saved or copied, so another training may continue with it
    watch: Any = None  # a weak reference to the last `Watch`

    def report(self) -> None:
        """Warn if steps were taken and none had a constraint, or if weights changed without a step."""
        if self.protected or self.kept or _broken_off():
            return
        watch = None if self.watch is None else self.watch()
        if self.steps:
            logging.getLogger("gemproj").warning(
                "Nothing was protected: all %d steps were taken before a task was stored, as in a training "
                "without GEM. Call keep or end_task with examples of earlier tasks before the training that "
                "must not forget them. Ignore this message if the training of a first task was resumed from "
                "a saved state.",
                self.steps,
            )
        elif watch is not None and watch.unseen():
            logging.getLogger("gemproj").warning(
                "Nothing was protected: the weights have changed, but not in step() of the optimizer that "
                "gemproj is attached to. Attach to the optimizer that takes the steps."
            )


_uses: weakref.WeakKeyDictionary[Any, Use] = weakref.WeakKeyDictionary()


def use_of(memory: Any) -> Use:
    """Return the `Use` of a memory, which reports when the memory is deleted."""
    if memory not in _uses:
        _uses[memory] = Use()
        weakref.finalize(memory, _uses[memory].report)
    return _uses[memory]


def keep(memory: Any) -> None:
    """Note that a memory is saved or copied."""
    use_of(memory).kept = len(memory) > 0


def _broken_off() -> bool:
    """Return whether Python exits with an error; if so, no other message is needed."""
    return hasattr(sys, "last_value") and not hasattr(sys, "ps1")


def weights(parameters: Iterable[Tensor], norms: bool = True) -> list[float]:
    """Return version counters of parameters and, with `norms`, their norms, which synchronise a device.

    Norms are needed because fused optimizers do not increment version counters.
    """

    def norm(p: Tensor) -> Tensor:
        return torch.linalg.vector_norm(local(p), dtype=torch.promote_types(p.dtype, torch.float32))

    held = list(parameters)
    found = [norm(p) for p in held] if norms else []  # computed before the first `float` synchronises
    return [*(p._version for p in held), *map(float, found)]


class Unused:
    """A monitor that detects if weights change before the constraints of a projector are used.

    Warns if the weights have changed before new constraints are computed. If no constraints were ever used,
    it also warns about the last constraints, when the projector is deleted or Python exits.
    """

    def __init__(self, projector: Any) -> None:
        self._parameters, self._before, self._used = list(projector.parameters), list[float](), False
        weakref.finalize(projector, self._report)

    def begin(self) -> None:
        """Note that constraints have been computed."""
        self._before = self._now()

    def end(self, used: bool = True) -> None:
        """Note that the constraints were used, or that there are none."""
        self._before, self._used = [], self._used or used

    def warn(self) -> None:
        """Warn if weights have changed since `begin`; after this warning, none follows at exit."""
        if self._lost():
            self.end()
            warnings.warn(_UNUSED, stacklevel=3)

    def _lost(self) -> bool:
        return bool(self._before) and self._before != self._now()

    def _now(self) -> list[float]:
        # Once constraints have been used, norms are omitted, because they would synchronise a device.
        return weights(self._parameters, norms=not self._used)

    def _report(self) -> None:
        if self._lost() and not (self._used or _broken_off()):
            logging.getLogger("gemproj").warning(_UNUSED)


_UNUSED = (
    "The weights have changed, and no gradient was projected since constraints were last computed, so "
    "these constraints protected nothing. Call project_() before each optimizer.step(), or attach(optimizer) "
    "once, before the loop, to the optimizer that takes the steps."
)


class Watch:
    """A monitor that records whether steps are seen, and whether weights change without a step."""

    def __init__(self, memory: Any, parameters: Iterable[Tensor]) -> None:
        self._use, self._parameters = use_of(memory), [p for p in parameters if p.requires_grad]
        self._use.watch, self._stored = weakref.ref(self), len(memory) > 0
        self.begin()

    def begin(self, stepped: bool = False) -> None:
        """Begin a task, or continue a task that has `stepped`, with the current weights."""
        self.stepped, self._norms = stepped, self._now()

    def step(self, constraints: int) -> None:
        """Count a step with this number of constraints."""
        self.stepped, self._use.steps = True, self._use.steps + 1
        self._use.protected = self._use.protected or constraints > 0

    @property
    def never_stepped(self) -> bool:
        """Whether no step was ever taken with this memory."""
        return self._use.steps == 0

    def unseen(self) -> bool:
        """Return whether weights have changed, no step was seen, and there are tasks to protect."""
        return self._stored and not self.stepped and self._norms != self._now()

    def _now(self) -> list[float]:
        # Norms only: a learning-rate search restores the weights, but not the version counters.
        return weights(self._parameters)[len(self._parameters) :]
