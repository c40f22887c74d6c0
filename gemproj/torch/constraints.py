"""The constraint matrix: one gradient per past task, written straight into one buffer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gemproj._arrays import wide_dtype
from gemproj._combine import combine_into
from gemproj._dual import Options, solve_problem
from gemproj._problem import Problem, check_problem
from gemproj._solution import DualSolution
from gemproj.torch.parameters import ParameterVector, local


class ConstraintMatrix:
    """G, shape (t, d), for a parameter vector, in one buffer that is kept from step to step.

    Rows are written between `open` and `close`; before `close`, or after an error, there are none.

    Attributes
    ----------
    vector : ParameterVector
    reached : list of bool
        For each parameter, whether the loss of any row depends on it.
    """

    def __init__(self, vector: ParameterVector) -> None:
        self.vector = vector
        self._buffer = vector.empty(0)
        self.clear()

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Tensor:
        """G, shape (t, d): a view."""
        return self._buffer[: self._count]

    def clear(self) -> None:
        """Drop all rows; the buffer is kept."""
        self._count = 0
        self._squares: Tensor | None = None
        self.reached = [False] * len(self.vector.parameters)

    def open(self, rows: int) -> None:
        """Drop all rows and make room for so many."""
        self.clear()
        frozen = sum(not p.requires_grad for p in self.vector.parameters)
        if frozen:
            raise ValueError(
                f"{frozen} of the {len(self.vector.parameters)} parameters of this projector no longer "
                "require a gradient. Make a new projector after freezing parameters or adding adapters."
            )
        self._written = [False] * len(self._buffer)
        self._reserve(rows)

    def add(self, k: int, loss: Tensor, weight: float = 1.0) -> None:
        """Add the gradient of ``weight * loss`` to row k."""
        check_loss(k, loss)
        self._reserve(k + 1)
        gradients = self._gradients(loss.reshape(()) if weight == 1.0 else loss.reshape(()) * weight)
        first, self._written[k] = not self._written[k], True
        for j, part in enumerate(self.vector.split(self._buffer[k])):
            gradient, gradients[j] = gradients[j], None  # freed as soon as it is written
            if gradient is None:
                if first:
                    part.zero_()
                continue
            gradient = local(self.vector.placed(j, gradient))
            self.reached[j] = True
            part.copy_(gradient) if first else part.add_(gradient)

    def close(self, rows: int, scale: float = 1.0) -> None:
        """Divide so many rows by `scale`, sum them over processes and declare them complete."""
        G = self._buffer[:rows]
        for k in range(rows):
            if not self._written[k]:
                G[k].zero_()
        if scale != 1.0:
            G.div_(scale)
        self.reached = self.vector.topology.reduce(G, self.reached)
        self._count = rows

    def project(
        self,
        v: Tensor,
        options: Options,
        warm_start: Tensor | None = None,
        moving: Sequence[bool] | None = None,
        weight: Tensor | None = None,
    ) -> tuple[DualSolution, bool]:
        """Project v in place, on the columns of the moving parameters; return whether it changed.

        All local columns are updated; replicated ones enter the Gram matrix on one rank only.
        """
        topology = self.vector.topology
        columns, owned = self.vector.slices(moving), self.vector.slices(moving, owned=True)
        with topology.measurement(len(self)):
            here = self._problem(v, weight, columns)
            measured = here if owned == columns else self._problem(v, weight, owned)
        sol = solve_problem(measured, options, warm_start, all_reduce=topology.gram_sum(measured))
        # On a device looking at the multipliers would wait, so that x is always written.
        changed = not here.host or bool(sol.multipliers.any())
        if changed:
            combine_into(here, sol, here.vector)
        return sol.to(here.xp, here.device), changed

    def cosines(self, step: Tensor) -> Tensor:
        """Return the cosine between a step and each row, zero where one of them is zero, float64."""
        wide, owned = wide_dtype(torch, step.device), self.vector.owned
        with torch.autocast(step.device.type, enabled=False):
            products = torch.stack([(self.rows[:, at] @ step[at]).to(wide) for at in owned]).sum(0)
        if self._squares is None:
            norms = [torch.linalg.vector_norm(self.rows[:, at], dim=1, dtype=wide) for at in owned]
            self._squares = torch.stack(norms).square().sum(0)
        norms = [torch.linalg.vector_norm(step[at], dtype=wide) for at in owned]
        square = torch.stack(norms).square().sum(0, keepdim=True)
        packed = self.vector.topology.sum_shards(torch.cat([products, self._squares, square]))
        t = len(products)
        sizes = packed[t:-1].sqrt() * packed[-1].sqrt()
        return torch.where(sizes > 0, packed[:t] / sizes, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the rows, and which parameters they reach."""
        return {"rows": self.rows.clone(), "reached": list(self.reached)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters."""
        rows, reached, here = state["rows"], state["reached"], self.vector
        if rows.ndim != 2 or rows.shape[1] != here.d or len(reached) != len(here.parameters):
            raise ValueError(
                f"state holds constraints of shape {tuple(rows.shape)} on {len(reached)} parameters, but "
                f"there are {len(here.parameters)} of {here.d} entries here: it belongs to another model."
            )
        self.open(len(rows))
        self._buffer[: len(rows)] = rows
        self._count, self.reached = len(rows), list(reached)

    def _problem(self, v: Tensor, weight: Tensor | None, columns: list[slice]) -> Problem:
        if columns == [slice(0, self.vector.d)]:
            return check_problem(self.rows, v, weight)
        weights = None if weight is None else [weight[at] for at in columns]
        return check_problem([self.rows[:, at] for at in columns], [v[at] for at in columns], weights)

    def _gradients(self, loss: Tensor) -> list[Tensor | None]:
        parameters = self.vector.parameters
        if not self.vector.topology.collective:
            gradients: list[Tensor | None] = list(torch.autograd.grad(loss, parameters, allow_unused=True))
            if any(g is None for g in gradients):
                _refuse_reentrant(loss)
            return gradients
        # FSDP computes with gathered parameters and writes the gradients of shards to .grad itself.
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

    def _reserve(self, rows: int) -> None:
        kept = len(self._buffer)
        if rows > kept:
            grown = self.vector.empty(rows)
            grown[:kept] = self._buffer
            self._buffer = grown
            self._written += [False] * (rows - kept)


def check_loss(k: int, loss: Any) -> None:
    """Raise unless loss k is a scalar that requires a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = type(loss).__name__
        if isinstance(loss, Tensor):
            found = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ValueError(f"losses must be scalars that require a gradient; loss {k} is {found}.")


def _refuse_reentrant(loss: Tensor) -> None:
    """Raise if a reentrant checkpoint, which only ``backward()`` looks into, may hide parameters."""
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
