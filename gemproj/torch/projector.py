"""The projector of a training loop: its options, and the projection of gradients and steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from gemproj._options import Options, check_options
from gemproj._solution import DualSolution
from gemproj.methods import GEM2017, AnyMethod
from gemproj.torch.bound import LossBound
from gemproj.torch.constraint_gradients import Refresh
from gemproj.torch.groups import Groups, members, project_groups
from gemproj.torch.optimizer_step import Metric, On, OptimizerStep, ProjectedOptimizer
from gemproj.torch.recall import OPTIONS, RecalledConstraints
from gemproj.torch.stats import Projection
from gemproj.torch.zero import step_of


class GradientProjector(RecalledConstraints):
    """Projects gradients, or the steps that an optimizer applies, so that no loss of earlier tasks rises.

    The constraint matrix is written into one buffer of t * d numbers that is kept from step to step. The
    multipliers of a step are the warm start of the next one, until the number of constraints changes or
    `reset` is called, as at a task boundary.

    Parameters
    ----------
    parameters : iterable of torch.nn.Parameter, or of pairs of name and parameter
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
    room : bool, default True
        Whether losses below their bound may rise; otherwise no loss may rise, as without a bound.
    smoothing : float, default 0
        `recall` sets rows to ``smoothing * old + (1 - smoothing) * gradient``, for rows from few examples.
    rows_dtype : torch.dtype, optional
        Of the rows, by default that of the parameters. ``torch.bfloat16`` takes half the memory of float32,
        and promises what the rounded rows say: cosines are off by up to 0.002.
    rows_device : torch.device or str, optional
        Where rows are kept, by default where the parameters are. "cpu" takes no memory of an accelerator but
        a tile; the rows are copied there twice for each projection, and once to follow a step.
    groups : {"tensor", "module"} or callable, optional
        A cone for each parameter, for the parameters of each module, or for those whose names
        ``groups(name)`` maps to one key: ``G_l x_l >= 0`` on the columns of each. It implies
        ``G x >= 0`` and takes more away. Needs `parameters` with names, but for "tensor".
    gate : bool, default False
        Groups act only where the whole gradient, or step, violates a constraint.
    metric : {"euclidean", "adam"}, default "euclidean"
        The distance in which the projected step is closest to the optimizer's: Adam's own weighs each
        entry by ``(sqrt(v_hat) + eps) / lr``, after the step, where v_hat is at least the largest square of
        the entry in the constraints. Not for ``on="gradient"``.
    interval : int, default 1
        `recall` refreshes the constraints on every `interval`-th call and reuses them in between. Every
        step is projected.
    refresh : {"all", "cyclic", "rising"}, default "all"
        Which rows `recall` computes anew where none came or went: all; one, in turn, which costs one
        backward pass; or those whose losses have risen since the last call, with a `bound` only above it.
        This costs a forward pass on all batches, waits for a device, and needs the same examples each time.
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
        parameters: Iterable[torch.nn.Parameter | tuple[str, torch.nn.Parameter]],
        method: AnyMethod = "exact",
        *,
        margin: float | Tensor = 0.0,
        penalty: float | Tensor | None = None,
        equality: bool | Tensor = False,
        bound: float | None = None,
        kappa: float = 1.0,
        room: bool = True,
        smoothing: float = 0.0,
        rows_dtype: torch.dtype | None = None,
        rows_device: torch.device | str | None = None,
        groups: Groups | None = None,
        gate: bool = False,
        on: On = "gradient",
        metric: Metric = "euclidean",
        interval: int = 1,
        refresh: Refresh = "all",
        group: Any = None,
    ) -> None:
        for name, value, kind in (("on", on, On), ("metric", metric, Metric), ("refresh", refresh, Refresh)):
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
        if bound is not None and groups is not None:
            raise ValueError("bound and groups exclude each other: a loss has no bound for each group.")
        if bound is None and (kappa != 1.0 or room is not True):
            raise ValueError("kappa and room are for a bound; without one, no loss may rise.")
        if gate and groups is None:
            raise ValueError("gate is for groups; without them, nothing happens where nothing is violated.")
        super().__init__(parameters, group, rows_dtype, rows_device, smoothing, interval)
        self.bound = None if bound is None else LossBound(bound, kappa, room)
        self.method, self.margin, self.penalty, self.equality = method, margin, penalty, equality
        self.on, self.metric, self.refresh = on, metric, refresh
        found = self._options().method
        if on != "gradient" and isinstance(found, GEM2017):
            raise ValueError(
                f"{found!r} is made for gradients, in their units; use on='gradient', or "
                "another method for steps."
            )
        self._groups = None if groups is None else members(self._vector, groups)
        self._gate = gate
        self._gradient: Tensor | None = None  # allocated with the first projection

    def __repr__(self) -> str:
        sizes = f"{len(self._vector.parameters)} parameters, d={self._vector.d}, t={len(self._matrix)}"
        options = ", ".join(f"{name}={getattr(self, name)!r}" for name in OPTIONS)
        return f"GradientProjector({sizes}, {self._options().method!r}, {options})"

    @property
    def scale_dependent(self) -> bool:
        """Whether the projection of a scaled gradient is not the scaled projection."""
        options = self._options()
        return self.bound is not None or _has_units(options) or isinstance(options.method, GEM2017)

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
            options = self._demanding(self._options(), learning_rate)
            sol, changed = self._project("gradient", g, options, moving)
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
        own = self._compared and self.metric == "euclidean"
        options = self._demanding(options, 1.0, step.learning_rate() if own else 1.0)
        weight = step.weight(self.metric, moving, self._matrix.largest)
        v = step.taken()
        sol, changed = self._project("step", v, options, moving, weight)
        if changed:
            step.replace(v)
        return sol

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
        moving: Sequence[bool] | None = None,
        weight: Tensor | None = None,
    ) -> tuple[DualSolution, bool]:
        start = self._warm.get(name)
        if start is not None and start.shape[-1] != len(self._matrix):
            start = None
        if self._groups is None:
            sol, changed = self._matrix.project(v, options, start, moving, weight)
        else:
            sol, changed = project_groups(
                self._matrix, v, options, self._groups, self._gate, start, moving, weight
            )
        self._warm[name] = sol.multipliers
        return sol, changed


def _has_units(options: Options) -> bool:
    """Return whether a margin or a penalty, which are in units of gradients, are given."""
    return isinstance(options.margin, Tensor) or bool(options.margin) or options.penalty is not None
