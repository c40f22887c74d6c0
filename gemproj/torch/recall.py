"""The constraints of past tasks from step to step: computed where due, followed in between, stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemproj._checks import check_count, check_number
from gemproj._options import Options
from gemproj._solution import DualSolution
from gemproj.methods import AnyMethod
from gemproj.torch.attached import is_attached
from gemproj.torch.batches import Batch, Loss
from gemproj.torch.bound import LossBound, without_noise
from gemproj.torch.constraint_gradients import Refresh, from_batches, from_losses, model_loss, unwrapped
from gemproj.torch.constraints import ConstraintMatrix
from gemproj.torch.distributed import Replicated, check_alone
from gemproj.torch.optimizer_step import On
from gemproj.torch.stats import Projection
from gemproj.torch.unprotected import Unused
from gemproj.torch.zero import vector_of

# Which a projector has as attributes, besides its method.
OPTIONS = ("margin", "penalty", "equality", "bound", "smoothing", "on", "metric", "interval", "refresh")


class RecalledConstraints:
    """The constraints of a `GradientProjector`, which explains the parameters, and what is known of them.

    They are computed by `constrain` and `recall`; in between, `follow` keeps their losses up with the steps.
    """

    on: On
    bound: LossBound | None
    _groups: Sequence[Sequence[int]] | None
    _gate: bool
    method: AnyMethod
    refresh: Refresh

    def __init__(
        self,
        parameters: Iterable[Any],
        group: Any,
        rows_dtype: torch.dtype | None,
        rows_device: torch.device | str | None,
        smoothing: float,
        interval: int,
    ) -> None:
        check_number(smoothing, "smoothing", 0.0)
        if smoothing >= 1.0:
            raise ValueError(f"smoothing must be below 1; found {smoothing}.")
        check_count(interval, "interval", 1)
        self._vector = vector_of(parameters, group)
        if rows_dtype is not None and not (
            isinstance(rows_dtype, torch.dtype) and rows_dtype.is_floating_point
        ):
            raise TypeError(f"rows_dtype must be a floating-point dtype of torch; found {rows_dtype!r}.")
        self._matrix = ConstraintMatrix(self._vector, rows_dtype, _rows_device(rows_device, self.device))
        self.smoothing, self.interval = smoothing, interval
        self._unused = Unused(self)
        self.reset()

    @property
    def constraints(self) -> Tensor:
        """The constraint matrix G, shape (t, d): a view of the local columns, one row per past task."""
        self._unused.end()
        return self._matrix.rows

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that are projected."""
        return self._vector.parameters

    @property
    def sharded(self) -> bool:
        """Whether this process has columns of its own."""
        return self._vector.topology.collective

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._vector.device

    @property
    def due(self) -> bool:
        """Whether the next `recall` computes constraints, or looks which ones to compute."""
        return self._calls % self.interval == 0

    def constrain(self, losses: Iterable[Tensor]) -> None:
        """Replace the constraints: one row of G per loss, the gradient of that loss.

        ``.grad`` is not touched. If a loss cannot be computed there are no constraints, rather than some of
        them.

        Parameters
        ----------
        losses : iterable of scalar tensors
            The loss of each past task on its memory, each from a forward pass of its own; a generator holds
            one graph in memory at once. With a `group`, every process brings its own losses of the same
            tasks, and rows are their averages. With shards it must be a list.
        """
        start = time.perf_counter()
        self._unused.warn()
        self._calls = 0
        from_losses(self._matrix, losses, self._facts())
        self._ages = [0] * len(self._matrix)
        self._note_rows()
        self._seconds += time.perf_counter() - start

    def recall(
        self,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        loss: Loss = model_loss,
        *,
        microbatch: int | None = None,
        training: bool = False,
        scale: float = 1.0,
        names: Callable[[], Sequence[Any]] | None = None,
    ) -> bool:
        """Replace the constraints by the gradients of the mean loss on each of `batches`.

        ``.grad``, the modes of the modules and torch's random state are restored. Without `training`,
        dropout is off and batch normalisation uses, and does not touch, its running statistics; with it,
        masks are drawn and these statistics move.

        Parameters
        ----------
        model : torch.nn.Module
            May be wrapped in DistributedDataParallel, or sharded by ``fully_shard``: each process
            then brings its own examples of the same tasks, and rows are those of all together.
        batches : iterable
            One batch per past task, such as ``memory.batches()``: any nesting of tensors.
        loss : callable
            ``loss(model, batch)`` returns the mean over the examples, or one number for each. By default
            ``model(**batch).loss``, as models of transformers compute it.
        microbatch : int, optional
            Most examples in one forward pass; the gradient is that of the mean over all of them. A loss that
            is a mean over tokens, as that of models of transformers, is weighted by examples there, and over
            processes; `gemproj.torch.losses.CrossEntropy` is a mean over examples.
        training : bool, default False
            Whether to compute the losses in the mode in which the model trains.
        scale : float, default 1
            Losses are multiplied by it and rows divided again, for backward passes in float16.
        names : callable, optional
            Returns what the rows are about, such as ``memory.names``: processes that disagree raise.

        Returns
        -------
        bool
            Whether constraints were computed: at the first call after `reset` and every `interval` calls,
            unless with ``refresh="rising"`` no loss has risen.
        """
        if self._calls and self.on != "gradient" and not is_attached(self):
            raise ValueError(
                f"on={self.on!r} projects the steps of an optimizer, and there is none: call "
                "attach(optimizer) once, before the loop."
            )
        # Divergences from stored outputs are zero at first. Groups have no loss each.
        self._compared = hasattr(loss, "outputs") and self._groups is None
        self._unused.warn()
        model, parallel = unwrapped(model)
        if parallel is not None and self._vector.topology.world == 1:
            self._vector.topology = Replicated(self._vector.device, parallel.process_group)
        due: list[int] = []
        if self.due:
            start = time.perf_counter()
            due = from_batches(
                self._matrix,
                model,
                batches,
                loss,
                self._facts({"microbatch": microbatch, "training": training}),
                microbatch=microbatch,
                training=training,
                scale=scale,
                names=names,
                smoothing=self.smoothing,
                refresh=self.refresh,
                turn=self._calls // self.interval - 1,
                tolerance=None if self.bound is None else self.bound.tolerance,
            )
            ages = self._ages if len(self._ages) == len(self._matrix) else [0] * len(self._matrix)
            new = set(due)
            self._ages = [0 if k in new else age for k, age in enumerate(ages)]
            self._seconds += time.perf_counter() - start
        self._calls += 1  # a call that has failed is still due
        self._note_rows()
        return bool(due)

    def check_processes(self) -> None:
        """Raise where several processes are initialised and nothing says how they train together."""
        check_alone(self._vector.topology)

    def follow(self, step: Tensor) -> Tensor:
        """Return the cosine of an applied step with each constraint, and follow the losses along it."""
        self._ages = [age + 1 for age in self._ages]
        return self._matrix.follow(step)

    def reset(self) -> None:
        """Forget the constraints and the warm start, as at the boundary between two tasks."""
        self._matrix.clear()
        self._compared = False
        self._warm: dict[str, Tensor] = {}  # multipliers, by what was projected
        self._calls = 0
        self._unused.end(used=False)
        self._ages = list[int]()  # of each row, steps since it was computed
        self._seconds = 0.0  # spent on constraints since the last step
        self.last: Projection | None = None

    def state_dict(self, *, constraints: bool = True) -> dict[str, Any]:
        """Return the constraints (of shards, the local columns), the warm start and the interval.

        Parameters
        ----------
        constraints : bool, default True
            Whether to include the rows; not needed if they are recomputed before the next step.
        """
        rows = self._matrix.state_dict() if constraints else None
        warm = {name: lam.clone() for name, lam in self._warm.items()}
        return {"constraints": rows, "warm": warm, "calls": self._calls, "ages": list(self._ages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters.

        A ValueError tells of the state of something else, or of the projector of another model.
        """
        lacking = {"constraints", "warm", "calls", "ages"} - state.keys()
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not of a GradientProjector.")
        if state["constraints"] is None:
            self._matrix.clear()
        else:
            self._matrix.load_state_dict(state["constraints"])
        self._warm = {name: lam.to(self._vector.device, copy=True) for name, lam in state["warm"].items()}
        # Without rows they are due at the next call, whatever the interval of the saved projector was.
        self._calls = 0 if state["constraints"] is None else state["calls"]
        self._ages = list(state["ages"])
        self.last = None

    def _demanding(self, options: Options, rate: float | None, unit: float = 1.0) -> Options:
        """Return options with the right-hand side h that a bound needs, and rows of rounding do not.

        Of a gradient, the `rate` is that of its step; of a step it is 1, and `unit` is the learning rate.
        """
        matrix, h = self._matrix, None
        if self.bound is not None:
            if rate is None:
                raise ValueError(
                    "bound is about steps: attach(optimizer), or pass the learning_rate of the step."
                )
            if not matrix.bounded:
                raise ValueError(
                    "bound needs the losses that examples had when they were stored: use GEM.end_task, "
                    "memory.record(task, losses=...) or memory.add(..., losses=...)."
                )
            h = self.bound.demand(matrix.losses, matrix.bounds, rate, self._vector.dtype)
        if self._compared and options.equality is False and "h" in getattr(options.method, "accepts", "h"):
            h = without_noise(h, matrix.losses, self._vector.dtype, unit)
        return options if h is None else replace(options, h=h)

    def _facts(self, more: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return what all processes that train the model must have in common, none for a single one."""
        if self._vector.topology.world == 1:
            return {}
        given = {name: getattr(self, name) for name in OPTIONS}
        given |= {"groups": self._groups, "gate": self._gate, "rows_dtype": self._matrix.rows.dtype}
        options: dict[str, Any] = {
            name: value if isinstance(value, Tensor) else repr(value) for name, value in given.items()
        }
        options["method"] = getattr(self.method, "__name__", repr(self.method))  # the repr has an address
        named = {f"option {name}": value for name, value in (options | (more or {})).items()}
        return named | self._vector.signature()

    def _note_rows(self) -> None:
        """Note that there are constraints to be used, if there are."""
        if len(self._matrix):
            self._unused.begin()

    def _record(self, sol: DualSolution | None, start: float) -> Projection:
        self._unused.end()
        seconds, self._seconds = self._seconds + time.perf_counter() - start, 0.0
        excess = None if self.bound is None else self.bound.excess(self._matrix.losses, self._matrix.bounds)
        self.last = Projection(
            len(self._matrix), sol, excess=excess, age=max(self._ages, default=0), seconds=seconds
        )
        return self.last


def _rows_device(given: torch.device | str | None, here: torch.device) -> torch.device:
    """Return where rows are kept: on the CPU or here, where the parameters are."""
    device = here if given is None else torch.device(given)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != here.type or device.index not in (None, here.index):
        raise ValueError(
            f"rows_device must be 'cpu' or the device of the parameters, {here}; found {given!r}."
        )
    return here
