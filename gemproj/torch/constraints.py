"""The constraint matrix: one gradient per past task, written straight into one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemproj._arrays import wide_dtype
from gemproj._combine import combine_into
from gemproj._feasibility import warn_if_missed
from gemproj._gram import measure
from gemproj._options import Options
from gemproj._problem import Problem, check_problem
from gemproj._solution import DualSolution
from gemproj.torch.parameters import ParameterVector, local
from gemproj.torch.stream import Stream, measure_sum, solve_measured, tiles


class Kept(NamedTuple):
    """What is known of rows that are not computed anew: attributes of `ConstraintMatrix`."""

    values: Tensor
    reached: list[bool]
    bounded: bool
    names: list[Any] | None


class ConstraintMatrix:
    """G, shape (t, d), for a parameter vector, in one buffer that is kept from step to step.

    Rows are written between `open` and `close`; before `close`, or after an error, there are none. Their
    dtype and device are by default those of the vector. Projections are those for rows rounded to it.

    Attributes
    ----------
    vector : ParameterVector
    reached : list of bool
        For each parameter, whether the loss of any row depends on it.
    values : Tensor, shape (3, t), float64
        Of each row: the loss; the loss when it was last computed; its bound, which is what the losses of
        the same examples were when they were stored, NaN where they were not. `follow` keeps the first one
        up with steps, to first order.
    bounded : bool
        Whether all rows have a bound.
    names : list or None
        What the rows are about, where that is known.
    """

    def __init__(self, vector: ParameterVector, dtype: torch.dtype | None = None, device: Any = None) -> None:
        self.vector = vector
        self._dtype, self._device = dtype or vector.dtype, device or vector.device
        # Pinned memory is copied to a device without waiting.
        self._pinned = self._device != vector.device and vector.device.type == "cuda"
        self._buffer = self._empty(0)
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
        device = self.vector.device
        self.values = torch.empty((3, 0), dtype=wide_dtype(torch, device), device=device)
        self.bounded = True
        self.names: list[Any] | None = None

    @property
    def losses(self) -> Tensor:
        """The loss of each row, shape (t,)."""
        return self.values[0]

    @property
    def bounds(self) -> Tensor:
        """The bound of each row, shape (t,)."""
        return self.values[2]

    def kept(self) -> Kept:
        """Return what `close` needs of rows that stay."""
        return Kept(self.values, self.reached, self.bounded, self.names)

    def open(self, rows: int, smoothing: float = 0.0, scale: float = 1.0) -> None:
        """Make room for so many rows, and drop all until they are closed.

        With `smoothing`, new rows are ``smoothing * old + (1 - smoothing) * gradient``; the old ones are
        those in the buffer.
        """
        self.clear()
        # Rows are summed over replicas, and divided by the scale of losses, when they are complete.
        self._kept, self._share = smoothing * scale / self.vector.topology.replicas, 1.0 - smoothing
        self._scale = scale
        self._fresh: dict[int, Tensor] = {}  # of each new row, its values
        self.vector.check()
        if self._pinned:  # copies of the old rows may still be on their way
            torch.cuda.current_stream(self.vector.device).synchronize()
        self._reserve(rows)

    def add(self, k: int, loss: Tensor, weight: float = 1.0, bound: Tensor | None = None) -> None:
        """Add the gradient of ``weight * loss`` to row k, and with the same weight its loss and bound."""
        check_loss(k, loss)
        self._reserve(k + 1)
        factor = weight * self._scale
        gradients = self.vector.gradients(loss.reshape(()) if factor == 1.0 else loss.reshape(()) * factor)
        first = k not in self._fresh
        if first and self._kept:
            self._buffer[k].mul_(self._kept)
        for j, part in enumerate(self.vector.split(self._buffer[k])):
            gradient, gradients[j] = gradients[j], None  # freed as soon as it is written
            fresh = first and not self._kept
            if gradient is None:
                if fresh:
                    part.zero_()
                continue
            gradient = local(self.vector.placed(j, gradient))
            self.reached[j] = True
            part.copy_(gradient) if fresh else part.add_(gradient.to(part.device), alpha=self._share)
        self.bounded = self.bounded and bound is not None
        value = self._fresh.setdefault(k, self.values.new_zeros(3))
        value[:2] += weight * loss.detach()
        value[2] += weight * (math.nan if bound is None else bound)

    def close(self, rows: int, due: list[int] | None = None, kept: Kept | None = None) -> None:
        """Sum rows over processes and declare so many complete: of these, the `due` ones are new.

        What is known of the others is in `kept`.
        """
        due = list(range(rows)) if due is None else due
        for k in due:
            if k not in self._fresh:  # this process has no example of it
                self._fresh[k] = self.values.new_zeros(3)
                self._buffer[k].mul_(self._kept) if self._kept else self._buffer[k].zero_()
        # One sum over processes for all rows, or one for each new one.
        for part in [self._buffer[:rows]] if len(due) == rows else [self._buffer[k : k + 1] for k in due]:
            if self._scale != 1.0:
                part.div_(self._scale)
            self._reduce(part)
        if due:
            fresh = torch.stack([self._fresh[k] for k in due], 1)
            self.values = self.vector.topology.sum_values(fresh)
        self._count = rows
        if kept is None or len(due) == rows:
            return
        values = kept.values.clone()
        values[:, due] = self.values
        self.values = values
        self.reached = [a or b for a, b in zip(self.reached, kept.reached, strict=True)]
        self.bounded = self.bounded and kept.bounded

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
        vector, topology = self.vector, self.vector.topology
        chosen = None if moving is None else [j for j, moves in enumerate(moving) if moves]
        columns, owned = vector.slices(chosen), vector.slices(chosen, owned=True)
        with topology.measurement(len(self)):
            here = self.problems(v, weight, columns)
            mine = here if owned == columns else self.problems(v, weight, owned)
            measured = measure_sum(mine) if self.streamed else measure(*mine)
        measured = topology.sum_gram(measured, vector.dtype == torch.float64)
        sol = solve_measured(measured, options, warm_start)
        warn_if_missed(sol)
        # On a device looking at the multipliers would wait, so that x is always written.
        changed = vector.device.type != "cpu" or bool(sol.multipliers.any())
        if changed:
            for problem in here:
                combine_into(problem, sol, problem.vector)
        return sol.to(measured.to_caller), changed

    @property
    def streamed(self) -> bool:
        """Whether rows have another dtype, or are on another device, than what is projected."""
        return self.rows.dtype != self.vector.dtype or self.rows.device != self.vector.device

    def problems(self, v: Tensor, weight: Tensor | None, columns: list[slice]) -> Iterable[Problem]:
        """Return the problem of projecting v, on some columns, in one or several parts."""
        if self.streamed:
            return Stream(self.rows, v, weight, columns)
        if columns == [slice(0, self.vector.d)]:
            return [check_problem(self.rows, v, weight)]
        weights = None if weight is None else [weight[at] for at in columns]
        return [check_problem([self.rows[:, at] for at in columns], [v[at] for at in columns], weights)]

    def largest(self) -> Tensor:
        """Return the largest absolute value in each column."""
        found = self.vector.empty()
        for at, tile in self._tiles([slice(0, self.vector.d)]):
            torch.linalg.vector_norm(tile, ord=math.inf, dim=0, out=found[at])
        return found

    def follow(self, step: Tensor) -> Tensor:
        """Subtract the products of an applied step with the rows from the losses; return the cosines.

        Cosines, float64, are zero where the step or a row is zero.
        """
        wide, owned = wide_dtype(torch, step.device), self.vector.owned
        products, squares = [], []
        with torch.autocast(step.device.type, enabled=False):
            for at, rows in self._tiles(owned):
                products.append((rows @ step[at]).to(wide))
                if self._squares is None:
                    squares.append(torch.linalg.vector_norm(rows, dim=1, dtype=wide).square())
        if self._squares is None:
            self._squares = torch.stack(squares).sum(0)
        norms = [torch.linalg.vector_norm(step[at], dtype=wide) for at in owned]
        square = torch.stack(norms).square().sum(0, keepdim=True)
        packed = torch.cat([torch.stack(products).sum(0), self._squares, square])
        packed = self.vector.topology.sum_shards(packed)
        t = len(self)
        sizes = packed[t:-1].sqrt() * packed[-1].sqrt()
        self.values[0] -= packed[:t]
        return torch.where(sizes > 0, packed[:t] / sizes, 0.0)

    def _tiles(self, columns: list[slice]) -> Iterable[tuple[slice, Tensor]]:
        if self.streamed:
            return tiles(self.rows, self.vector.empty()[:0], columns)
        return [(at, self.rows[:, at]) for at in columns]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the rows, of the losses and names, and which parameters the rows reach."""
        known = {"reached": list(self.reached), "values": self.values.clone(), "names": self.names}
        return {"rows": self.rows.clone()} | known

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
        self.values = state["values"].to(self.values, copy=True)
        self.bounded = not bool(self.bounds.isnan().any())
        self.names = state.get("names")

    def _reduce(self, rows: Tensor) -> None:
        """Sum rows over processes, which share a device for that."""
        topology = self.vector.topology
        if rows.device == self.vector.device or topology.replicas == 1:
            self.reached = topology.reduce(rows, self.reached)
            return
        like = torch.empty(0, dtype=rows.dtype, device=self.vector.device)
        for at, tile in tiles(rows, like, [slice(0, self.vector.d)]):
            whole = tile.contiguous()
            self.reached = topology.reduce(whole, self.reached)
            rows[:, at] = whole

    def _empty(self, rows: int) -> Tensor:
        shape = (rows, self.vector.d)
        return torch.empty(shape, dtype=self._dtype, device=self._device, pin_memory=self._pinned)

    def _reserve(self, rows: int) -> None:
        kept = len(self._buffer)
        if rows > kept:
            grown = self._empty(rows)
            grown[:kept] = self._buffer
            self._buffer = grown


def check_loss(k: int, loss: Any) -> None:
    """Raise unless loss k is a scalar that requires a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = type(loss).__name__
        if isinstance(loss, Tensor):
            found = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ValueError(f"losses must be scalars that require a gradient; loss {k} is {found}.")
