"""The projector of a training loop: its constraints, and the projection of gradients and steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from gemproj._bounds import Options, check_options
from gemproj._checks import check_count
from gemproj._solution import DualSolution
from gemproj.methods import GEM2017, AnyMethod
from gemproj.torch.attached import is_attached
from gemproj.torch.batches import Batch, Loss
from gemproj.torch.bound import LossBound, right_hand_side
from gemproj.torch.constraint_gradients import from_batches, from_losses, model_loss, unwrapped
from gemproj.torch.constraints import ConstraintMatrix
from gemproj.torch.distributed import Replicated, check_alone
from gemproj.torch.optimizer_step import Metric, On, OptimizerStep, ProjectedOptimizer
from gemproj.torch.stats import Projection
from gemproj.torch.unprotected import Unused
from gemproj.torch.zero import step_of, vector_of

# Attributes of a projector, besides its method.
OPTIONS = ("margin", "penalty", "equality", "bound", "on", "metric", "interval")


class GradientProjector:
    """Projects gradients, or the steps that an optimizer applies, so that no loss of earlier tasks rises.

    The constraint matrix is written into one buffer of t * d numbers that is kept from step to step. The
    multipliers of a step are the warm start of the next one, until the number of constraints changes or
    `reset` is called, as at a task boundary.

    Parameters
    ----------
    parameters : iterable of torch.nn.Parameter
        On one device; those that do not require a gradient are left out, duplicates too. Shards
        (`DTensor`, as FSDP2 makes them) are projected where they are.
    method : str, Method or callable, default "exact"
        As in `gemproj.solve_dual`.
    margin, penalty : float or Tensor of shape (t,), optional
        As in `gemproj.solve_dual`, in gradient units; for steps they are multiplied by the learning rate.
        The attributes may be changed between tasks, with t.
    equality : bool or bool Tensor of shape (t,), default False
        Constraints ``G x = 0`` instead of ``G x >= 0``, as in `gemproj.solve_dual`.
    on : {"gradient", "step", "both"}, default "gradient"
        What is projected: the gradient before the optimizer sees it, as GEM does, which promises nothing
        for what momentum, Adam or weight decay make of it; the step that the optimizer applies; or the
        gradient and then the step, where the margin applies to the gradient only. Other than the gradient
        needs `attach`.
    bound : float, optional
        Hold losses at their bounds instead of never letting them rise: no loss may exceed what it was when
        its examples were stored by more than `bound`. For the step s, ``G s >= kappa * (loss - bound)``,
        and for the gradient the same over the learning rate, but never more than ``|g_k| |s|``: what is
        above its bound comes back geometrically, and what is below may rise towards it. Needs `attach`,
        and batches of a memory with losses.
    kappa : float, default 1
        Share of the excess over the bound that one step is to take back, above 0 and at most 1.
    rows_dtype : torch.dtype, optional
        Of the rows, by default that of the parameters. ``torch.bfloat16`` takes half the memory of float32,
        and promises what the rounded rows say: cosines are off by up to 0.002.
    metric : {"euclidean", "adam"}, default "euclidean"
        The distance in which the projected step is closest to the optimizer's: Adam's own weighs each
        entry by ``(sqrt(v_hat) + eps) / lr``, after the step, where v_hat is at least the largest square of
        the entry in the constraints. Not for ``on="gradient"``.
    interval : int, default 1
        `recall` refreshes the constraints on every `interval`-th call and reuses them in between. Every
        step is projected.
    group : torch.distributed.ProcessGroup, optional
        Processes to train with. For replicated parameters (DistributedDataParallel): rows are averaged
        over them; `recall` finds the group of a wrapped model. If each process trains a model of its own,
        ``dist.new_subgroups(1)[0]``. For shards: by default all processes.

    Attributes
    ----------
    last : Projection or None
        Statistics of the last step.

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

    AdamW with weight decay, whose steps are projected too:

    >>> projector = GradientProjector(model.parameters(), on="both", metric="adam")
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> handle = projector.attach(optimizer)
    >>> projector.constrain([model(past).sum()])
    >>> optimizer.step()
    >>> projector.last.worst_cosine > -1e-6
    True
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        method: AnyMethod = "exact",
        *,
        margin: float | Tensor = 0.0,
        penalty: float | Tensor | None = None,
        equality: bool | Tensor = False,
        bound: float | None = None,
        kappa: float = 1.0,
        rows_dtype: torch.dtype | None = None,
        on: On = "gradient",
        metric: Metric = "euclidean",
        interval: int = 1,
        group: Any = None,
    ) -> None:
        for name, value, kind in (("on", on, On), ("metric", metric, Metric)):
            known = get_args(kind)
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; found {value!r}.")
        if on == "gradient" and metric != "euclidean":
            raise ValueError(
                f"metric={metric!r} is a distance between steps of an optimizer; use it with on='step' or "
                "on='both'."
            )
        if bound is not None and equality is not False:
            raise ValueError("bound and equality exclude each other: an equality has no side to stay on.")
        if bound is None and kappa != 1.0:
            raise ValueError("kappa is for a bound; without one, no loss may rise.")
        check_count(interval, "interval", 1)
        if rows_dtype is not None and not (
            isinstance(rows_dtype, torch.dtype) and rows_dtype.is_floating_point
        ):
            raise TypeError(f"rows_dtype must be a floating-point dtype of torch; found {rows_dtype!r}.")
        self.bound = None if bound is None else LossBound(bound, kappa)
        self.method, self.margin, self.penalty, self.equality = method, margin, penalty, equality
        self.on, self.metric, self.interval = on, metric, interval
        found = self._options().method
        if on != "gradient" and isinstance(found, GEM2017):
            raise ValueError(
                f"{found!r} is made for gradients, in their units; use on='gradient', or "
                "another method for steps."
            )
        self._vector = vector_of(parameters, group)
        self._matrix = ConstraintMatrix(self._vector, rows_dtype)
        self._gradient: Tensor | None = None  # allocated with the first projection
        self._unused = Unused(self)
        self.reset()

    def __repr__(self) -> str:
        sizes = f"{len(self._vector.parameters)} parameters, d={self._vector.d}, t={len(self._matrix)}"
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in OPTIONS)
        return f"GradientProjector({sizes}, {self._options().method!r}, {options})"

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
        """Whether the next `recall` computes constraints."""
        return self._calls % self.interval == 0

    @property
    def scale_dependent(self) -> bool:
        """Whether the projection of a scaled gradient is not the scaled projection."""
        options = self._options()
        return self.bound is not None or _has_units(options) or isinstance(options.method, GEM2017)

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
        self._note_rows()
        self._seconds += time.perf_counter() - start

    def recall(
        self,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        loss: Loss = model_loss,
        *,
        microbatch: int | None = None,
        scale: float = 1.0,
        names: Callable[[], Sequence[Any]] | None = None,
    ) -> bool:
        """Replace the constraints by the gradients of the mean loss on each of `batches`.

        The model computes in evaluation mode: dropout is off, and batch normalisation uses, and does not
        touch, its running statistics. ``.grad``, the modes of the modules and torch's random state are
        restored.

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
        scale : float, default 1
            Losses are multiplied by it and rows divided again, for backward passes in float16.
        names : callable, optional
            Returns what the rows are about, such as ``memory.names``: processes that disagree raise.

        Returns
        -------
        bool
            Whether constraints were computed: at the first call after `reset` and every `interval` calls.
        """
        if self._calls and self.on != "gradient" and not is_attached(self):
            raise ValueError(
                f"on={self.on!r} projects the steps of an optimizer, and there is none: call "
                "attach(optimizer) once, before the loop."
            )
        self._compared = hasattr(loss, "outputs")  # divergences from stored outputs are zero at first
        self._unused.warn()
        model, parallel = unwrapped(model)
        if parallel is not None and self._vector.topology.world == 1:
            self._vector.topology = Replicated(self._vector.device, parallel.process_group)
        due = self.due
        if due:
            start, facts = time.perf_counter(), self._facts() | {"option microbatch": microbatch}
            from_batches(
                self._matrix, model, batches, loss, facts, microbatch=microbatch, scale=scale, names=names
            )
            self._seconds += time.perf_counter() - start
        self._calls += 1  # a call that has failed is still due
        self._note_rows()
        return due

    @torch.compiler.disable
    def project_(
        self, learning_rate: float | None = None, moving: Sequence[bool] | None = None
    ) -> Projection:
        """Project the gradients of the parameters in place; does nothing without constraints.

        A parameter without a gradient counts as zero, and gets one, of zeros if no constraint is active,
        where a constraint depends on it: as with replay, it takes part in every step.

        Parameters
        ----------
        learning_rate : float, optional
            Needed with a `bound`, which is about steps. An attached optimizer gives its own.
        moving : sequence of bool, optional
            For each parameter, whether it takes part; by default all do. An attached optimizer gives those
            that it holds.

        Returns
        -------
        Projection
            Statistics, also kept as `last`.
        """
        if self.on == "step":
            raise ValueError("on='step' leaves the gradient alone; attach(optimizer) projects its steps.")
        start, sol = time.perf_counter(), None
        if len(self._matrix) and any(p.grad is not None for p in self._vector.parameters):
            self._vector.check()
            if self._gradient is None:
                self._gradient = self._vector.empty()
            g = self._vector.read_gradient(self._gradient)
            sol, changed = self._project("gradient", g, self._options(), learning_rate, moving=moving)
            wanted = self._matrix.reached
            if moving is not None:
                wanted = [a and b for a, b in zip(wanted, moving, strict=True)]
            self._vector.write_gradient(g, wanted, changed)
        return self._record(sol, start)

    def attach(self, optimizer: torch.optim.Optimizer) -> ProjectedOptimizer:
        """Project in every ``optimizer.step()`` from now on, and see what it applies.

        The gradient is projected before the step (or after each evaluation of a closure), the step itself
        right after it; `last` then has the cosine between each constraint and the applied step. Only what
        the optimizer holds is projected: where several share the parameters, attach to each. A parameter
        without gradient, or with a learning rate of zero, stays. The optimizer's state is not changed.

        With a `torch.amp.GradScaler`, ``scaler.step`` unscales first; with ``fused=True`` and a margin, a
        penalty or `GEM2017`, call ``scaler.unscale_(optimizer)`` yourself. A step that the scaler skips is
        left alone.

        Returns
        -------
        ProjectedOptimizer
            Call its ``remove()`` to detach.
        """
        return ProjectedOptimizer(self, step_of(self._vector, optimizer))

    def skip(self) -> Projection:
        """Record a step before which the gradient is not projected."""
        return self._record(None, time.perf_counter())

    def project_step(self, step: OptimizerStep, moving: Sequence[bool]) -> DualSolution:
        """Replace the step that was taken by its projection, on the columns of the moving parameters."""
        options = self._options()
        if self.on == "both":
            options = replace(options, margin=0.0)
        skipped = getattr(step.optimizer, "found_inf", None)
        if skipped is not None and _has_units(options):
            # A fused optimizer takes no step after an overflow, and the margin must not make one.
            options = replace(options, margin=options.margin * (skipped == 0))
        if _has_units(options):  # of gradients before clipping, as they are in Adam's metric
            rate = step.clipped * (step.learning_rate() if self.metric == "euclidean" else 1.0)
            penalty = None if options.penalty is None else options.penalty * rate
            options = replace(options, margin=options.margin * rate, penalty=penalty)
        unit = step.learning_rate() if self._compared and self.metric == "euclidean" else 1.0
        weight = step.weight(self.metric, moving, self._matrix.largest)
        v = step.taken()
        sol, changed = self._project("step", v, options, 1.0, unit, moving, weight)
        if changed:
            step.replace(v)
        return sol

    def follow(self, step: Tensor) -> Tensor:
        """Return the cosine of an applied step with each constraint, and follow the losses along it."""
        return self._matrix.follow(step)

    def check_processes(self) -> None:
        """Raise where several processes are initialised and nothing says how they train together."""
        check_alone(self._vector.topology)

    def reset(self) -> None:
        """Forget the constraints and the warm start, as at the boundary between two tasks."""
        self._matrix.clear()
        self._compared = False
        self._warm: dict[str, Tensor] = {}  # multipliers, by what was projected
        self._calls = 0
        self._unused.end(used=False)
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
        return {"constraints": rows, "warm": warm, "calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters.

        A ValueError tells of the state of something else, or of the projector of another model.
        """
        lacking = {"constraints", "warm", "calls"} - state.keys()
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not of a GradientProjector.")
        if state["constraints"] is None:
            self._matrix.clear()
        else:
            self._matrix.load_state_dict(state["constraints"])
        self._warm = {name: lam.to(self._vector.device, copy=True) for name, lam in state["warm"].items()}
        # Without rows they are due at the next call, whatever the interval of the saved projector was.
        self._calls = 0 if state["constraints"] is None else state["calls"]
        self.last = None

    def _options(self) -> Options:
        for name in ("margin", "penalty"):
            if not isinstance(value := getattr(self, name), Tensor | Real | None):
                raise TypeError(f"{name} must be a number or a tensor (t,); found {type(value).__name__}.")
        return check_options(self.method, margin=self.margin, penalty=self.penalty, equality=self.equality)

    def _project(
        self,
        name: str,
        v: Tensor,
        options: Options,
        rate: float | None,
        unit: float = 1.0,
        moving: Sequence[bool] | None = None,
        weight: Tensor | None = None,
    ) -> tuple[DualSolution, bool]:
        """Project a gradient or a step in place; `rate` and `unit` are those of `right_hand_side`."""
        compared = self._compared and options.equality is False
        compared = compared and "h" in getattr(options.method, "accepts", "h")
        h = right_hand_side(self._matrix, self.bound, rate, unit, compared)
        options = options if h is None else replace(options, h=h)
        start = self._warm.get(name)
        if start is not None and start.shape[-1] != len(self._matrix):
            start = None
        sol, changed = self._matrix.project(v, options, start, moving, weight)
        self._warm[name] = sol.multipliers
        return sol, changed

    def _facts(self) -> dict[str, Any]:
        """Return what all processes that train the model must have in common, none for a single one."""
        if self._vector.topology.world == 1:
            return {}
        given = {name: getattr(self, name) for name in OPTIONS} | {"rows_dtype": self._matrix.rows.dtype}
        options: dict[str, Any] = {
            name: value if isinstance(value, Tensor) else repr(value) for name, value in given.items()
        }
        options["method"] = getattr(self.method, "__name__", repr(self.method))  # the repr has an address
        named = {f"option {name}": value for name, value in options.items()}
        return named | self._vector.signature()

    def _note_rows(self) -> None:
        """Note that there are constraints to be used, if there are."""
        if len(self._matrix):
            self._unused.begin()

    def _record(self, sol: DualSolution | None, start: float) -> Projection:
        self._unused.end()
        seconds, self._seconds = self._seconds + time.perf_counter() - start, 0.0
        excess = None if self.bound is None else self.bound.excess(self._matrix.losses, self._matrix.bounds)
        self.last = Projection(len(self._matrix), sol, excess=excess, age=self._matrix.age, seconds=seconds)
        return self.last


def _has_units(options: Options) -> bool:
    """Return whether a margin or a penalty, which are in units of gradients, are given."""
    return isinstance(options.margin, Tensor) or bool(options.margin) or options.penalty is not None
