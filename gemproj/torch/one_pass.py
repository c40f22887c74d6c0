"""Which rows of G share a forward and backward pass, and that pass."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
# As at the beginning of a distillation; gradients are compared later.
_NOTHING_YET = "the losses are zero, and their gradients rounding"
_A_MEAN = "the loss is a mean over examples; if it returned one number for each, rows could share a pass"


class Limit(NamedTuple):
    """How many rows of a kind share a pass, with how many entries in its batch; for one row, the reason."""

    loss: Any  # kept, so that no other one has its id
    rows: int = 1
    entries: float = 0.0
    reason: str | None = None


class SharedPasses:
    """Computes several rows of G in one pass, where that is possible and saves time.

    It is possible if the loss has one number for each example, in which no other example has a part, and if
    the gradients of all layers with trainable parameters are known. The first time, a row has a pass of its
    own, too: its activations tell how many rows a pass may have, and its gradient must be the same.

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
                limit = _find_limit(G, model, some[-2:], alone, microbatch)
                if len(self._limits) >= _MOST_KINDS:  # a loop makes a new function at each step
                    self._limits.clear()
                if limit.reason != _NOTHING_YET:
                    self._limits[kind] = limit
            start = time.perf_counter()
            for part, batch in _passes(some, limit):
                try:
                    if batch is not None:
                        _fill(G, model, part, batch)
                except Exception as error:  # if it is the loss that fails, it also does alone
                    limit = self._limits[kind] = Limit(limit.loss, reason=_first_line(error))
                for row in part:
                    if row.k not in G.written:
                        alone(row)
                for row in part:
                    G.seconds[row.k] = (time.perf_counter() - start) / len(part)
                start = time.perf_counter()
            if len(some) > 1:
                self.reason = self.reason or limit.reason


def _find_limit(
    G: ConstraintMatrix, model: torch.nn.Module, rows: list[Source], alone: Any, microbatch: int | None
) -> Limit:
    """Find out with two rows whether rows can share a pass; G keeps one of them at most."""
    row, loss, device = rows[-1], rows[-1].promise.loss, G.vector.device
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
    of_pass, of_row = _budget(device)
    most = min(of_pass // max(count[0], 1), room)
    if most < 2 or count[0] > of_row:
        return Limit(loss, reason=f"a row has {row.size} examples, {count[0] / 2**20:.3g} MiB")
    now = values.mean().to(G.losses)
    if bool(now.abs() <= rounding(now, G.vector.dtype)):
        return Limit(loss, reason=_NOTHING_YET)
    expected, batch = G.drop(row.k), _batch(rows)
    try:
        gradients = _fill(G, model, rows, batch)
    except Exception as error:
        return Limit(loss, reason=_first_line(error))
    found = [G.drop(one.k) for one in rows][-1]
    apart = float((found - expected).double().norm() / expected.double().norm())
    if apart <= 4 * gradients.rounding**0.5:
        return Limit(loss, most, most * _entries(batch) / len(rows))
    reason = f"in a pass with others a row differs by {apart:.1g} of its norm"
    warnings.warn(
        f"Each constraint gradient takes a pass: {reason}. Does the loss of an example depend on the other "
        "examples of its batch?",
        stacklevel=2,
    )
    return Limit(loss, reason=reason)


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
