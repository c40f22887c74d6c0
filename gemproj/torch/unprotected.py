"""What is said aloud where nothing was protected, though something was meant to be."""

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
    """What a memory was good for: steps that were taken with it, and whether one had a constraint.

    Whether a first task without constraints is the first of a stream or all there is shows at the end only:
    where the memory is dropped, or Python ends.
    """

    steps: int = 0
    protected: bool = False
    kept: bool = False  # saved or copied, so that another training may go on with it
    watch: Any = None  # a weak reference to the last `Watch`

    def report(self) -> None:
        """Warn if steps were taken and nothing was protected by them, or if weights changed without steps."""
        if self.protected or self.kept or _broken_off():
            return
        watch = None if self.watch is None else self.watch()
        if self.steps:
            logging.getLogger("gemproj").warning(
                "Nothing was protected: all %d steps were taken before a task was stored, so that they are "
                "those of a training without GEM. Call keep or end_task with examples of what must be kept "
                "before the training that must not forget it. Nothing is lost if a first task is learned on "
                "from a state that was saved.",
                self.steps,
            )
        elif watch is not None and watch.unseen():
            logging.getLogger("gemproj").warning(
                "Nothing was protected: the weights have changed, but not in step() of the optimizer that "
                "gemproj is attached to. Attach to the optimizer that takes the steps."
            )


_uses: weakref.WeakKeyDictionary[Any, Use] = weakref.WeakKeyDictionary()


def use_of(memory: Any) -> Use:
    """Return the use of a memory, which is reported at its end."""
    if memory not in _uses:
        _uses[memory] = Use()
        weakref.finalize(memory, _uses[memory].report)
    return _uses[memory]


def keep(memory: Any) -> None:
    """Note that a memory is saved or copied."""
    use_of(memory).kept = len(memory) > 0


def _broken_off() -> bool:
    """Return whether Python ends with an error, which tells enough."""
    return hasattr(sys, "last_value") and not hasattr(sys, "ps1")


def weights(parameters: Iterable[Tensor], norms: bool = True) -> list[float]:
    """Return how often each parameter was written, and its norm, for which a device is waited for.

    Fused optimizers do not count what they write.
    """

    def norm(p: Tensor) -> Tensor:
        return torch.linalg.vector_norm(local(p), dtype=torch.promote_types(p.dtype, torch.float32))

    held = list(parameters)
    found = [norm(p) for p in held] if norms else []  # all of them, before the first is waited for
    return [*(p._version for p in held), *map(float, found)]


class Unused:
    """Constraints of a projector that nothing has used yet, and the weights when they were computed.

    It is told when weights have changed by the time that others are computed; of the last constraints, if
    none was ever used, where the projector is dropped, or Python ends.
    """

    def __init__(self, projector: Any) -> None:
        self._parameters, self._before, self._used = list(projector.parameters), list[float](), False
        weakref.finalize(projector, self._report)

    def begin(self) -> None:
        """Note that constraints have been computed."""
        self._before = self._now()

    def end(self, used: bool = True) -> None:
        """Note that they were used, or that there are none."""
        self._before, self._used = [], self._used or used

    def warn(self) -> None:
        """Warn if weights have changed since; once told, it is not told at the end."""
        if self._lost():
            self.end()
            warnings.warn(_UNUSED, stacklevel=3)

    def _lost(self) -> bool:
        return bool(self._before) and self._before != self._now()

    def _now(self) -> list[float]:
        # Nothing is waited for once constraints are in use.
        return weights(self._parameters, norms=not self._used)

    def _report(self) -> None:
        if self._lost() and not (self._used or _broken_off()):
            logging.getLogger("gemproj").warning(_UNUSED)


_UNUSED = (
    "The weights have changed, and no gradient was projected since constraints were computed last: they "
    "protected nothing. Call project_() before each optimizer.step(), or attach(optimizer) once, before the "
    "loop, to the optimizer that takes the steps."
)


class Watch:
    """Whether steps are seen, and whether weights change without one."""

    def __init__(self, memory: Any, parameters: Iterable[Tensor]) -> None:
        self._use, self._parameters = use_of(memory), [p for p in parameters if p.requires_grad]
        self._use.watch, self._stored = weakref.ref(self), len(memory) > 0
        self.begin()

    def begin(self, stepped: bool = False) -> None:
        """Begin a task, or go on with one that has `stepped`, with the weights as they are."""
        self.stepped, self._norms = stepped, self._now()

    def step(self, constraints: int) -> None:
        """Count a step under so many constraints."""
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
        # Not how often they were written: a search for a learning rate puts them back.
        return weights(self._parameters)[len(self._parameters) :]
