"""The projection inside a training loop: constraint rows, the gradient, the warm start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gemproj._array import on_host
from gemproj._dual import DualSolution, read_options, solve_dual
from gemproj._project import combine
from gemproj.methods import AnyMethod


@dataclass(frozen=True)
class Projection:
    """What one call of `GradientProjector.project_` did. On a device, reading a number waits for it.

    Attributes
    ----------
    constraints : int
        Number of constraints.
    solution : DualSolution or None
        Multipliers and certificates; None without constraints.
    """

    constraints: int
    solution: DualSolution | None

    @property
    def violated(self) -> int:
        """Number of constraints that the gradient violated."""
        return 0 if self.solution is None else int(self.solution.violated.sum())

    @property
    def active(self) -> int:
        """Number of constraints with a positive multiplier: those that changed the gradient."""
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

    Rows of the constraint matrix are written straight into one preallocated buffer of
    t * d numbers, and the multipliers of a step are the warm start of the next one until the number
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
        unique = {id(p): p for p in parameters if p.requires_grad}
        self._parameters = list(unique.values())
        if not self._parameters:
            raise ValueError("parameters holds none that requires a gradient; nothing could be projected.")
        devices = {p.device for p in self._parameters}
        if len(devices) > 1:
            raise ValueError(f"parameters must be on one device; found {', '.join(map(str, devices))}.")
        read_options(method, margin, penalty, None)
        self._options: dict[str, Any] = {"method": method, "margin": margin, "penalty": penalty}
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
        sizes = f"{len(self._sizes)} parameters, d={sum(self._sizes)}, t={self._count}"
        return (
            f"GradientProjector({sizes}, " + ", ".join(f"{k}={v!r}" for k, v in self._options.items()) + ")"
        )

    @property
    def constraints(self) -> torch.Tensor:
        """The constraint matrix G, shape (t, d): a view, one row per loss given to `constrain`."""
        return self._rows[: self._count]

    def constrain(self, losses: Iterable[torch.Tensor]) -> None:
        """Replace the constraints: one row of G per loss, the gradient of that loss.

        Losses are taken one at a time, so a generator holds one graph in memory at once. The
        ``.grad`` of the parameters is not touched. Modes and random state of the model are the
        caller's: the forward passes that make the losses draw dropout masks as usual.

        Parameters
        ----------
        losses : iterable of scalar tensors
            The loss of each past task on its memory.
        """
        self._count = 0
        self._reached = [False] * len(self._parameters)
        for k, loss in enumerate(losses):
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                found = (
                    f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                    if isinstance(loss, torch.Tensor)
                    else type(loss).__name__
                )
                raise ValueError(f"losses must be scalars that require a gradient; loss {k} is {found}.")
            gradients = torch.autograd.grad(loss.reshape(()), self._parameters, allow_unused=True)
            self._reserve(k + 1)
            for j, (part, gradient) in enumerate(
                zip(self._rows[k].split(self._sizes), gradients, strict=True)
            ):
                if gradient is None:
                    part.zero_()
                else:
                    part.copy_(_dense(gradient).reshape(-1))
                    self._reached[j] = True
            self._count = k + 1

    def project_(self) -> Projection:
        """Project the gradients of the parameters in place; does nothing without constraints.

        A parameter without a gradient counts as zero. It gets one if a constraint depends on it.

        Returns
        -------
        Projection
            Statistics, also kept as `last`.
        """
        if self._count == 0 or all(p.grad is None for p in self._parameters):
            self.last = Projection(0, None)
            return self.last
        g = self._gather()
        if self._multipliers is not None and len(self._multipliers) != self._count:
            self._multipliers = None
        sol = solve_dual(self.constraints, g, warm_start=self._multipliers, **self._options)
        # Only where looking is free: a gradient that does not change need not be written.
        if not on_host(g.device) or bool(sol.multipliers.any()):
            combine(self.constraints, g, sol.multipliers, out=g)
            self._scatter(g)
        self._multipliers = sol.multipliers
        self.last = Projection(self._count, sol)
        return self.last

    def attach(self, optimizer: torch.optim.Optimizer) -> Any:
        """Project before every ``optimizer.step()`` from now on.

        With a `torch.amp.GradScaler`, call ``scaler.unscale_(optimizer)`` before ``scaler.step``.

        Returns
        -------
        handle
            Call ``handle.remove()`` to detach.
        """
        return optimizer.register_step_pre_hook(lambda *_: (self.project_(), None)[1])

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
        self._reserve(len(rows))
        self._rows[: len(rows)] = rows
        self._count = len(rows)
        self._reached = list(state["reached"])
        multipliers = state["multipliers"]
        self._multipliers = None if multipliers is None else multipliers.to(self._rows.device)

    def _reserve(self, rows: int) -> None:
        """Make room for `rows` constraints; the buffer grows by doubling and is kept."""
        if rows > len(self._rows):
            grown = self._rows.new_empty((max(rows, 2 * len(self._rows)), self._rows.shape[1]))
            grown[: self._count] = self.constraints
            self._rows = grown

    def _gather(self) -> torch.Tensor:
        if not len(self._gradient):
            self._gradient = self._rows.new_empty(self._rows.shape[1])
        for part, p in zip(self._gradient.split(self._sizes), self._parameters, strict=True):
            if p.grad is None:
                part.zero_()
            else:
                part.copy_(_dense(p.grad).reshape(-1))
        return self._gradient

    def _scatter(self, x: torch.Tensor) -> None:
        for part, p, reached in zip(x.split(self._sizes), self._parameters, self._reached, strict=True):
            if p.grad is not None:
                p.grad.copy_(part.view_as(p))
            elif reached:
                p.grad = part.view_as(p).to(p.dtype, copy=True)


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout != torch.strided:
        raise TypeError(
            f"Gradients must be dense; found layout {gradient.layout}. Use sparse=False in the embedding."
        )
    return gradient.detach()
