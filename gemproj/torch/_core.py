"""The core as this package calls it: all that depends on the names of its private functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemproj._array import Blocks, Problem, namespace, wide_dtype
from gemproj._array import read_out as check_out
from gemproj._array import read_problem as check_problem
from gemproj._dual import read_options
from gemproj._dual import solve_problem as _solve_problem
from gemproj._gram import NARROW_ROUNDING, WIDE_ROUNDING, Gram, Measured
from gemproj._project import project_problem
from gemproj._solution import DualSolution
from gemproj.methods import GEM2017, AnyMethod, Equality
from gemproj.methods._method import check_count, check_number

__all__ = [
    "GEM2017",
    "AnyMethod",
    "Blocks",
    "DualSolution",
    "Measured",
    "Options",
    "Problem",
    "check_count",
    "check_number",
    "check_options",
    "check_out",
    "check_problem",
    "combine_into",
    "solve_problem",
    "sum_gram",
    "wide_dtype",
]


@dataclass(frozen=True, eq=False)
class Options:
    """The checked options of a projection."""

    method: Any
    margin: Any = 0.0
    penalty: Any = None
    equality: Any = False


def check_options(
    method: AnyMethod, *, margin: Any = 0.0, penalty: Any = None, equality: Any = False
) -> Options:
    """Check the options that do not depend on the data."""
    found = read_options(Equality() if equality is True else method, margin, penalty).method
    return Options(found, margin, penalty, equality)


def solve_problem(
    problem: Problem,
    options: Options,
    warm_start: Tensor | None = None,
    *,
    all_reduce: Callable[[Measured], Measured] | None = None,
) -> DualSolution:
    """Stages 1 and 2."""
    old = read_options(options.method, options.margin, options.penalty)
    return _solve_problem(problem, old, warm_start, total=all_reduce)


def combine_into(problem: Problem, sol: DualSolution, x: list[Tensor]) -> None:
    """Stage 3, written to x."""
    project_problem(problem, sol, problem.pack(x), x)


def sum_gram(part: Measured, problem: Problem, sum_over: Callable[[Tensor], Tensor]) -> Measured:
    """Sum the Gram matrices of shards, t*t + t + 1 numbers in one tensor."""
    (K, b, gg), t = part.raw(), problem.t
    packed = torch.cat([torch.as_tensor(a, device=problem.device).reshape(-1) for a in (K, b, gg)])
    sum_over(packed)
    whole: list[Any] = [packed[: t * t].reshape(t, t), packed[t * t : -1], packed[-1]]
    if not isinstance(K, Tensor):
        whole = [namespace(K).asarray(a.numpy()) for a in whole]
    # Other processes may have summed in another way, and certificates must be the same everywhere.
    rounding = WIDE_ROUNDING if problem.narrow == problem.wide else NARROW_ROUNDING
    return Measured(Gram(*whole), rounding)
