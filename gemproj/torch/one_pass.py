"""Several rows of G from one forward and backward pass."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from gemproj._arrays import wide_dtype
from gemproj.torch.batches import Batch, Source, bare, leaves_of
from gemproj.torch.constraints import ConstraintMatrix
from gemproj.torch.layers import RowByRow, RowGradients
from gemproj.torch.promise import call_loss, stored_losses
from gemproj.torch.terms import rounding

# Maximum bytes of activations per thread, for a pass and for one row. A shared pass saves calls of small
# operations, but a row that fills the caches of a core is faster in its own pass (docs/cost.md).
_CPU_PASS, _CPU_ROW = 2**25, 2**22

Alone = Callable[[Source], Tensor]

# Maximum number of kinds of rows for which a limit is kept.
_MOST_KINDS = 64
# Maximum difference between two computations of a row in half precision, relative to its norm.
_MOST_APART = 0.03
_A_MEAN = "the loss is a mean over examples; if it returned one number for each, rows could share a pass"


@dataclass
class Limit:
    """The number of rows of a kind per pass, the entries of their batch, and the reason if it is one row."""

    loss: Any  # kept alive, so that no other loss gets its id
    rows: int = 1
    entries: float = 0.0
    reason: str | None = None
    passes: int = 0  # number of shared passes
    # For each set and label, whether a comparison of a row with its own pass was conclusive.
    compared: dict[Hashable, bool] = field(default_factory=dict)


class SharedPasses:
    """Computes several rows of G in one pass, if that is possible and saves time.

    Sharing is possible if the loss of an example does not depend on the other examples and is returned as one
    number per example, and if `RowGradients` knows all layers with trainable parameters. The memory for
    activations limits the number of rows in a pass. The first row of each set and label, and one row of the
    shared passes 2, 4, 8, ..., are compared with rows computed in their own passes.

    Attributes
    ----------
    reason : str or None
        Why some of the last rows were computed in their own passes.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._limits: dict[Hashable, Limit] = {}  # one per kind

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling; a copy determines the limits again."""
        return {"reason": None, "_limits": {}}

    def fill(
        self, G: ConstraintMatrix, model: torch.nn.Module, rows: list[Source], alone: Alone, most: int
    ) -> None:
        """Compute rows of G, in passes of at most `most` examples.

        ``alone(row)`` computes a row in its own pass, and returns its losses.
        """
        self.reason = None
        for kind, same in groupby(rows, lambda row: (id(row.promise.loss), row.kind, row.size)):
            some = list(same)
            if len(some) > 1:
                if kind not in self._limits:
                    if len(self._limits) >= _MOST_KINDS:  # for example with a new loss at each step
                        self._limits.clear()
                    self._limits[kind] = _find_limit(G, model, some[-1], alone, most)
                limit = self._limits[kind]
                try:
                    for start in range(0, len(some), limit.rows) if limit.rows > 1 else ():
                        _share(G, model, some[start : start + limit.rows], limit, alone)
                except Exception as error:  # an error of the loss itself is raised again below
                    limit.rows, limit.reason = 1, str(error).partition("\n")[0]
                    for row in some:
                        G.drop(row.k)
                self.reason = self.reason or limit.reason
            for row in some:
                if row.k not in G.written:
                    with G.timed([row]):
                        alone(row)


def _find_limit(G: ConstraintMatrix, model: torch.nn.Module, row: Source, alone: Alone, most: int) -> Limit:
    """Compute one row, and return how many rows can share a pass."""
    loss = row.promise.loss
    try:
        rows = _room(G, model, row, alone, most)
    except RowByRow as error:
        return Limit(loss, reason=str(error))
    G.drop(row.k)
    return Limit(loss, rows, rows * _entries(row.all()))


def _room(G: ConstraintMatrix, model: torch.nn.Module, row: Source, alone: Alone, most: int) -> int:
    """Compute a row in its own pass; return how many rows can share a pass, or raise `RowByRow`."""
    if G.vector.topology.collective:
        raise RowByRow("parameters are sharded")
    if row.kind is None or row.size == 0:
        raise RowByRow("batches were passed, not the examples of a memory")
    if most < 2 * row.size:
        raise RowByRow("a microbatch has no room for two rows")
    with _counted_activations(model) as count, G.timed([row]):
        values = alone(row)
    if values.shape != (row.size,):
        raise RowByRow(_A_MEAN)
    of_pass, of_row = _budget(G.vector.device)
    rows = min(of_pass // max(count[0], 1), most // row.size)
    if rows < 2 or count[0] > of_row:
        raise RowByRow(f"a row has {row.size} examples, {count[0] / 2**20:.3g} MiB")
    return rows


def _share(
    G: ConstraintMatrix, model: torch.nn.Module, rows: list[Source], limit: Limit, alone: Alone
) -> None:
    """Compute several rows of G in one pass; raise if that is not possible or gives a wrong row."""
    if len(rows) < 2:
        return
    batch = rows[0].joined(rows[1:]).all()
    if _entries(batch) > 1.5 * limit.entries:  # examples are longer than when the limit was found
        _share(G, model, rows[: len(rows) // 2], limit, alone)
        _share(G, model, rows[len(rows) // 2 :], limit, alone)
        return
    with G.timed(rows):
        gradients = _compute(G, model, rows, batch)
        limit.passes += 1
        for row in _doubtful(rows, limit):
            name = row.name[:2]
            limit.compared[name] = _agrees(G, row, alone, gradients) or limit.compared.get(name, False)


def _compute(G: ConstraintMatrix, model: torch.nn.Module, rows: list[Source], batch: Batch) -> RowGradients:
    """Compute rows of G in one pass; raise `RowByRow` if that is not possible."""
    first, t, n = rows[0], len(rows), rows[0].size
    if any(leaf.shape[:1] != (t * n,) for leaf in _tensors(bare(batch))):
        raise RowByRow("the first dimension of a batch does not count examples, as in packed texts")
    if any(p._backward_hooks for p in G.vector.parameters):
        raise RowByRow("parameters have hooks, which change each gradient")
    parts = G.parts(first.k, t)
    gradients = RowGradients(model.modules(), parts)
    with gradients.recorded(t * n):
        values = call_loss(first.promise.loss, model, batch, t * n, first.name)
        if values.shape != (t * n,):
            raise RowByRow(_A_MEAN)
        weights: Any = [row.weight for row in rows]
        alike, wide = len(set(weights)) == 1, wide_dtype(torch, values.device)
        # Equal weights need no copy to a device, which would synchronise.
        weights = weights[0] if alike else torch.tensor(weights, dtype=wide, device=values.device)
        losses = values.view(t, n).mean(1) * weights
        gradients.differentiate(losses.sum() * G.scale, G.vector.parameters)
    stored = stored_losses(batch, first.promise, first.name)
    then = None if stored is None else stored.view(t, n).mean(1).to(values.device) * weights
    G.note(first.k, parts, gradients.reached, losses, then)
    return gradients


def _doubtful(rows: list[Source], limit: Limit) -> list[Source]:
    """Return the rows of a shared pass that must be compared with their own passes."""
    again = limit.passes & (limit.passes - 1) == 0
    first = {row.name[:2]: row for row in reversed(rows)}
    told = limit.compared
    found = [row for name, row in first.items() if name not in told or (again and not told[name])]
    return found or ([rows[limit.passes.bit_length() % len(rows)]] if again else [])


def _agrees(G: ConstraintMatrix, row: Source, alone: Alone, gradients: RowGradients) -> bool:
    """Recompute a row in its own pass; raise if it differs, and return whether the test was conclusive."""
    loss = G.loss(row.k)
    with G.set_aside(row.k) as (found, own):
        alone(row)
        own_loss = G.loss(row.k)
        wide = wide_dtype(torch, own.device)
        size, other, apart = (
            float(torch.linalg.vector_norm(a, dtype=wide)) for a in (own, found, own - found)
        )
    # At the beginning of a distillation, losses are zero and gradients are rounding errors.
    told = max(loss.abs(), own_loss.abs()) > rounding(own_loss, G.vector.dtype)
    if not (told and math.isfinite(size)):
        return False
    if not apart <= min(4 * gradients.rounding**0.5, _MOST_APART) * max(size, other):
        reason = f"in a shared pass, a row differs by {apart / max(size, other):.1g} of its norm"
        warnings.warn(
            f"Constraint gradients are computed one by one: {reason}. Does the loss of an example depend on "
            "the other examples of its batch, or draw random numbers?",
            stacklevel=2,
        )
        raise RowByRow(reason)
    return True


def _tensors(batch: Batch) -> list[Tensor]:
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def _entries(batch: Batch) -> int:
    return sum(leaf.numel() for leaf in _tensors(batch))


def _budget(device: torch.device) -> tuple[int, int]:
    """Return the maximum bytes of activations, for a pass and for one row."""
    if device.type == "cuda":  # a quarter of the free memory: large passes are faster on GPUs (docs/gpu.md)
        free = torch.cuda.mem_get_info(device)[0] // 4
        return free, free // 2
    threads = torch.get_num_threads()
    return threads * _CPU_PASS, threads * _CPU_ROW


@contextmanager
def _counted_activations(model: torch.nn.Module) -> Iterator[list[int]]:
    """Count the bytes of all tensors except parameters that are saved for backward passes."""
    seen, found = set[int](), [0]

    def keep(tensor: Tensor) -> Tensor:
        with suppress(RuntimeError):  # sparse and quantised tensors may have no storage
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[0] += storage.nbytes()
        return tensor

    for p in model.parameters():
        keep(p)
    found[0] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found
