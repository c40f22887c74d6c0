"""The projector of a training loop: its constraints, and the projection of gradients and steps."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from gemproj._checks import check_count
from gemproj._solution import DualSolution
from gemproj.methods import GEM2017, AnyMethod, as_method
from gemproj.torch.batches import Batch, Loss
from gemproj.torch.changes import Change, Gradient, Metric, On, Step
from gemproj.torch.constraint_gradients import from_batches, from_losses, unwrapped
from gemproj.torch.constraints import ConstraintMatrix
from gemproj.torch.distributed import Replicated, check_alone
from gemproj.torch.hooks import ProjectedOptimizer, attached
from gemproj.torch.keywords import suggesting
from gemproj.torch.one_pass import SharedPasses
from gemproj.torch.parameters import ParameterVector
from gemproj.torch.promise import Promise
from gemproj.torch.report import Projection, shown
from gemproj.torch.terms import Terms, check_terms
from gemproj.torch.unprotected import Unused


class GradientProjector:
    """Projects gradients, or the steps that an optimizer applies, so that promises about losses are kept.

    The constraint matrix is written into one buffer of t * d numbers, which all steps share. The multipliers
    of a step are the warm start of the next step, until the number of constraints changes or `reset` is
    called, as at a task boundary.

    Parameters
    ----------
    parameters : iterable of torch.nn.Parameter
        Parameters on one device. Duplicates and parameters that do not require a gradient are ignored. Shards
        (`DTensor`, as in FSDP2) are projected without gathering them.
    promise : Promise, optional
        The promise about rows for which no other promise is given; by default, no loss may rise.
    method : str, Method or callable, default "exact"
        As in `gemproj.solve_dual`.
    on : {"gradient", "step", "both"}, default "gradient"
        "gradient" projects the gradient before the optimizer reads it, as GEM does; with momentum, Adam or
        weight decay the step may still break promises. "step" projects the step that the optimizer applies.
        "both" projects the gradient and then the step, but applies weights only to the gradient. "step" and
        "both" need `attach`.
    metric : {"euclidean", "adam"}, optional
        The distance between the optimizer's step and the projected step. By default Adam's metric if the
        optimizer keeps second moments: an entry has the weight ``(sqrt(v_hat) + eps) / lr``, computed after
        the step. Here v_hat is at least the largest squared value of the entry in the rows.
    every : int, default 1
        `recall` computes the constraints at each `every`-th call and reuses them in between. Every step is
        projected.
    project : bool, default True
        Whether to change gradients and steps. If False, `last` reports what a projection would have done.
    rows_dtype : torch.dtype, optional
        The dtype of the rows, by default the dtype of the parameters. ``torch.bfloat16`` takes half the
        memory of float32. Promises then hold for the rounded rows: cosines have errors of up to 0.002.
    process_group : torch.distributed.ProcessGroup, optional
        The processes that train together. Rows of replicated parameters (DistributedDataParallel) are
        averaged over the group; `recall` finds the group of a wrapped model. If each process trains its own
        model, pass ``dist.new_subgroups(1)[0]``. With shards, the default is the group that holds the shards.

    Attributes
    ----------
    last : Projection or None
        Statistics of the last step.

    Notes
    -----
    Weights and penalties are in units of gradients; for steps in the Euclidean metric they are multiplied by
    the learning rate. A tolerance needs a learning rate, from the attached optimizer or passed to `project_`.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch import GradientProjector
    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> projector = GradientProjector(model.parameters())
    >>> past, now = torch.eye(3)[:1], -torch.ones(1, 3)
    >>> projector.constrain(model(batch).sum() for batch in [past])
    >>> model(now).sum().backward()
    >>> projector.project_().num_violated, model.weight.grad.tolist()
    (1, [[0.0, -1.0, -1.0]])

    Projection of both gradients and steps, for AdamW with weight decay:

    >>> projector = GradientProjector(model.parameters(), on="both")
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> handle = projector.attach(optimizer)
    >>> projector.constrain([model(past).sum()])
    >>> optimizer.step()
    >>> projector.last.worst_cosine > -1e-6
    True
    """

    @suggesting
    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        promise: Promise | None = None,
        method: AnyMethod = "exact",
        *,
        on: On = "gradient",
        metric: Metric | None = None,
        every: int = 1,
        project: bool = True,
        rows_dtype: torch.dtype | None = None,
        process_group: Any = None,
    ) -> None:
        promise = Promise() if promise is None else promise
        check_choices(promise, method, on, every, project, rows_dtype)
        self.promise, self.method, self.on, self.metric = promise, method, on, metric
        self.every, self.project = every, project
        self._vector = ParameterVector.of(parameters, process_group)
        self._matrix = ConstraintMatrix(self._vector, rows_dtype)
        self._unused = Unused(self)
        self._handles: list[weakref.ref[ProjectedOptimizer]] = []
        self.last: Projection | None = None
        self.reset()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling; a copy is not attached to an optimizer."""
        return self.__dict__ | {"_handles": []}

    def __repr__(self) -> str:
        sizes = f"{len(self._vector.parameters)} parameters, d={self._vector.d}, t={len(self._matrix)}"
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("on", "every", "project"))
        return f"GradientProjector({sizes}, {self.promise!r}, {as_method(self.method)!r}, {options})"

    @property
    def metric(self) -> Metric | None:
        """The distance between steps; may be set before training."""
        return self._metric

    @metric.setter
    def metric(self, metric: Metric | None) -> None:
        if metric not in (None, *get_args(Metric)):
            raise ValueError(f"metric must be 'euclidean', 'adam' or None; found {metric!r}.")
        self._metric = metric

    @property
    def constraints(self) -> Tensor:
        """The constraint matrix G, shape (t, d): a view of the local columns."""
        self._unused.end()
        return self._matrix.rows

    @property
    def count(self) -> int:
        """The number t of constraints."""
        return len(self._matrix)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that are projected."""
        return self._vector.parameters

    @property
    def sharded(self) -> bool:
        """Whether each process has its own columns of G."""
        return self._vector.topology.collective

    @property
    def processes(self) -> int:
        """The number of processes that train together."""
        return self._vector.topology.world

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self._vector.device

    @property
    def why_row_by_row(self) -> str | None:
        """The reason why some of the last rows could not share passes; None if there is no reason."""
        return self._passes.reason

    @property
    def due(self) -> bool:
        """Whether the next `recall` computes constraints."""
        return self._calls % self.every == 0

    @property
    def scale_dependent(self) -> bool:
        """Whether the projection of a scaled gradient differs from the scaled projection."""
        return self._terms.held or self._terms.in_units or isinstance(as_method(self.method), GEM2017)

    def constrain(self, losses: Iterable[Tensor], promise: Promise | Sequence[Promise] | None = None) -> None:
        """Replace the constraints by the gradients of the losses, one row of G per loss.

        ``.grad`` is not changed. If a loss cannot be computed, no constraints remain.

        Parameters
        ----------
        losses : iterable of scalar tensors
            The loss of each past task on its memory, from a separate forward pass. With a generator, only one
            graph is in memory at a time. With a `process_group`, every process passes its own losses of the
            same tasks, and rows are averages over processes. With shards, pass a list.
        promise : Promise or list of them, optional
            One promise about all losses, or one promise per loss; by default the projector's promise.
        """
        start = time.perf_counter()
        self._unused.warn()
        self._calls = 0
        given = self.promise if promise is None else promise
        each = [given] if isinstance(given, Promise) else list(given)
        from_losses(self._matrix, losses, self._facts() | {"promises": [one.numbers() for one in each]})
        each = [given] * len(self._matrix) if isinstance(given, Promise) else each
        self._agree(each)
        self._seconds += time.perf_counter() - start

    def recall(
        self,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        promise: Loss | Promise | Sequence[Promise] | None = None,
        *,
        microbatch: int | None = None,
        scale: float = 1.0,
    ) -> bool:
        """Replace the constraints by the gradients of the mean loss on each of `batches`.

        The model runs in evaluation mode: dropout is off, and batch normalisation uses its running statistics
        without updating them. ``.grad``, the modes of the modules and torch's random state are restored.

        Parameters
        ----------
        model : torch.nn.Module
            The model, possibly wrapped in DistributedDataParallel or sharded by ``fully_shard``. Each process
            then passes its own examples of the same tasks, and rows use the examples of all processes.
        batches : iterable
            One batch per row, such as ``memory.batches()``. A batch is any nesting of tensors.
        promise : callable, Promise or list of them, optional
            A loss, ``loss(model, batch)``, to use in the projector's promise; or one promise about all
            batches; or one promise per batch. By default the projector's promise. Pass the same function at
            every step: the test whether rows can share a pass runs once per function.
        microbatch : int, optional
            Largest number of examples per forward pass; rows are gradients of the mean over all examples.
            Means over tokens, as in models of transformers, are averaged over microbatches and processes with
            the numbers of examples as weights. `gemproj.torch.losses.CrossEntropy` is a mean over examples.
        scale : float, default 1
            Factor by which losses are multiplied, and rows divided, for backward passes in float16.

        Returns
        -------
        bool
            True if constraints were computed: in the first call after `reset`, then in each `every`-th call.
        """
        handles = filter(None, [one() for one in self._handles])
        if (
            self._calls
            and self.on != "gradient"
            and not any(one in attached(one.optimizer) for one in handles)
        ):
            raise ValueError(
                f"on={self.on!r} projects the steps of an optimizer, and there is none: call "
                "attach(optimizer) once, before the loop."
            )
        if promise is None:
            promise = self.promise
        elif not isinstance(promise, Promise | Sequence):
            promise = replace(self.promise, loss=promise)
        self._unused.warn()
        model, parallel = unwrapped(model)
        if parallel is not None and self._vector.topology.world == 1:
            self._vector.topology = Replicated(self._vector.device, parallel.process_group)
        due = self.due
        if due:
            start, facts = time.perf_counter(), self._facts() | {"option microbatch": microbatch}
            given = from_batches(
                self._matrix, model, batches, promise, facts, self._passes, microbatch=microbatch, scale=scale
            )
            self._agree(given)
            self._seconds += time.perf_counter() - start
        self._calls += 1  # a failed call does not count
        return due

    @torch.compiler.disable
    def project_(self, learning_rate: float | None = None) -> Projection:
        """Project the gradients of the parameters in place; without constraints, do nothing.

        A missing gradient counts as zero. If a constraint depends on the parameter, the gradient is created,
        even if it is zero. As in replay, the parameter then takes part in every step.

        Parameters
        ----------
        learning_rate : float, optional
            The learning rate of the step, required for a tolerance. Attached optimizers use their own rates.

        Returns
        -------
        Projection
            Statistics, also stored in `last`.
        """
        if self.on == "step":
            raise ValueError("on='step' leaves the gradient alone; attach(optimizer) projects its steps.")
        self._vector.check()
        return self._change_gradient(Gradient(self._vector, learning_rate=learning_rate))

    def attach(self, optimizer: torch.optim.Optimizer) -> ProjectedOptimizer:
        """Project in every ``optimizer.step()``, and measure the applied step.

        The gradient is projected before the step, or after each evaluation of a closure. The step is
        projected after the optimizer has taken it. `last` then has the cosine between each constraint and
        the applied step. Only parameters that the optimizer holds are projected: if several optimizers share
        the parameters, attach to each. Parameters with a zero rate, or no gradient after projection, stay.

        The optimizer's state is not changed. A step that a `torch.amp.GradScaler` skips is not projected. The
        scaler unscales before the projection, except with ``fused=True``. In that case, a weight, a penalty,
        a tolerance or `GEM2017` requires a call of ``scaler.unscale_(optimizer)`` before the step.

        Returns
        -------
        ProjectedOptimizer
            Call its ``remove()`` to detach.
        """
        found = ProjectedOptimizer(self, Step.of(self._vector, optimizer))
        self._handles = [one for one in self._handles if one() is not None] + [weakref.ref(found)]
        return found

    def before_step(self, step: Step | None) -> None:
        """Project the gradient before a step, unless ``on="step"``; `step` is None if it is skipped."""
        if step is None or self.on == "step":
            self._record(None, time.perf_counter())
        else:
            self._change_gradient(Gradient(self._vector, step))

    def after_step(self, step: Step, seconds: float = 0.0) -> None:
        """Project the step that an optimizer has taken, unless ``on="gradient"``; measure its cosines."""
        start, last = time.perf_counter(), self.last
        assert last is not None
        if self.on != "gradient":
            try:
                sol = self._project(step)
            except BaseException as error:  # also Ctrl-C
                step.undo()
                if not isinstance(error, ValueError):
                    raise
                name = type(step.optimizer).__name__
                raise ValueError(
                    f"A step of {name} could not be projected and was undone. Here g is the step: {error}"
                ) from error
            last = replace(last, _step=sol, _solution=sol if self.on == "step" else last._solution)
        cosines = self._matrix.follow(step.finish())
        seconds += last.seconds + time.perf_counter() - start
        self.last = replace(last, cosines=cosines, seconds=seconds)

    def check_processes(self) -> None:
        """Raise if several processes are initialised, but how they train together is unknown."""
        check_alone(self._vector.topology)

    def reset(self) -> None:
        """Forget the constraints and the warm start, as at the boundary between two tasks."""
        self._matrix.clear()
        self._passes = SharedPasses()  # compare again: a new set may change all other rows
        self._terms = Terms.of([self.promise], self.device)
        self._about: list[Promise] = []  # the promises from which the terms were made
        self._warm: dict[str, Any] = {}  # multipliers for "gradient" and for "step"
        self._calls = 0
        self._unused.end(used=False)
        self._seconds = 0.0  # time spent on constraints since the last step
        self.last = None

    def state_dict(self, *, constraints: bool = True) -> dict[str, Any]:
        """Return the constraints (with shards, the local columns), the warm start and the count of calls.

        Parameters
        ----------
        constraints : bool, default True
            Whether to include the rows; not needed if they are recomputed before the next step.
        """
        rows = self._matrix.state_dict() if constraints else None
        warm = {name: torch.as_tensor(lam).clone() for name, lam in self._warm.items()}
        return {"constraints": rows, "warm": warm, "calls": self._calls}

    def load_state_dict(
        self, state: Mapping[str, Any], promise: Promise | Sequence[Promise] | None = None
    ) -> None:
        """Load a state returned by `state_dict` onto the device of the parameters.

        A state does not include the promises about the rows: pass `promise` as in `constrain`. Raises a
        ValueError for a state of another object or of another model.
        """
        lacking = {"constraints", "warm", "calls"} - state.keys()
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not a GradientProjector state.")
        if state["constraints"] is None:
            self._matrix.clear()
        else:
            self._matrix.load_state_dict(state["constraints"])
        given = self.promise if promise is None else promise
        self._terms = Terms.of([given] if isinstance(given, Promise) else given, self.device)
        self._about = []
        self._warm = {name: lam.to(self._vector.device, copy=True) for name, lam in state["warm"].items()}
        # Without rows, the next call computes them, whatever `every` of the saved projector was.
        self._calls = 0 if state["constraints"] is None else state["calls"]
        self.last = None

    def _change_gradient(self, change: Gradient) -> Projection:
        start, sol = time.perf_counter(), None
        if len(self._matrix) and any(p.grad is not None for p in self._vector.parameters):
            sol = self._project(change)
        return self._record(sol, start)

    def _project(self, change: Change) -> DualSolution | None:
        """Replace a gradient or a step by its projection, unless `project` is False; return the solution.

        If `project` is False and there is no solution, for example if the gradient is not finite, return
        None; training continues as without a projector.
        """
        G, v = self._matrix, change.read()
        weighted = change.name == "gradient" or self.on == "step"
        options = self._terms.options(self.method, weighted, change, G)
        start = self._warm.get(change.name)
        if start is not None and start.shape[-1] != len(G):
            start = None
        weights = change.weights(G.largest)
        try:
            sol, changed = G.project(v, options, start, change.moving(), weights, write=self.project)
        except ValueError as error:
            if not self.project:
                return None
            raise ValueError(f"{error}{self._named_rows(str(error))}") from error
        self._warm[change.name] = sol.multipliers
        if self.project:
            change.write(changed, G.reached)
        return sol

    def _named_rows(self, message: str) -> str:
        """Return the sets of the rows as text to append to a message with row numbers; empty if unknown."""
        sets = [f"{k} is of {shown(name[0])!r}" for k, name in enumerate(self._matrix.names[:20]) if name]
        if not sets or "row" not in message:
            return ""
        h = " h comes from their tolerances." if self._terms.held else ""
        return f" Row {', row '.join(sets)}.{h}"

    def _agree(self, promises: Sequence[Promise]) -> None:
        """Store the numbers of the promises about the rows; record the rows as computed but not yet used."""
        if len(promises) != len(self._matrix):
            self._matrix.clear()
            raise ValueError(f"promise must be one, or one for each loss; found {len(promises)}.")
        if list(map(id, self._about)) != list(map(id, promises)):
            for promise in {id(one): one for one in promises}.values():
                check_terms(promise, self.method, self.on)
            self._terms, self._about = Terms.of(promises, self.device), list(promises)
        if len(self._matrix):
            self._unused.begin()

    def _facts(self) -> dict[str, Any]:
        """Return the facts that must be equal on all processes of a training; empty for one process."""
        if self._vector.topology.world == 1:
            return {}
        given: dict[str, Any] = {"on": self.on, "metric": self.metric, "every": self.every}
        given |= {"project": self.project, "rows_dtype": self._matrix.rows.dtype}
        # The repr of a function contains an address, which differs between processes.
        given["method"] = getattr(self.method, "__name__", self.method)
        named = {f"option {name}": repr(value) for name, value in given.items()}
        return named | self._vector.signature()

    def _record(self, sol: DualSolution | None, start: float) -> Projection:
        self._unused.end()
        seconds, self._seconds = self._seconds + time.perf_counter() - start, 0.0
        G = self._matrix
        excess = self._terms.excess(G.losses, G.stored) if len(G) else None
        known: dict[str, Any] = {"names": G.names, "losses": G.losses, "stored": G.stored}
        known["costs"] = () if G.age else G.seconds
        self.last = Projection(len(G), sol, excess=excess, age=G.age, seconds=seconds, **known)
        return self.last


def check_choices(
    promise: Any, method: AnyMethod, on: On, every: int, project: bool, rows_dtype: torch.dtype | None
) -> None:
    """Raise if options of a projector are invalid or exclude each other."""
    if not isinstance(promise, Promise):
        raise TypeError(f"promise must be a gemproj.torch.Promise; found {type(promise).__name__}.")
    check_terms(promise, method, on)
    check_count(every, "every", 1)
    if not isinstance(project, bool):
        raise TypeError(f"project must be True or False; found {project!r}.")
    if rows_dtype is not None and not (isinstance(rows_dtype, torch.dtype) and rows_dtype.is_floating_point):
        raise TypeError(f"rows_dtype must be a floating-point dtype of torch; found {rows_dtype!r}.")
