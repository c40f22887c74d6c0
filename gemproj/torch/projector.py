"""The projection inside a training loop: constraints, the gradient, the warm start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemproj._array import read_problem
from gemproj._dual import read_options, solve_problem
from gemproj._project import combine_problem
from gemproj._solution import DualSolution
from gemproj.methods import AnyMethod
from gemproj.torch.constraints import ConstraintRows


@dataclass(frozen=True, eq=False)
class Projection:
    """What one call of `GradientProjector.project_` did. On a device, reading a number waits for it.

    Attributes
    ----------
    constraints : int
        Number of constraints.
    solution : DualSolution or None
        Multipliers and certificates; None where there was nothing to project.
    """

    constraints: int
    solution: DualSolution | None

    @property
    def violated(self) -> int:
        """Number of constraints that the gradient violated."""
        return 0 if self.solution is None else int(self.solution.violated.sum())

    @property
    def active(self) -> int:
        """Number of constraints whose multiplier is above the margin: those that hold the gradient back."""
        return 0 if self.solution is None else int(self.solution.active.sum())

    @property
    def multipliers(self) -> torch.Tensor:
        """The multipliers, shape (t,), float64."""
        return torch.empty(0, dtype=torch.float64) if self.solution is None else self.solution.multipliers

    @property
    def cosine(self) -> float:
        """Cosine between the gradient before and after; 1 when nothing changed."""
        return 1.0 if self.solution is None else float(self.solution.cosine())


class GradientProjector:
    """Projects the ``.grad`` of parameters so that a step does not raise the loss of earlier tasks.

    Rows of the constraint matrix are written straight into one buffer of t * d numbers that is kept
    from step to step, and the multipliers of a step are the warm start of the next one until the number
    of constraints changes or `reset` is called, as at a task boundary.

    Parameters
    ----------
    parameters : iterable of torch.nn.Parameter
        Those that do not require a gradient are left out, duplicates too. All on one device.
    method, margin, penalty
        As in `gemproj.solve_dual`.

    Attributes
    ----------
    last : Projection or None
        Statistics of the last projection.

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
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        method: AnyMethod = "exact",
        *,
        margin: float = 0.0,
        penalty: float | None = None,
    ) -> None:
        self._rows = ConstraintRows(parameters)
        self._options = read_options(method, margin, penalty)
        self._multipliers: torch.Tensor | None = None
        self.last: Projection | None = None

    def __repr__(self) -> str:
        method, margin, penalty, *_ = self._options
        sizes = f"{len(self._rows.parameters)} parameters, d={self._rows.d}, t={len(self._rows)}"
        return f"GradientProjector({sizes}, {method!r}, margin={margin}, penalty={penalty})"

    @property
    def constraints(self) -> torch.Tensor:
        """The constraint matrix G, shape (t, d): a view, one row per loss given to `constrain`."""
        return self._rows.matrix

    def constrain(self, losses: Iterable[torch.Tensor]) -> None:
        """Replace the constraints: one row of G per loss, the gradient of that loss.

        Losses are taken one at a time, so a generator holds one graph in memory at once. The
        ``.grad`` of the parameters is not touched. Modes and random state of the model are the
        caller's: the forward passes that make the losses draw dropout masks as usual. If a loss
        cannot be computed there are no constraints, rather than some of them.

        Parameters
        ----------
        losses : iterable of scalar tensors
            The loss of each past task on its memory, each from a forward pass of its own.
        """
        self._rows.fill(losses)

    @torch.compiler.disable
    def project_(self) -> Projection:
        """Project the gradients of the parameters in place; does nothing without constraints.

        A parameter without a gradient counts as zero. It gets one if a constraint depends on it.

        Returns
        -------
        Projection
            Statistics, also kept as `last`.
        """
        t = len(self._rows)
        if t == 0 or all(p.grad is None for p in self._rows.parameters):
            self.last = Projection(t, None)
            return self.last
        if self._multipliers is not None and len(self._multipliers) != t:
            self._multipliers = None
        g = self._rows.gather()
        problem = read_problem(self._rows.matrix, g)
        sol = solve_problem(problem, self._options, self._multipliers)
        # Only where looking is free: a gradient that does not change need not be written.
        if not problem.host or bool(sol.multipliers.any()):
            self._rows.scatter(combine_problem(problem, sol.multipliers, g, [g]))
        sol = sol.to(problem.xp, problem.device)
        self._multipliers = sol.multipliers
        self.last = Projection(t, sol)
        return self.last

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Project before every ``optimizer.step()`` from now on.

        A closure, as in ``optimizer.step(closure)``, is followed by a projection every time the
        optimizer calls it. With a `torch.amp.GradScaler`, call ``scaler.unscale_(optimizer)`` before
        ``scaler.step``.

        Returns
        -------
        handle
            Call ``handle.remove()`` to detach.
        """

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            # `args` starts with the optimizer itself in some versions of torch.
            closure = next((a for a in [*args, *kwargs.values()] if callable(a)), None)
            if closure is None:
                self.project_()
                return None

            def projecting() -> Any:
                loss = closure()
                self.project_()
                return loss

            swap = {id(closure): projecting}
            return tuple(swap.get(id(a), a) for a in args), {k: swap.get(id(a), a) for k, a in kwargs.items()}

        return optimizer.register_step_pre_hook(before_step)

    def reset(self) -> None:
        """Forget the constraints and the warm start, as at the boundary between two tasks."""
        self._rows.clear()
        self._multipliers = None
        self.last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the constraints and the warm start."""
        multipliers = None if self._multipliers is None else self._multipliers.clone()
        return {"constraints": self._rows.state_dict(), "multipliers": multipliers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters."""
        self._rows.load_state_dict(state["constraints"])
        multipliers = state["multipliers"]
        self._multipliers = None if multipliers is None else multipliers.to(self.constraints.device)
        self.last = None
