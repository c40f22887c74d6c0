"""The processes of a training, with replicas or shards of the parameters.

The Gram matrix is a sum over columns. Each process measures the columns that it owns, and one all-reduce
sums the results, t*t + t + 1 numbers. Then every process solves the same small problem, with bitwise equal
data, and combines its own columns.
"""

from __future__ import annotations

import logging
import math
import reprlib
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemproj._arrays import on_host, wide_dtype
from gemproj._tspace import Gram, Measured

# Seconds after which a process that waits for the others says so.
PATIENCE = 30.0


class Processes:
    """The processes that train a model together; without a group, this one alone.

    In data parallelism, parameters and rows are replicated, and each process has its own examples. With FSDP2
    and tensor parallelism, each has its own columns of G, and backward passes are `collective`: all processes
    must join them. All therefore run the same number of passes, and an error within a pass cannot be reported
    to other processes. They average gradients over processes unless they are not `averaged`. Of the columns
    of each process, the first `plain` ones are not sharded.
    """

    def __init__(
        self, device: Any, group: Any, *, collective: bool = False, averaged: bool = True, plain: int = 0
    ) -> None:
        group = dist.group.WORLD if collective and group is None else group
        if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup, such as dist.group.WORLD; found "
                f"{type(group).__name__}."
            )
        self._device, self.collective, self._plain = device, collective, plain
        self.group: Any = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world = 1 if group is None else dist.get_world_size(group)
        self._divisor = self.world if collective and averaged else 1

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self  # process groups cannot be copied

    @contextmanager
    def agreement(self, facts: Mapping[str, Any]) -> Iterator[None]:
        """Raise on all processes if the block fails on one process, or if `facts` differ at its end."""
        try:
            yield
        except Exception:
            self._compare(facts, failed=True)
            raise
        self._compare(facts)

    @contextmanager
    def meeting(self, call: str, facts: Mapping[str, Any]) -> Iterator[None]:
        """Do what `agreement` does, and say so if others do not make this call."""
        said = f"{call} waits for the other processes of the training: all of them must call it."
        timer = threading.Timer(PATIENCE, logging.getLogger("gemproj").warning, [said])
        timer.daemon = True
        if self.group is not None:
            timer.start()
        try:
            with self.agreement(facts):
                yield
        finally:
            timer.cancel()

    def passes(self) -> AbstractContextManager[None]:
        """Raise on all processes if a pass in the block fails on one, unless passes are collective."""
        return nullcontext() if self.collective else self.agreement({})

    def plan(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return, per row, the number of examples on all processes and the number that local passes cover."""
        everyone = self._gather(counts)
        columns = list(zip(*everyone, strict=True))
        totals = [sum(column) for column in columns]
        if 0 in totals or (self.collective and any(0 in row for row in everyone)):
            raise ValueError(f"Every process needs examples of every set; found {list(counts)} on this one.")
        return totals, [max(column) for column in columns] if self.collective else list(counts)

    def weight(self, n: int, total: int) -> float:
        """Return the weight of the mean loss of n local examples, out of `total` on all processes."""
        return self._divisor * n / total

    def least(self, n: int) -> int:
        """Return the smallest n of all processes."""
        return min(map(min, self._gather([n])))

    def reduce(self, rows: Tensor, reached: list[bool]) -> list[bool]:
        """Sum rows over processes in place; return which parameters are `reached` on any process."""
        if self.collective and self._plain:  # no pass averages them; in tensor parallelism they are equal
            for row in rows.view(-1, rows.shape[-1]):
                self.sum_values(row[: self._plain])
        if self.collective or self.group is None:
            return reached
        self.sum(rows)
        counts = self.sum(torch.tensor(reached, dtype=torch.int32, device=self._device))
        return [n > 0 for n in counts.tolist()]

    @contextmanager
    def measurement(self, t: int) -> Iterator[None]:
        """If the block raises, add NaN to the `sum_gram` of t rows; the other processes then also raise."""
        try:
            yield
        except ValueError:
            wide = wide_dtype(torch, self._device)
            self.sum_shards(torch.full((t * t + t + 1,), math.nan, dtype=wide, device=self._device))
            raise

    def sum_gram(self, part: Measured) -> Measured:
        """Return the sum of the Gram matrices of all processes."""
        if not self.collective:
            return part
        parts = [torch.as_tensor(a, device=self._device) for a in part.gram]
        packed = self.sum_shards(torch.cat([a.reshape(-1) for a in parts]))
        pieces = packed.split([a.numel() for a in parts])
        whole: list[Any] = [piece.reshape(a.shape) for piece, a in zip(pieces, parts, strict=True)]
        if on_host(self._device):
            whole = [a.numpy() for a in whole]
        return Measured(Gram(*whole), part.eps, part.to_caller)

    def sum_shards(self, values: Tensor) -> Tensor:
        """Sum values over processes in place; each process has computed them from the columns it owns."""
        return self.sum(values) if self.collective else values

    def sum_values(self, values: Tensor) -> Tensor:
        """Sum values over processes in place; each process has multiplied its values by its `weight`."""
        return self.sum(values) if self._divisor == 1 else self.sum(values).div_(self._divisor)

    def sum(self, values: Tensor) -> Tensor:
        """Sum values over processes in place."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def sum_distinct(self, values: Tensor) -> Tensor:
        """Sum values over processes; equal ones, as of equal examples in tensor parallelism, count once."""
        return values if self.group is None else torch.unique(self._all(values), dim=0).sum(0)

    def _compare(self, facts: Mapping[str, Any], failed: bool = False) -> None:
        if self.group is None:
            return
        digests = [zlib.crc32(repr(_plain(value)).encode()) for value in facts.values()]
        stops, *columns = zip(*self._gather([int(failed), *digests]), strict=True)
        if failed:
            return  # this process raises its own error
        if any(stops):
            raise RuntimeError("Another process failed; its own message says why.")
        for (name, value), theirs in zip(facts.items(), columns, strict=True):
            if len(set(theirs)) > 1:
                raise ValueError(
                    f"Processes disagree on the {name}: {reprlib.repr(value)} on this one. Every process "
                    "must have the same options, and the same sets in the same order."
                )

    def _gather(self, counts: Sequence[int]) -> list[list[int]]:
        if self.group is None:
            return [list(counts)]
        return self._all(torch.tensor(list(counts), dtype=torch.int64, device=self._device)).tolist()

    def _all(self, mine: Tensor) -> Tensor:
        """Return the values of all processes, one row for each."""
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine, group=self.group)
        return torch.stack(everyone)


def everyone() -> Any:
    """Return the group of all processes; None if there is only one process."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return dist.group.WORLD if several else None


def check_alone(topology: Processes) -> None:
    """Raise if several processes are initialised, but how they train a model together is unknown."""
    if everyone() is not None and topology.group is None:
        raise ValueError(
            f"{dist.get_world_size()} processes are initialised, and each would project on its own, so that "
            "their parameters would drift apart. Pass the model that DistributedDataParallel or fully_shard "
            "returned (FSDP1 cannot be projected), or process_group=dist.group.WORLD; if each process trains "
            "its own model, process_group=dist.new_subgroups(1)[0]."
        )


def _plain(value: Any) -> Any:
    """Return a value that processes can compare; objects, whose repr may be an address, become type names."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__
