"""The projection inside a training loop: constraint rows, the gradient, the warm start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemproj._array import read_problem
from gemproj._dual import DualSolution, read_options, solve_gram
from gemproj._gram import problem_gram
from gemproj._project import combine_problem
from gemproj.methods import AnyMethod


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
        if isinstance(parameters, torch.nn.Module):
            raise TypeError(
                "parameters must be an iterable of tensors; found a module, pass module.parameters()."
            )
        listed = list(parameters)
        for p in listed:
            if not isinstance(p, torch.Tensor) or p.is_complex():
                found = p.dtype if isinstance(p, torch.Tensor) else type(p).__name__
                raise TypeError(f"parameters must be an iterable of real tensors; found {found}.")
        unique = {id(p): p for p in listed if p.requires_grad}
        self._parameters = list(unique.values())
        if not self._parameters:
            raise ValueError("parameters holds none that requires a gradient; nothing could be projected.")
        devices = {p.device for p in self._parameters}
        if len(devices) > 1:
            raise ValueError(f"parameters must be on one device; found {', '.join(map(str, devices))}.")
        self._options = read_options(method, margin, penalty, None)
        self._sizes = [p.numel() for p in self._parameters]
        dtype = self._parameters[0].dtype
        for p in self._parameters:
            dtype = torch.promote_types(dtype, p.dtype)
        self._rows = torch.empty((0, sum(self._sizes)), dtype=dtype, device=self._parameters[0].device)
        self._gradient = self._rows.new_empty(0)
        self._count = 0
        self._reached = [False] * len(self._parameters)
        self._multipliers: torch.Tensor | None = None
        self.last: Projection | None = None

    def __repr__(self) -> str:
        method, margin, penalty, _ = self._options
        sizes = f"{len(self._sizes)} parameters, d={sum(self._sizes)}, t={self._count}"
        return f"GradientProjector({sizes}, {method!r}, margin={margin}, penalty={penalty})"

    @property
    def constraints(self) -> torch.Tensor:
        """The constraint matrix G, shape (t, d): a view, one row per loss given to `constrain`."""
        return self._rows[: self._count]

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
        self._count, k = 0, -1
        reached = [False] * len(self._parameters)
        for k, loss in enumerate(losses):
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                found = (
                    f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                    if isinstance(loss, torch.Tensor)
                    else type(loss).__name__
                )
                raise ValueError(f"losses must be scalars that require a gradient; loss {k} is {found}.")
            gradients = torch.autograd.grad(loss.reshape(()), self._parameters, allow_unused=True)
            self._reserve(k + 1, keep=k)
            for j, (part, gradient) in enumerate(
                zip(self._rows[k].split(self._sizes), gradients, strict=True)
            ):
                if gradient is None:
                    part.zero_()
                else:
                    part.copy_(_dense(gradient).reshape(-1))
                    reached[j] = True
        self._count, self._reached = k + 1, reached

    def project_(self) -> Projection:
        """Project the gradients of the parameters in place; does nothing without constraints.

        A parameter without a gradient counts as zero. It gets one if a constraint depends on it.

        Returns
        -------
        Projection
            Statistics, also kept as `last`.
        """
        if self._count == 0 or all(p.grad is None for p in self._parameters):
            self.last = Projection(self._count, None)
            return self.last
        g = self._gather()
        if self._multipliers is not None and len(self._multipliers) != self._count:
            self._multipliers = None
        problem = read_problem(self.constraints, g)
        gram, rounding = problem_gram(problem)
        sol = solve_gram(gram, rounding, *self._options, warm_start=self._multipliers)
        # Only where looking is free: a gradient that does not change need not be written.
        if not problem.host or bool(sol.multipliers.any()):
            self._scatter(combine_problem(problem, sol.multipliers, g, [g]))
        self._multipliers = sol.multipliers
        self.last = Projection(self._count, sol)
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
        self._count = 0
        self._multipliers = None
        self.last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the constraints and the warm start."""
        multipliers = None if self._multipliers is None else self._multipliers.clone()
        return {
            "constraints": self.constraints.clone(),
            "reached": list(self._reached),
            "multipliers": multipliers,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters."""
        rows = state["constraints"]
        if rows.ndim != 2 or rows.shape[1] != sum(self._sizes):
            raise ValueError(
                f"state holds constraints of shape {tuple(rows.shape)}, but the parameters have "
                f"{sum(self._sizes)} entries: it belongs to another model."
            )
        if len(state["reached"]) != len(self._parameters):
            found = len(state["reached"])
            raise ValueError(f"state belongs to {found} parameters; there are {len(self._parameters)} here.")
        self._reserve(len(rows), keep=0)
        self._rows[: len(rows)] = rows
        self._count = len(rows)
        self._reached = list(state["reached"])
        multipliers = state["multipliers"]
        self._multipliers = None if multipliers is None else multipliers.to(self._rows.device)
        self.last = None

    def _reserve(self, rows: int, keep: int) -> None:
        """Make room for `rows` constraints, of which the first `keep` stand already."""
        if rows > len(self._rows):
            grown = self._rows.new_empty((rows, self._rows.shape[1]))
            grown[:keep] = self._rows[:keep]
            self._rows = grown

    def _gather(self) -> torch.Tensor:
        """Return the gradients of all parameters as one vector, in a buffer that is kept."""
        parts = [
            p.new_zeros(n) if p.grad is None else _dense(p.grad).reshape(-1)
            for p, n in zip(self._parameters, self._sizes, strict=True)
        ]
        if not len(self._gradient):
            self._gradient = self._rows.new_empty(self._rows.shape[1])
        return torch.cat(parts, out=self._gradient)

    def _scatter(self, x: torch.Tensor) -> None:
        """Write a vector back to the gradients, where there are any or a constraint asks for one."""
        parts = [part.view_as(p) for part, p in zip(x.split(self._sizes), self._parameters, strict=True)]
        for part, p, reached in zip(parts, self._parameters, self._reached, strict=True):
            if p.grad is None and reached:
                p.grad = part.to(p.dtype, copy=True)
        pairs = [
            (p.grad, part) for part, p in zip(parts, self._parameters, strict=True) if p.grad is not None
        ]
        torch._foreach_copy_([to for to, _ in pairs], [part for _, part in pairs])


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout != torch.strided:
        raise TypeError(
            f"Gradients must be dense; found layout {gradient.layout}. Use sparse=False in the embedding."
        )
    return gradient.detach()
