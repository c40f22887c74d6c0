"""Which of two ways to the same rows is faster, found out on calls that are needed anyway."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gemproj.torch.batches import Batch
from gemproj.torch.one_pass.calls import NotPossible
from gemproj.torch.one_pass.gradients import Pass

T = TypeVar("T")
TIMED = 2  # calls of either way; the least time of each counts


class Choice:
    """Takes the gradients task by task or in one pass, whichever is faster, once both have agreed.

    For every kind of problem the first call goes both ways and compares the rows. If one pass fails, or
    if the rows differ by more than rounding, it is task by task from then on, for all kinds, and `reason`
    says why. Otherwise the ways take turns for the next calls, which are timed, and the faster one stays.
    Only the comparison is work that was not needed; on a device, only these calls wait for it.

    Parameters
    ----------
    one_pass : bool or "auto"
        True: always one pass, never compared; what makes it impossible is raised. False: task by task.
        "auto": as above. Times decide then, so that rows can differ in rounding from run to run; where
        torch is told to use deterministic algorithms, "auto" is False.

    Attributes
    ----------
    reason : str or None
        Why one pass is no longer taken.
    seconds : dict
        For each kind of problem the times so far, task by task and in one pass.
    """

    def __init__(self, one_pass: bool | Literal["auto"] = "auto") -> None:
        if one_pass not in (True, False, "auto"):
            raise ValueError(f'one_pass must be True, False or "auto"; found {one_pass!r}.')
        self.one_pass = one_pass
        self.reason: str | None = None
        self.seconds: dict[Hashable, tuple[list[float], list[float]]] = {}

    def fill(
        self,
        kind: Hashable,
        rows: Tensor,
        by_task: Callable[[], list[bool]],
        together: Callable[[], Pass],
    ) -> list[bool]:
        """Fill the rows, one way or the other.

        Parameters
        ----------
        kind : hashable
            What the decision may depend on, see `kind_of`.
        rows : Tensor
            What both ways write to, shape (t, d).
        by_task, together : callable
            Write all rows. `by_task` returns whether a row depends on each parameter; `together` returns
            what `one_pass` does.

        Returns
        -------
        list of bool
            For each parameter, whether a row depends on it.
        """
        if self.one_pass is True:
            return together().reached
        if not self.one_pass or self.reason or len(rows) < 2 or torch.are_deterministic_algorithms_enabled():
            return by_task()
        if kind not in self.seconds:
            return self._compare(kind, rows, by_task, together)
        apart, joint = self.seconds[kind]
        if len(joint) < TIMED:  # the two take turns, one pass last
            if len(apart) <= len(joint):
                return _timed(by_task, apart, rows.device)
            found = self._attempt(lambda: _timed(together, joint, rows.device))
        elif min(apart) <= min(joint):
            return by_task()
        else:
            found = self._attempt(together)
        return by_task() if found is None else found.reached

    def _compare(
        self, kind: Hashable, rows: Tensor, by_task: Callable[[], list[bool]], together: Callable[[], Pass]
    ) -> list[bool]:
        found = self._attempt(together)
        if found is None:
            return by_task()
        joint = rows.clone()
        reached = by_task()
        size = rows.norm(dim=1)
        if not bool(size.isfinite().all()):
            return reached  # nothing to learn from; compare again next time
        error = float(((joint - rows).norm(dim=1) / size.clamp_min(torch.finfo(rows.dtype).tiny)).max())
        if error <= found.tolerance:
            self.seconds[kind] = ([], [])
        else:  # or not a number
            self.reason = (
                f"the gradients in one pass differ from those task by task by {error:.1e} of their norm. Is "
                "the loss the mean over examples, and are these independent of each other, without dropout?"
            )
        return reached

    def _attempt(self, together: Callable[[], Pass]) -> Pass | None:
        """Return what one pass found; None, with the reason kept, if it failed."""
        try:
            return together()
        # Whatever it is: if the model or the loss is at fault, it will fail task by task as well.
        except Exception as error:
            self.reason = str(error) if isinstance(error, NotPossible) else f"{type(error).__name__}: {error}"
            return None


def kind_of(model: nn.Module, batches: Sequence[Batch]) -> Hashable:
    """Return what decides which way is faster: number of tasks, size to a factor of 2, training or not."""
    numbers = sum(x.numel() for x in tree_leaves(list(batches)) if isinstance(x, Tensor))
    return len(batches), numbers.bit_length(), model.training


def _timed(call: Callable[[], T], seconds: list[float], device: torch.device) -> T:
    """Call, and append how long it took until the device was done."""
    wait = getattr(torch, device.type).synchronize
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    seconds.append(time.perf_counter() - start)
    return result
