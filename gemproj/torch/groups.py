"""A cone for each group of parameters: projections layer by layer, solved as one batch.

Where ``G_l x_l >= 0`` holds for the columns of each group l, the sum ``G x >= 0`` holds, too: promises by
groups are stronger than one about the whole, and take more away from the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gemproj._arrays import namespace
from gemproj._combine import write_rows
from gemproj._dual import Options, solve_measured, solve_problem
from gemproj._solution import DualSolution
from gemproj._tspace import Gram, Measured
from gemproj.backends import select
from gemproj.methods import Status
from gemproj.torch.constraints import ConstraintMatrix, numbers
from gemproj.torch.parameters import ParameterVector

Groups = Literal["tensor", "module"] | Callable[[str], Hashable]


def members(vector: ParameterVector, groups: Groups) -> list[list[bool]]:
    """Return which parameters belong to each group, in the order of their first ones."""
    if groups != "tensor" and not all(vector.names):
        raise ValueError(
            "groups are made from the names of parameters: pass model.named_parameters() as parameters."
        )
    keys: list[Hashable]
    if groups == "tensor":
        keys = list(range(len(vector.parameters)))
    elif groups == "module":
        keys = [name.rpartition(".")[0] for name in vector.names]
    elif callable(groups):
        keys = [groups(name) for name in vector.names]
    else:
        raise ValueError(
            f"groups must be 'tensor', 'module' or a function of the names of parameters; found {groups!r}."
        )
    return [[key == one for key in keys] for one in dict.fromkeys(keys)]


def project_groups(
    matrix: ConstraintMatrix,
    v: Tensor,
    options: Options,
    groups: Sequence[Sequence[bool]],
    gate: bool,
    warm_start: Tensor | None = None,
    moving: Sequence[bool] | None = None,
    weight: Tensor | None = None,
) -> tuple[DualSolution, bool]:
    """Project each group of columns of v in place, as `ConstraintMatrix.project` does for all of them.

    With `gate`, only where v as a whole violates a constraint. The solution has one problem per group.
    """
    vector, topology = matrix.vector, matrix.vector.topology
    here, owned = [], []
    with topology.measurement(len(groups) * numbers(len(matrix))):
        for group in groups:
            chosen = group if moving is None else [a and b for a, b in zip(group, moving, strict=True)]
            columns, own = vector.slices(chosen), vector.slices(chosen, owned=True)
            here.append(matrix.problem(v, weight, columns))
            owned.append(here[-1] if own == columns else matrix.problem(v, weight, own))
        grams = [select(problem).gram(problem) for problem in owned]
    xp = namespace(grams[0].gram.b)
    gram = Gram(*(xp.stack(list(arrays)) for arrays in zip(*(one.gram for one in grams), strict=True)))
    measured = Measured(gram, max(one.rounding for one in grams))
    all_reduce = topology.gram_sum(owned[0])
    start = None if warm_start is None else owned[0].to_host(warm_start)
    sol = solve_measured(
        measured if all_reduce is None else all_reduce(measured), options, start, torch, vector.device
    )
    if all_reduce is None and here[0].host:
        # Where K cannot tell rows apart, the rows themselves can.
        for k in torch.nonzero(sol.status & int(Status.UNRESOLVED)).flatten().tolist():
            one = solve_problem(here[k], options).to(torch, vector.device)
            sol.multipliers[k], sol.status[k] = one.multipliers, one.status
    if gate:
        violated = (sol.gram.b.sum(0) < 0).any()
        left = (~violated).to(sol.status.dtype) * int(Status.APPROXIMATE)
        sol = replace(sol, multipliers=sol.multipliers * violated, status=sol.status | left)
    changed = vector.device.type != "cpu" or bool(sol.multipliers.any())
    if changed:
        for problem, lam in zip(here, sol.multipliers, strict=True):
            write_rows(problem, problem.to_host(lam), problem.vector)
    return sol, changed
