"""The constraint matrix: gradients of the losses of past tasks, written directly into one buffer."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemproj._arrays import namespace, to_numpy, wide_dtype
from gemproj._bounds import Options
from gemproj._combine import combine_into, warn_if_missed
from gemproj._dual import solve
from gemproj._gram import measure
from gemproj._problem import Problem, check_problem
from gemproj._solution import DualSolution
from gemproj.torch.parameters import ParameterVector
from gemproj.torch.stream import Stream, measure_sum, tiles


class ConstraintMatrix:
    """The constraint matrix G, shape (t, d), of a parameter vector, in one buffer that all steps share.

    Rows are written by `add`, between `open` and `close`. Before `close`, and after an error, the matrix has
    no rows. By default, rows have the dtype of the vector; projections use the rounded rows.

    Attributes
    ----------
    vector : ParameterVector
    reached : list of bool
        For each parameter, whether the loss of any row depends on it.
    losses : Tensor, shape (t,), float64
        The loss of each row; `follow` updates it to first order after a step.
    stored : Tensor, shape (t,), float64
        The losses of the same examples when they were stored; NaN if unknown.
    names : list of tuple
        The name of each row, as in `Source`, starting with the name of its set; an empty tuple if unknown.
    seconds : list of float
        The time spent on each row in seconds, measured on the host.
    age : int
        Number of steps since the rows were computed.
    written : set of int
        The rows that were written since `open`.
    """

    def __init__(self, vector: ParameterVector, dtype: torch.dtype | None = None) -> None:
        self.vector = vector
        self._buffer = torch.empty((0, vector.d), dtype=dtype or vector.dtype, device=vector.device)
        self._views: dict[tuple[int, int | None], dict[int, Tensor]] = {}  # cached results of `parts`
        self._none = torch.empty(0, dtype=wide_dtype(torch, vector.device), device=vector.device)
        self._sums = self._none.new_zeros(2, 0)  # current and stored losses of the rows
        self.clear()

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Tensor:
        """A view of G, shape (t, d)."""
        return self._buffer[: self._count]

    def clear(self) -> None:
        """Drop all rows, but keep the buffer."""
        self._count = self.age = 0
        self._norms: Tensor | None = None
        self.reached = [False] * len(self.vector.parameters)
        self.losses = self.stored = self._none
        self.names: list[Any] = []
        self.seconds: list[float] = []

    def open(self, rows: int = 0, scale: float = 1.0) -> None:
        """Drop all rows and reserve `rows` rows; gradients are multiplied by `scale` until `close`."""
        self.clear()
        self.vector.check()
        if rows > len(self._buffer):  # free the old buffer before allocating a larger one
            self._buffer, self._views = self._buffer.new_empty((0, self.vector.d)), {}
        self._sums = self._none.new_zeros(2, rows)
        self._reserve(rows)
        self.scale, self.seconds = scale, [0.0] * rows
        self.written: set[int] = set()

    def add(self, k: int, loss: Tensor, weight: float = 1.0, stored: Tensor | None = None) -> None:
        """Add the gradient of ``weight * loss`` to row k; add `loss` and `stored` with the same weight."""
        check_loss(k, loss)
        self._reserve(k + 1)
        factor = weight * self.scale
        gradients = self.vector.gradients(loss.reshape(()) if factor == 1.0 else loss.reshape(()) * factor)
        fresh = k not in self.written
        self.written.add(k)
        found = [j for j, gradient in enumerate(gradients) if gradient is not None]
        if fresh and len(found) < len(gradients):
            self._buffer[k].zero_()
        views = list(self.parts(k).values())
        parts, values = [views[j] for j in found], self.vector.dense(gradients)
        for j in found:
            self.reached[j] = True
        if found:
            (torch._foreach_copy_ if fresh else torch._foreach_add_)(parts, values)
        self._note(k, weight * loss.detach().reshape(1), stored if stored is None else weight * stored)

    def parts(self, k: int, rows: int | None = None) -> dict[int, Tensor]:
        """Return writable views, keyed by parameter id, of row k or of rows ``k .. k + rows - 1``.

        A view has the shape of the local shard, preceded by a dimension of size `rows` if `rows` is given.
        """
        self._reserve(k + (rows or 1))
        if (k, rows) not in self._views:
            here = self._buffer[k] if rows is None else self._buffer[k : k + rows]
            ids, lead = map(id, self.vector.parameters), here.shape[:-1]
            split = zip(ids, here.split(self.vector.sizes, dim=-1), self.vector.shapes, strict=True)
            self._views[k, rows] = {p: part.view((*lead, *shape)) for p, part, shape in split}
        return self._views[k, rows]

    def note(
        self, k: int, parts: Mapping[int, Tensor], reached: Container[int], losses: Tensor, stored: Any
    ) -> None:
        """Record one row per loss, beginning at row k, with gradients `parts` of the `reached` parameters."""
        self.written.update(range(k, k + len(losses)))
        for j, (p, part) in enumerate(parts.items()):
            if p in reached:
                self.reached[j] = True
            else:
                part.zero_()
        self._note(k, losses.detach(), stored)

    def loss(self, k: int) -> Tensor:
        """Return the sum of the losses that were added to row k."""
        return self._sums[0, k].clone()

    def drop(self, k: int) -> None:
        """Forget row k before it is computed again."""
        self.written.discard(k)
        self._sums[:, k] = 0.0

    @contextmanager
    def timed(self, rows: Sequence[Any]) -> Iterator[None]:
        """Measure the time of the block, and assign an equal share of it to each of the rows."""
        start = time.perf_counter()
        yield
        each = (time.perf_counter() - start) / len(rows)
        for row in rows:
            self.seconds[row.k] = each

    @contextmanager
    def set_aside(self, k: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Temporarily recompute row k; yield its saved values and a view of the recomputed row."""
        row, sums, reached = self._buffer[k].clone(), self._sums.clone(), list(self.reached)
        self.drop(k)
        try:
            yield row, self._buffer[k]
        finally:
            self._buffer[k], self._sums, self.reached = row, sums, reached
            self.written.add(k)

    def _note(self, k: int, losses: Tensor, stored: Tensor | None) -> None:
        now = losses.to(self._none)
        then = torch.full_like(now, math.nan) if stored is None else stored.to(now).expand_as(now)
        self._sums[:, k : k + len(now)].add_(torch.stack([now, then]))

    def close(self, rows: int) -> None:
        """Finish the first `rows` rows and sum them over processes; rows without local examples add zero."""
        for k in set(range(rows)) - self.written:
            self._buffer[k].zero_()
        G, topology = self._buffer[:rows], self.vector.topology
        if self.scale != 1.0:
            G.div_(self.scale)
        self.reached = topology.reduce(G, self.reached)
        if rows:
            self.losses, self.stored = topology.sum_values(self._sums[:, :rows])
        self._count = rows

    def project(
        self,
        v: Tensor,
        options: Options,
        warm_start: Tensor | None = None,
        moving: Sequence[bool] | None = None,
        weight: Tensor | None = None,
        write: bool = True,
    ) -> tuple[DualSolution, bool]:
        """Project v in place, in columns of moving parameters; return the solution and whether v changed.

        If `write` is False, v is unchanged, and only the solution in t-space is computed.

        All local columns are updated, but only one process counts a replicated column in the Gram matrix.
        The right-hand side h may be a function of the Gram matrix.
        """
        vector, topology = self.vector, self.vector.topology
        columns, owned = vector.columns, vector.owned
        if moving is not None and not all(moving):
            chosen = [j for j, moves in enumerate(moving) if moves]
            columns, owned = vector.slices(chosen), vector.slices(chosen, owned=True)
        with topology.measurement(len(self)):
            here = self._problems(v, weight, columns)
            mine = here if owned == columns else self._problems(v, weight, owned)
            measured = measure_sum(mine) if self.streamed else measure(*mine)
        measured = topology.sum_gram(measured)
        if weight is None and columns == vector.columns:
            K = measured.gram.K
            self._norms = torch.as_tensor(namespace(K).linalg.diagonal(K) ** 0.5, device=v.device)
        if callable(options.h):
            options = replace(options, h=options.h(measured.gram))
        host = not isinstance(measured.gram.b, Tensor)
        start = to_numpy(warm_start) if host and warm_start is not None else warm_start
        sol = solve(measured, options, start)
        warn_if_missed(sol)
        # On a device, reading the multipliers would synchronise, so x is always written.
        changed = write and (vector.device.type != "cpu" or bool(sol.multipliers.any()))
        if changed:
            for problem in here:
                combine_into(problem, sol, problem.vector)
        return sol, changed

    @property
    def streamed(self) -> bool:
        """Whether the dtype of the rows differs from the dtype of the projected vector."""
        return self._buffer.dtype != self.vector.dtype

    def largest(self, out: Tensor) -> None:
        """Write the largest absolute value of each column to `out`."""
        for at, tile in self._tiles(self.vector.columns):
            # On a CPU, a norm over the first dimension takes a hundred times as long.
            torch.maximum(tile.amax(0), tile.amin(0).neg_(), out=out[at])

    def follow(self, step: Tensor) -> Tensor:
        """Update the losses to first order after an applied step; return its cosines with the rows.

        The cosines have dtype float64, and are zero if the step or the row is zero.
        """
        topology, wide = self.vector.topology, self._none.dtype
        # Norms of float32 numbers in float64 would take longer than the rest of this function.
        kind = torch.promote_types(step.dtype, torch.float32)
        found: list[list[Tensor]] = []  # per tile: |step|^2, products with the rows, |g_k|^2
        with torch.autocast(step.device.type, enabled=False):
            for at, rows in self._tiles(self.vector.owned):
                part = step[at]
                square = torch.linalg.vector_norm(part, dtype=kind).to(wide) ** 2
                found.append([square.reshape(1), (rows @ part).to(wide)])
                if self._norms is None:
                    found[-1].append(torch.linalg.vector_norm(rows, dim=1, dtype=kind).to(wide) ** 2)
        sums = [sum(parts[1:], parts[0]) for parts in zip(*found, strict=True)]
        if topology.collective:
            sums = list(topology.sum_shards(torch.cat(sums)).split([*map(len, sums)]))
        square, product, *squares = sums
        if self._norms is None:
            self._norms = squares[0].sqrt()
        self.losses = self.losses - product  # a new tensor, because a `Projection` holds the old one
        self.age += 1
        sizes = self._norms * square.sqrt()
        return torch.where(sizes > 0, product / sizes, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the rows, losses, stored losses and names, the reached parameters, and the age."""
        known = {"reached": list(self.reached), "values": torch.stack([self.losses, self.stored])}
        return {"rows": self.rows.clone(), **known, "age": self.age, "names": [list(n) for n in self.names]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by `state_dict` onto the device of the parameters."""
        rows, reached, here = state["rows"], state["reached"], self.vector
        if rows.ndim != 2 or rows.shape[1] != here.d or len(reached) != len(here.parameters):
            raise ValueError(
                f"state holds constraints of shape {tuple(rows.shape)} on {len(reached)} parameters, but "
                f"here are {len(here.parameters)} parameters of {here.d} entries: the state "
                "belongs to another model, or to another number of processes."
            )
        self.open(len(rows))
        self._buffer[: len(rows)] = rows
        self._count, self.reached, self.age = len(rows), list(reached), state["age"]
        self.losses, self.stored = state["values"].to(self.losses, copy=True)
        self.names = [tuple(name) for name in state["names"]]

    def _problems(self, v: Tensor, weight: Tensor | None, columns: list[slice]) -> Iterable[Problem]:
        """Return the problem of projecting v in some columns, split into tiles if rows are streamed."""
        if self.streamed:
            return Stream(self.rows, v, weight, columns)
        if columns == self.vector.columns:
            return [check_problem(self.rows, v, weight)]
        weights = None if weight is None else [weight[at] for at in columns]
        return [check_problem([self.rows[:, at] for at in columns], [v[at] for at in columns], weights)]

    def _tiles(self, columns: list[slice]) -> Iterable[tuple[slice, Tensor]]:
        if self.streamed:
            return tiles(
                self.rows, torch.empty(0, dtype=self.vector.dtype, device=self.vector.device), columns
            )
        return [(at, self.rows[:, at]) for at in columns]

    def _reserve(self, rows: int) -> None:
        kept, more = len(self._buffer), rows - self._sums.shape[1]
        if more > 0:
            self._sums = torch.cat([self._sums, self._sums.new_zeros(2, more)], 1)
        if rows > kept:
            rows = max(rows, 2 * kept)  # copies are rare, even if the number of rows is unknown
            grown = self._buffer.new_empty((rows, self.vector.d))
            grown[:kept] = self._buffer
            self._buffer, self._views = grown, {}


def check_loss(k: int, loss: Any) -> None:
    """Raise unless loss k is a scalar that requires a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = type(loss).__name__
        if isinstance(loss, Tensor):
            found = f"a tensor of shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
        raise ValueError(f"losses must be scalars that require a gradient; loss {k} is {found}.")
