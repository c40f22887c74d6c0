"""Sums over processes: all that a sharded projection exchanges is t*t + t + 1 numbers.

Each process measures the columns that it holds; the Gram matrix of the whole is the sum. Every process then
solves the same small problem, to the same bits, and combines its own columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from gemproj._array import Array, Blocks, Problem, namespace, read_out, read_problem, wide_dtype
from gemproj._dual import read_options, solve_problem
from gemproj._gram import NARROW_ROUNDING, WIDE_ROUNDING, Gram, Measured
from gemproj._project import project_problem
from gemproj.methods import AnyMethod


def project(
    G: Blocks,
    g: Blocks,
    *,
    group: Any = None,
    method: AnyMethod = "exact",
    warm_start: Tensor | None = None,
    margin: float = 0.0,
    penalty: float | None = None,
    metric: Blocks | None = None,
    out: Blocks | None = None,
    solution: bool = False,
) -> Any:
    """Project a gradient whose entries are spread over processes; each gets its own entries of x.

    All processes of the group must call it, with the same number t of constraints, and hold different
    columns of the same G; a process may hold none. What several processes hold must be left out on all but
    one of them: for models made of `DTensor`, `gemproj.torch.GradientProjector` sees to that.

    Parameters
    ----------
    G : tensor, shape (t, n), or blocks
        The columns of the constraint matrix that this process holds.
    g : tensor, shape (n,), or blocks
        Its entries of the gradient.
    group : ProcessGroup, optional
        By default all processes.
    method, warm_start, margin, penalty, metric, out
        As in `gemproj.project`; the options must be the same on all processes.
    solution : bool, default False
        Whether to return the `gemproj.DualSolution` of the whole problem, too, the same everywhere.

    Returns
    -------
    tensor or blocks
        This process's entries of x; with `solution`, a pair.

    Raises
    ------
    ValueError
        On every process, where their numbers of constraints differ or a row is not finite anywhere.
    RuntimeError
        Where the arguments of another process are wrong, which raises what `gemproj.project` would.
    """
    failed, t = None, 0
    try:
        problem = read_problem(G, g, metric)
        if problem.batch:
            raise ValueError(f"G must have shape (t, n), one problem; found a batch of {problem.batch}.")
        options = read_options(method, margin, penalty)
        target, t = None if out is None else read_out(out, problem), problem.t
    except (TypeError, ValueError) as error:
        failed = error  # which the others have to hear of
    agree({"constraints": t}, _device_of(g), group, failed)
    sol = solve_problem(problem, options, warm_start, total=lambda part: total(part, problem, group))
    x = project_problem(problem, sol, out, target)
    return (x, sol.to(problem.xp, problem.device)) if solution else x


def total(part: Measured, problem: Problem, group: Any) -> Measured:
    """Sum what stage 1 measured on each process, in one all-reduce of t*t + t + 1 numbers."""
    K, b, gg = part.raw()
    xp, t = namespace(K), problem.t
    packed = torch.cat([torch.as_tensor(a, device=problem.device).reshape(-1) for a in (K, b, gg)])
    sum_over(packed, group)
    whole: list[Array] = [packed[: t * t].reshape(t, t), packed[t * t : -1], packed[-1]]
    if not isinstance(K, Tensor):
        whole = [xp.asarray(a.numpy()) for a in whole]
    # How the others summed is not known here, and certificates must be the same everywhere.
    rounding = WIDE_ROUNDING if problem.narrow == problem.wide else NARROW_ROUNDING
    return Measured(Gram(*whole), rounding)


def withdraw(t: int, device: Any, group: Any) -> None:
    """Take the place of `total` where nothing can be measured: NaN in the sum stops the others, too."""
    nothing = torch.full((t * t + t + 1,), math.nan, dtype=wide_dtype(torch, device), device=device)
    sum_over(nothing, group)


def agree(numbers: Mapping[str, int], device: Any, group: Any, failed: Exception | None = None) -> None:
    """Raise on every process, not on some, unless all have the same numbers and none has failed."""
    mine = [n for value in numbers.values() for n in (value, -value)] + [failed is not None]
    most = torch.tensor(mine, dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    if failed is not None:
        raise failed
    *bounds, stop = most.tolist()
    if stop:
        raise RuntimeError("Another process failed; its own message says why.")
    for (name, value), high, low in zip(numbers.items(), bounds[::2], bounds[1::2], strict=True):
        if high != -low:
            raise ValueError(
                f"Processes disagree on the number of {name}: {value} here, {-low} to {high} among all. "
                "Every process must have the same tasks in the same order."
            )


def sum_over(numbers: Tensor, group: Any) -> Tensor:
    """Add up the numbers of all processes in place."""
    dist.all_reduce(numbers, group=group)
    return numbers


def gather_counts(counts: Sequence[int], device: Any, group: Any) -> list[list[int]]:
    """Return the counts of each process."""
    mine = torch.tensor(list(counts), dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [theirs.tolist() for theirs in everyone]


def _device_of(g: Blocks) -> Any:
    tensors = (leaf for leaf in tree_flatten(g)[0] if isinstance(leaf, Tensor))
    return next((leaf.device for leaf in tensors), "cpu")
