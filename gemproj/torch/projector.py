"""The projection inside a training loop: constraints, the gradient, the applied step, the warm start."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gemproj._dual import Options, read_options
from gemproj.methods import GEM2017, AnyMethod
from gemproj.methods._method import check_count
from gemproj.torch.applied import AppliedStep, Metric, On
from gemproj.torch.attached import Attached
from gemproj.torch.batches import Batch, Loss
from gemproj.torch.cone import Cone
from gemproj.torch.distributed import sum_over
from gemproj.torch.layout import Layout
from gemproj.torch.one_pass import Choice
from gemproj.torch.projection import Projection
from gemproj.torch.recall import constrain, model_loss, recall


class GradientProjector:
    """Projects gradients, or the steps that an optimizer applies, so that no loss of earlier tasks rises.

    Rows of the constraint matrix are written straight into one buffer of t * d numbers that is kept
    from step to step, and the multipliers of a step are the warm start of the next one until the number
    of constraints changes or `reset` is called, as at a task boundary.

    Parameters
    ----------
    parameters : iterable of torch.nn.Parameter
        Those that do not require a gradient are left out, duplicates too. All on one device. Shards
        (`DTensor`, as FSDP2 makes them) are projected where they are: each process holds its part of G.
    method, margin, penalty
        As in `gemproj.solve_dual`. They are in units of gradients for a step, too.
    on : {"gradient", "update", "both"}, default "gradient"
        What is projected: the gradient before the optimizer sees it, as GEM does, which promises nothing
        for what momentum, Adam or weight decay make of it; the step that the optimizer applies; or first the
        gradient and then the step, where the margin counts for the gradient only. Other than the
        gradient needs `attach`.
    metric : {"euclidean", "adam"}, default "euclidean"
        The distance in which the projected step is closest to the optimizer's: Adam's own weighs
        each entry by ``(sqrt(v_hat) + eps) / lr``, after the step. Not for ``on="gradient"``.
    interval : int, default 1
        `recall` computes constraints at every so-manieth call; in between, those that stand are used.
    group : torch.distributed.ProcessGroup, optional
        Processes to train with. For replicated parameters (DistributedDataParallel): the rows are averaged
        over them; `recall` finds the group of a model that is wrapped. For shards: default, all.

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
    >>> projector.project_().violated, model.weight.grad.tolist()
    (1, [[0.0, -1.0, -1.0]])

    AdamW with weight decay, and a promise that is kept:

    >>> projector = GradientProjector(model.parameters(), on="both", metric="adam")
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> attached = projector.attach(optimizer)
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
        margin: float = 0.0,
        penalty: float | None = None,
        on: On = "gradient",
        metric: Metric = "euclidean",
        interval: int = 1,
        group: Any = None,
    ) -> None:
        for name, value, known in (("on", on, get_args(On)), ("metric", metric, get_args(Metric))):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; found {value!r}.")
        if on == "gradient" and metric != "euclidean":
            raise ValueError(
                f"metric={metric!r} is a distance between steps of an optimizer; use it with on='update' or "
                "on='both'."
            )
        check_count(interval, "interval", 1)
        self._layout = Layout(parameters, group)
        self._cone = Cone(self._layout)
        self._options = read_options(method, margin, penalty)
        self._compares_losses = hasattr(self._options.method, "reference_loss")  # as MEGA does
        if on != "gradient" and (self._compares_losses or isinstance(self._options.method, GEM2017)):
            raise ValueError(
                f"{self._options.method!r} is made for gradients, in their units; use on='gradient', or "
                "another method for steps."
            )
        self.on, self.metric, self.interval = on, metric, interval
        self.last: Projection | None = None
        self._choice: Choice | None = None
        self._attached: WeakSet[Attached] = WeakSet()  # each lives as long as its optimizer
        self.reset()

    def __repr__(self) -> str:
        method, margin, penalty, *_ = self._options
        sizes = f"{len(self._layout.parameters)} parameters, d={self._layout.d}, t={len(self._cone.rows)}"
        how = f"on={self.on!r}, metric={self.metric!r}, interval={self.interval}"
        return f"GradientProjector({sizes}, {method!r}, margin={margin}, penalty={penalty}, {how})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, too: it is attached to nothing."""
        return {name: value for name, value in self.__dict__.items() if name != "_attached"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _attached=WeakSet())

    @property
    def constraints(self) -> Tensor:
        """The constraint matrix G, shape (t, d): a view, one row per past task, the columns that are here."""
        return self._cone.rows.matrix

    def constrain(self, losses: Iterable[Tensor]) -> None:
        """Replace the constraints: one row of G per loss, the gradient of that loss.

        Losses are taken one at a time, so a generator holds one graph in memory at once. The
        ``.grad`` of the parameters is not touched. Modes and random state of the model are the
        caller's: the forward passes that make the losses draw dropout masks as usual; `recall` sees to
        that. If a loss cannot be computed there are no constraints, rather than some of them.

        With a `group`, every process brings its own losses of the same tasks; rows are their averages. With
        shards, `losses` must be a list, so that a disagreement on its length is found before it can hang.

        Parameters
        ----------
        losses : iterable of scalar tensors
            The loss of each past task on its memory, each from a forward pass of its own.
        """
        start = time.perf_counter()
        self._calls = 0
        constrain(self._cone.rows, losses)
        self._seconds += time.perf_counter() - start

    def recall(
        self,
        model: torch.nn.Module,
        batches: Iterable[Batch],
        loss: Loss = model_loss,
        *,
        microbatch: int | None = None,
        training: bool = False,
        one_pass: bool | Literal["auto"] | None = None,
    ) -> bool:
        """Replace the constraints by the gradients of the mean loss on each of `batches`.

        What the model learns from is not disturbed: ``.grad``, the modes of its modules and torch's random
        state are put back as they were. Without `training`, dropout is off and batch normalisation uses,
        and does not touch, its running statistics; with it, masks are drawn and these statistics move.

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
            Most examples in one forward pass; the gradient is that of the mean over all of them.
        training : bool, default False
            Whether to compute the losses in the mode in which the model trains.
        one_pass : bool or "auto", optional
            False: one forward and backward pass per task. True: one for all, which needs examples that
            the model treats independently. "auto": the faster of the two, timed on the first calls, once
            they have been found equal; times decide, so rounding can differ from run to run. By default
            "auto" on accelerators and False on the CPU, where runs repeat bit for bit. Shards, and more
            examples than `microbatch`, always take one per task.

        Returns
        -------
        bool
            Whether constraints were computed: at the first call after `reset` and every `interval` calls.
        """
        if self._calls and self.on != "gradient" and not self._attached:
            raise ValueError(
                f"on={self.on!r} projects the steps of an optimizer, and there is none: call "
                "attach(optimizer) once, before the loop."
            )
        if isinstance(model, DistributedDataParallel):
            if not self._layout.several:
                self._layout.join(model.process_group)
            # Its own forward pass would expect a backward pass that reduces .grad.
            model = model.module
        due = self._calls % self.interval == 0
        if due:
            start = time.perf_counter()
            recall(
                self._cone.rows,
                model,
                batches,
                loss,
                microbatch=microbatch,
                training=training,
                choice=self._chosen(one_pass),
            )
            self._seconds += time.perf_counter() - start
        self._calls += 1  # a call that has failed is still due
        return due

    @torch.compiler.disable
    def project_(self, loss: Tensor | float | None = None) -> Projection:
        """Project the gradients of the parameters in place; does nothing without constraints.

        A parameter without a gradient counts as zero. It gets one if a constraint depends on it.

        Parameters
        ----------
        loss : scalar tensor or float, optional
            The loss that the gradients belong to, for rules that compare it with those of past tasks
            (`gemproj.MEGA1`, `gemproj.MEGA2`). Others ignore it.

        Returns
        -------
        Projection
            Statistics, also kept as `last`.
        """
        if self.on == "update":
            raise ValueError("on='update' leaves the gradient alone; attach(optimizer) projects its steps.")
        start, sol = time.perf_counter(), None
        if len(self._cone.rows) and any(p.grad is not None for p in self._layout.parameters):
            g = self._cone.rows.gather()
            sol, changed = self._cone.project("gradient", g, self._informed(loss))
            if changed:
                self._cone.rows.scatter(g)
        self.last = Projection(len(self._cone.rows), sol, seconds=self._since(start))
        return self.last

    def attach(self, optimizer: torch.optim.Optimizer) -> Attached:
        """Project in every ``optimizer.step()`` from now on, and see what it applies.

        The gradient is projected before the step (or after each evaluation of a closure, as in
        ``optimizer.step(closure)``), the step itself right after it. Either way `last` then tells the cosine
        between each constraint and what was applied. Steps move only what the optimizer
        moves: a parameter without gradient, or with a learning rate of zero, stays. The
        optimizer's state is its own: moments are those of the gradients it was given.

        With a `torch.amp.GradScaler`, ``scaler.step`` unscales first; with ``fused=True`` and a margin, a
        penalty or `GEM2017`, call ``scaler.unscale_(optimizer)`` yourself. A step that the scaler skips is
        left alone.

        Returns
        -------
        Attached
            Call its ``remove()`` to detach.

        Raises
        ------
        ValueError
            For an optimizer without any of the parameters, one whose steps cannot be projected, or one to
            which this projector is attached already: it would project twice.
        """
        if any(other.holds(optimizer) for other in self._attached):
            raise ValueError(
                "This projector is attached to this optimizer already; attach once, before the loop, or call "
                "remove() on what attach returned."
            )
        step = AppliedStep(self._layout, optimizer)
        attached = Attached(
            self._cone, step, self._options, self.on, self.metric, self._before_step, self._note
        )
        self._attached.add(attached)
        return attached

    def reset(self) -> None:
        """Forget the constraints and the warm start, as at the boundary between two tasks."""
        self._cone.reset()
        self._calls = 0
        self._seconds = 0.0
        self.last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the constraints (of shards, the columns that are here), the warm start and the interval."""
        return self._cone.state_dict() | {"calls": self._calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters.

        Raises
        ------
        ValueError
            For the state of something else, or of the projector of another model.
        """
        lacking = {"constraints", "warm", "calls"} - state.keys()
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not of a GradientProjector.")
        self._cone.load_state_dict(state)
        self._calls = state["calls"]
        self.last = None

    def _chosen(self, one_pass: bool | Literal["auto"] | None) -> Choice:
        if one_pass is None:
            one_pass = self._layout.device.type != "cpu" and "auto"
        if self._compares_losses:
            one_pass = False  # the losses themselves are needed, task by task
        if self._choice is None or self._choice.one_pass != one_pass:
            self._choice = Choice(one_pass)
        return self._choice

    def _informed(self, loss: Tensor | float | None) -> Options:
        """Tell the method the losses, if it asks for them."""
        method, losses = self._options.method, self._cone.rows.losses
        if not self._compares_losses or loss is None or not losses:
            return self._options
        here = torch.as_tensor(loss, device=self._layout.device).detach().to(losses[0].dtype)
        if self._layout.several:
            here = sum_over(here.clone(), self._layout.group) / dist.get_world_size(self._layout.group)
        told = replace(method, loss=here, reference_loss=torch.stack(losses).mean())
        return self._options._replace(method=told)

    def _before_step(self, loss: Any = None, *, skipped: bool = False) -> Projection:
        """Do with the gradient what is done before a step."""
        if self.on != "update" and not skipped:
            return self.project_(loss if isinstance(loss, Tensor | float) else None)
        self.last = Projection(len(self._cone.rows), None, seconds=self._since(time.perf_counter()))
        return self.last

    def _note(self, done: Projection) -> None:
        self.last = done

    def _since(self, start: float) -> float:
        """Return the seconds since `start`, with those that constraints took."""
        spent, self._seconds = self._seconds + time.perf_counter() - start, 0.0
        return spent
