"""Constraint rows: gradients of past tasks, written straight into one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemproj._array import wide_dtype
from gemproj.torch.distributed import sum_over
from gemproj.torch.layout import Layout, like, local


class ConstraintRows:
    """The constraint matrix of a list of parameters, in one buffer that is kept from step to step.

    Attributes
    ----------
    layout : Layout
    reached : list of bool
        For each parameter, whether any row depends on it.
    reaching : list of bool
        The same for rows that are being written.
    losses : list of Tensor
        The value of the loss behind each row, if known.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._buffer = layout.empty(0)
        self._squares: Tensor | None = None
        self._gradient = layout.empty()[:0]
        self.clear()

    def __len__(self) -> int:
        return self._count

    @property
    def matrix(self) -> Tensor:
        """The rows that are in use, shape (t, d): a view."""
        return self._buffer[: self._count]

    @property
    def squares(self) -> Tensor:
        """The sum of squares of each row over the columns that count here, shape (t,), float64."""
        if self._squares is None:
            wide = wide_dtype(torch, self.layout.device)
            parts = [self.matrix[:, at] for at in self.layout.counted]
            norms = [torch.linalg.vector_norm(part, dim=1, dtype=wide) for part in parts]
            self._squares = torch.stack(norms).square().sum(0)
        return self._squares

    def clear(self) -> None:
        """Drop all rows; the buffer is kept."""
        self._count = 0
        self._squares = None
        self.reached = [False] * len(self.layout.parameters)
        self.losses: list[Tensor] = []

    def fill(self, losses: Iterable[Tensor]) -> None:
        """Write the gradient of each loss into a row; after an error there are no rows."""
        self.close(self.write(losses), self.reaching)

    def write(self, losses: Iterable[Tensor]) -> int:
        """Write the gradient of each loss; return how many there are, for `close`."""
        self.open(0)
        k = -1
        for k, loss in enumerate(losses):
            self._reserve(k + 1, keep=k)
            self.add(k, loss)
        return k + 1

    def open(self, rows: int) -> Tensor:
        """Make room for so many rows, shape (rows, d), of which none is in use before `close`."""
        self.clear()
        frozen = sum(not p.requires_grad for p in self.layout.parameters)
        if frozen:
            raise ValueError(
                f"{frozen} of the {len(self.layout.parameters)} parameters of this projector no longer "
                "require a gradient. Make a new projector after freezing parameters or adding adapters."
            )
        self._reserve(rows, keep=0)
        self.reaching = list(self.reached)
        return self._buffer[:rows]

    def add(self, k: int, loss: Tensor, weight: float = 1.0) -> None:
        """Add the gradient of ``weight * loss`` to row k."""
        check_loss(k, loss)
        loss = loss.reshape(()) if weight == 1.0 else loss.reshape(()) * weight
        first = len(self.losses) == k
        gradients = self._gradients(loss)
        for j, part in enumerate(self.layout.split(self._buffer[k])):
            gradient, gradients[j] = gradients[j], None  # freed as soon as it is written
            if gradient is None:
                if first:
                    part.zero_()
                continue
            gradient = local(self.layout.placed(j, gradient))
            self.reaching[j] = True
            part.copy_(gradient) if first else part.add_(gradient)
        if first:
            self.losses.append(loss.detach())
        else:
            self.losses[k] = self.losses[k] + loss.detach()

    def skip(self, k: int) -> None:
        """Leave row k zero."""
        self._buffer[k].zero_()
        self.losses.append(self._buffer.new_zeros(()))

    def close(self, rows: int, reached: list[bool]) -> None:
        """Declare so many rows complete, and which parameters they reach."""
        self._count, self.reached = rows, reached

    def sum_over(self, group: Any, scale: float = 1.0) -> None:
        """Add up the rows of all processes, each of which must have the same number of them."""
        self._squares = None
        sum_over(self.matrix.mul_(scale) if scale != 1.0 else self.matrix, group)
        # One pass for all tasks, which some processes may have taken, tells no loss of each.
        flags = [*self.reached, bool(self.losses)]
        reached = torch.tensor(flags, dtype=torch.int32, device=self.layout.device)
        *counts, known = sum_over(reached, group).tolist()
        self.reached = [n > 0 for n in counts]
        if known < dist.get_world_size(group):
            self.losses = []
        self.sum_losses(group, scale)

    def sum_losses(self, group: Any, scale: float) -> None:
        """Add up the losses of all processes, all of which know them or none, in one dtype."""
        if self.losses:
            wide = wide_dtype(torch, self.layout.device)
            losses = torch.stack([loss.to(wide) for loss in self.losses])
            self.losses = list((sum_over(losses, group) * scale).unbind())

    def gather(self) -> Tensor:
        """Return the ``.grad`` of all parameters as one vector, in a buffer that is kept; none is zero."""
        if not len(self._gradient):
            self._gradient = self.layout.empty()
        parts = []
        for j, (p, n) in enumerate(zip(self.layout.parameters, self.layout.sizes, strict=True)):
            if p.grad is None:
                parts.append(self._gradient.new_zeros(n))
                continue
            placed = self.layout.placed(j, p.grad)
            if placed is not p.grad:
                p.grad = placed
            parts.append(local(placed).reshape(-1))
        return torch.cat(parts, out=self._gradient)

    def scatter(self, x: Tensor) -> None:
        """Write a vector to the ``.grad`` of the parameters that have one or that a row depends on."""
        parts = self.layout.split(x)
        for p, part, reached in zip(self.layout.parameters, parts, self.reached, strict=True):
            if p.grad is not None:
                local(p.grad).copy_(part)
            elif reached:
                p.grad = like(p, part)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the rows and of the losses behind them, and what the rows reach."""
        losses = [loss.clone() for loss in self.losses]
        return {"rows": self.matrix.clone(), "reached": list(self.reached), "losses": losses}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters."""
        rows, reached, here = state["rows"], state["reached"], self.layout
        if rows.ndim != 2 or rows.shape[1] != here.d or len(reached) != len(here.parameters):
            raise ValueError(
                f"state holds constraints of shape {tuple(rows.shape)} on {len(reached)} parameters, but "
                f"there are {len(here.parameters)} of {here.d} entries here: it belongs to another model."
            )
        self.open(len(rows))
        self._buffer[: len(rows)] = rows
        self.losses = [loss.to(here.device, copy=True) for loss in state["losses"]]
        self.close(len(rows), list(reached))

    def _gradients(self, loss: Tensor) -> list[Tensor | None]:
        parameters = self.layout.parameters
        if not self.layout.sharded:
            gradients: list[Tensor | None] = list(torch.autograd.grad(loss, parameters, allow_unused=True))
            if any(g is None for g in gradients):
                _refuse_reentrant(loss)
            return gradients
        # FSDP computes with tensors that it gathers, and writes the gradients of shards to .grad itself.
        kept = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            loss.backward()
            found = [p.grad for p in parameters]
        finally:
            for p, gradient in zip(parameters, kept, strict=True):
                p.grad = gradient
        if all(gradient is None for gradient in found):
            raise RuntimeError(
                "The loss of a past task left no gradient on any parameter. If the model accumulates without "
                "synchronising (set_requires_gradient_sync(False)), switch that on for the past tasks."
            )
        return found

    def _reserve(self, rows: int, keep: int) -> None:
        if rows > len(self._buffer):
            grown = self.layout.empty(rows)
            grown[:keep] = self._buffer[:keep]
            self._buffer = grown


def _refuse_reentrant(loss: Tensor) -> None:
    """Raise if parameters may be hidden in checkpoints, through which only ``backward()`` finds them."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            if node.name() == "CheckpointFunctionBackward":
                raise RuntimeError(
                    "Gradients of past tasks cannot be computed through checkpoints with use_reentrant=True; "
                    "checkpoint with use_reentrant=False, or compute these losses without checkpoints."
                )
            seen.add(node)
            left.extend(following for following, _ in node.next_functions)


def check_loss(k: int, loss: Any) -> None:
    """Raise for what is not a scalar that has a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = type(loss).__name__
        if isinstance(loss, Tensor):
            found = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ValueError(f"losses must be scalars that require a gradient; loss {k} is {found}.")
