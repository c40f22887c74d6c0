"""Constraint rows: gradients of past tasks, and the layout of a list of parameters as one vector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


class ConstraintRows:
    """The constraint matrix of a list of parameters, in one buffer that is kept from step to step.

    Attributes
    ----------
    reached : list of bool
        For each parameter, whether any row depends on it.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if isinstance(parameters, torch.nn.Module):
            raise TypeError(
                "parameters must be an iterable of tensors; found a module, pass module.parameters()."
            )
        listed = list(parameters)
        for p in listed:
            if not isinstance(p, torch.Tensor) or p.is_complex():
                found = p.dtype if isinstance(p, torch.Tensor) else type(p).__name__
                raise TypeError(f"parameters must be an iterable of real tensors; found {found}.")
        self.parameters = list({id(p): p for p in listed if p.requires_grad}.values())
        if not self.parameters:
            raise ValueError("parameters holds none that requires a gradient; nothing could be projected.")
        devices = {p.device for p in self.parameters}
        if len(devices) > 1:
            raise ValueError(f"parameters must be on one device; found {', '.join(map(str, devices))}.")
        self._sizes = [p.numel() for p in self.parameters]
        self.d = sum(self._sizes)
        dtype = self.parameters[0].dtype
        for p in self.parameters:
            dtype = torch.promote_types(dtype, p.dtype)
        self._buffer = torch.empty((0, self.d), dtype=dtype, device=self.parameters[0].device)
        self._gradient = self._buffer.new_empty(0)
        self.clear()

    def __len__(self) -> int:
        return self._count

    @property
    def matrix(self) -> torch.Tensor:
        """The rows that are in use, shape (t, d): a view."""
        return self._buffer[: self._count]

    def clear(self) -> None:
        """Drop all rows; the buffer is kept."""
        self._count = 0
        self.reached = [False] * len(self.parameters)

    def fill(self, losses: Iterable[torch.Tensor]) -> None:
        """Write the gradient of each loss into a row; after an error there are no rows."""
        self.clear()
        reached, k = list(self.reached), -1
        for k, loss in enumerate(losses):
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
                found = type(loss).__name__
                if isinstance(loss, torch.Tensor):
                    found = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                raise ValueError(f"losses must be scalars that require a gradient; loss {k} is {found}.")
            gradients = torch.autograd.grad(loss.reshape(()), self.parameters, allow_unused=True)
            self._reserve(k + 1, keep=k)
            for j, (part, gradient) in enumerate(zip(self._split(self._buffer[k]), gradients, strict=True)):
                if gradient is None:
                    part.zero_()
                else:
                    part.copy_(_dense(gradient))
                    reached[j] = True
        self._count, self.reached = k + 1, reached

    def gather(self) -> torch.Tensor:
        """Return the ``.grad`` of all parameters as one vector, in a buffer that is kept; none is zero."""
        if not len(self._gradient):
            self._gradient = self._buffer.new_empty(self.d)
        parts = [
            p.new_zeros(n) if p.grad is None else _dense(p.grad).reshape(-1)
            for p, n in zip(self.parameters, self._sizes, strict=True)
        ]
        return torch.cat(parts, out=self._gradient)

    def scatter(self, x: torch.Tensor) -> None:
        """Write a vector to the ``.grad`` of the parameters that have one or that a row depends on."""
        for part, p, reached in zip(self._split(x), self.parameters, self.reached, strict=True):
            if p.grad is not None:
                p.grad.copy_(part)
            elif reached:
                p.grad = part.to(p.dtype, copy=True)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the rows, and what they reach."""
        return {"rows": self.matrix.clone(), "reached": list(self.reached)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters."""
        rows, reached = state["rows"], state["reached"]
        if rows.ndim != 2 or rows.shape[1] != self.d or len(reached) != len(self.parameters):
            raise ValueError(
                f"state holds constraints of shape {tuple(rows.shape)} on {len(reached)} parameters, but "
                f"there are {len(self.parameters)} of {self.d} entries here: it belongs to another model."
            )
        self._reserve(len(rows), keep=0)
        self._buffer[: len(rows)] = rows
        self._count, self.reached = len(rows), list(reached)

    def _reserve(self, rows: int, keep: int) -> None:
        if rows > len(self._buffer):
            grown = self._buffer.new_empty((rows, self.d))
            grown[:keep] = self._buffer[:keep]
            self._buffer = grown

    def _split(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of a vector that belongs to each parameter, in its shape, as views."""
        return [v.view_as(p) for v, p in zip(vector.split(self._sizes), self.parameters, strict=True)]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout != torch.strided:
        raise TypeError(
            f"Gradients must be dense; found layout {gradient.layout}. Use sparse=False in the embedding."
        )
    return gradient.detach()
