"""Which rows of G share a forward and backward pass, and that pass."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gemproj._arrays import wide_dtype
from gemproj.torch.batches import Batch, Remembered, Source, bare, leaves_of
from gemproj.torch.constraints import ConstraintMatrix
from gemproj.torch.layers import RowByRow, RowGradients
from gemproj.torch.promise import Promise, call_loss
from gemproj.torch.terms import rounding

# Bytes of activations for each thread, of a pass and of the largest row in it. Several rows in a pass save
# calls of small operations; a row that fills the caches of a core is faster alone (docs/cost.md).
_CPU_PASS, _CPU_ROW = 2**25, 2**22

# Kinds of rows whose limits are kept.
_MOST_KINDS = 64
# Relative to its norm, how much a row may differ in half precision.
_MOST_APART = 0.03
_A_MEAN = "the loss is a mean over examples; if it returned one number for each, rows could share a pass"


@dataclass
class Limit:
    """How many rows of a kind share a pass, with how many entries in its batch; for one row, the reason."""

    loss: Any  # kept, so that no other one has its id
    rows: int = 1
    entries: float = 0.0
    reason: str | None = None
    passes: int = 0  # with several rows
    # By set and label: whether a row has been compared with that of a pass of its own.
    compared: dict[Hashable, bool] = field(default_factory=dict)


class SharedPasses:
    """Computes several rows of G in one pass, where that is possible and saves time.

    It is possible if the loss has one number for each example, in which no other example has a part, and if
    the gradients of all layers with trainable parameters are known. The activations of a row in a pass of its
    own tell how many rows a pass may have. The first row of each set and label is compared with that of a
    pass of its own, and so is one row of the second pass, of the fourth, of the eighth and so on.

    Attributes
    ----------
    reason : str or None
        Why some of the last rows had a pass each.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._limits: dict[Hashable, Limit] = {}  # by kind

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: it finds out anew."""
        return {"reason": None, "_limits": {}}

    def fill(
        self,
        G: ConstraintMatrix,
        model: torch.nn.Module,
        rows: Sequence[Source],
        alone: Callable[[Source], Tensor],
        microbatch: int | None = None,
    ) -> None:
        """Compute rows of G; ``alone(row)`` computes one in a pass of its own, and returns its losses."""
        self.reason = None
        for kind, same in groupby(rows, lambda row: (id(row.promise.loss), row.kind, row.size)):
            some = list(same)
            limit = self._limits.get(kind, Limit(some[0].promise.loss))
            if len(some) > 1 and kind not in self._limits:
                limit = _find_limit(G, model, some[-1], alone, microbatch)
                if len(self._limits) >= _MOST_KINDS:  # a loop makes a new function at each step
                    self._limits.clear()
                self._limits[kind] = limit
            try:
                _share(G, model, some, limit, alone)
            except Exception as error:  # if it is the loss that fails, it also does alone
                limit = self._limits[kind] = Limit(limit.loss, reason=_first_line(error))
                for row in some:
                    G.drop(row.k)
            for row in some:
                if row.k not in G.written:
                    start = time.perf_counter()
                    alone(row)
                    G.seconds[row.k] = time.perf_counter() - start
            if len(some) > 1:
                self.reason = self.reason or limit.reason


def _find_limit(
    G: ConstraintMatrix, model: torch.nn.Module, row: Source, alone: Any, microbatch: int | None
) -> Limit:
    """Find out with one row how many rows can share a pass."""
    loss = row.promise.loss
    if G.vector.topology.collective:
        return Limit(loss, reason="parameters are sharded")
    if row.kind is None or row.size == 0:
        return Limit(loss, reason="batches were given, and not what they are made of")
    room = (microbatch or 2**31) // row.size
    if room < 2:
        return Limit(loss, reason="a microbatch has no room for two rows")
    with _counted_activations(model) as count:
        values = alone(row)
    if values.shape != (row.size,):
        return Limit(loss, reason=_A_MEAN)
    of_pass, of_row = _budget(G.vector.device)
    most = min(of_pass // max(count[0], 1), room)
    if most < 2 or count[0] > of_row:
        return Limit(loss, reason=f"a row has {row.size} examples, {count[0] / 2**20:.3g} MiB")
    G.drop(row.k)
    return Limit(loss, most, most * _entries(_batch([row])))


def _share(
    G: ConstraintMatrix,
    model: torch.nn.Module,
    rows: list[Source],
    limit: Limit,
    alone: Callable[[Source], Tensor],
) -> None:
    """Compute the rows that share a pass; raise where one is another than in a pass of its own."""
    start = time.perf_counter()
    for part, batch in _passes(rows, limit):
        if batch is None:
            continue
        gradients = _fill(G, model, part, batch)
        limit.passes += 1
        for row in _doubtful(part, limit):
            _compare(G, row, limit, alone, gradients)
        for row in part:
            G.seconds[row.k] = (time.perf_counter() - start) / len(part)
        start = time.perf_counter()


def _doubtful(rows: list[Source], limit: Limit) -> list[Source]:
    """Return the rows of a pass that are to be compared."""
    again = limit.passes & (limit.passes - 1) == 0
    first = {row.name[:2]: row for row in reversed(rows)}
    found = [row for name, row in first.items() if name not in limit.compared]
    if again:
        found += [row for name, row in first.items() if limit.compared.get(name) is False]
    return found or ([rows[limit.passes.bit_length() % len(rows)]] if again else [])


def _compare(
    G: ConstraintMatrix,
    row: Source,
    limit: Limit,
    alone: Callable[[Source], Tensor],
    gradients: RowGradients,
) -> None:
    """Compute a row again in a pass of its own; raise where that makes a difference."""
    loss = G.loss(row.k)
    with G.set_aside(row.k) as (found, own):
        alone(row)
        own_loss = G.loss(row.k)
        size, other, apart = (_norm(own), _norm(found), _norm(own.sub_(found)))
    told = math.isfinite(size) and bool(
        # Of a distillation that begins, losses are zero and gradients rounding.
        max(loss.abs(), own_loss.abs()) > rounding(own_loss, G.vector.dtype)
    )
    limit.compared[row.name[:2]] = told or limit.compared.get(row.name[:2], False)
    if told and not apart <= min(4 * gradients.rounding**0.5, _MOST_APART) * max(size, other):
        reason = f"in a pass with others a row differs by {apart / max(size, other):.1g} of its norm"
        warnings.warn(
            f"Each constraint gradient takes a pass: {reason}. Does the loss of an example depend on the "
            "other examples of its batch, or draw random numbers?",
            stacklevel=2,
        )
        raise RowByRow(reason)


def _norm(row: Tensor) -> float:
    return float(torch.linalg.vector_norm(row, dtype=wide_dtype(torch, row.device)))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _passes(rows: list[Source], limit: Limit) -> Iterator[tuple[list[Source], Batch | None]]:
    """Yield rows that share a pass, with the batch of all their examples; or one row, and None."""
    if len(rows) > limit.rows:
        for start in range(0, len(rows), limit.rows):
            yield from _passes(rows[start : start + limit.rows], limit)
        return
    batch = _batch(rows) if len(rows) > 1 else None
    if batch is None or _entries(batch) <= 1.5 * limit.entries:
        yield rows, batch
        return
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):  # examples are longer than at first
        yield from _passes(half, limit)


def _batch(rows: list[Source]) -> Batch:
    return rows[0].joined(rows[1:]).all()


def _fill(G: ConstraintMatrix, model: torch.nn.Module, rows: list[Source], batch: Batch) -> RowGradients:
    """Compute rows of G in one pass; raise where that is not possible."""
    first, t, n = rows[0], len(rows), rows[0].size
    if any(leaf.shape[:1] != (t * n,) for leaf in _tensors(bare(batch))):
        raise RowByRow("the rows of a batch are no examples, as in packed texts")
    if any(p._backward_hooks for p in G.vector.parameters):
        raise RowByRow("parameters have hooks, which change each gradient")
    parts = G.parts(first.k, t)
    gradients = RowGradients(model.modules(), parts)
    with gradients.recorded(t * n):
        values = call_loss(first.promise.loss, model, batch, t * n, first.name)
        if values.shape != (t * n,):
            raise RowByRow(_A_MEAN)
        weights: Any = [row.weight for row in rows]
        alike = all(weight == weights[0] for weight in weights)  # then a device need not wait for them
        weights = weights[0] if alike else torch.tensor(weights, dtype=values.dtype, device=values.device)
        losses = values.view(t, n).mean(1) * weights
        gradients.differentiate(losses.sum() * G.scale, G.vector.parameters)
    stored = stored_losses(batch, first.promise, first.name)
    then = None if stored is None else stored.view(t, n).mean(1) * weights
    G.note(first.k, parts, gradients.reached, losses, then)
    return gradients


def stored_losses(batch: Batch, promise: Promise, name: Any) -> Tensor | None:
    """Return the losses, shape (n,), that were stored with examples, which a tolerance needs."""
    if isinstance(batch, Remembered) and "losses" in batch.fields:
        return batch.losses
    if promise.tolerance is not None:
        raise ValueError(
            f"tolerance needs the losses that examples{f' of {name[0]!r}' if name else ''} had when they "
            "were stored: use keep or end_task of GEM, memory.record(name, losses=...) or "
            "memory.add(..., losses=...)."
        )
    return None


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def _entries(batch: Batch) -> int:
    return sum(leaf.numel() for leaf in _tensors(batch))


def _budget(device: torch.device) -> tuple[int, int]:
    """Return how many bytes the activations of a pass, and those of a row in it, may take."""
    if device.type == "cuda":  # an estimate: a quarter of what is free
        free = torch.cuda.mem_get_info(device)[0] // 4
        return free, free // 2
    threads = torch.get_num_threads()
    return threads * _CPU_PASS, threads * _CPU_ROW


@contextmanager
def _counted_activations(model: torch.nn.Module) -> Iterator[list[int]]:
    """Count the bytes of what is kept for backward passes, other than parameters."""
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = [0]

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            found[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found
