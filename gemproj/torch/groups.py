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
from gemproj._combine import write_x
from gemproj._gram import measure
from gemproj._options import Options
from gemproj._solution import DualSolution
from gemproj._tspace import Gram, Measured
from gemproj.methods import Status
from gemproj.torch.constraints import ConstraintMatrix
from gemproj.torch.parameters import ParameterVector
from gemproj.torch.stream import measure_sum, solve_measured

Groups = Literal["tensor", "module"] | Callable[[str], Hashable]


def members(vector: ParameterVector, groups: Groups) -> list[list[int]]:
    """Return the numbers of the parameters of each group, in the order of their first ones."""
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
    found: dict[Hashable, list[int]] = {}
    for j, key in enumerate(keys):
        found.setdefault(key, []).append(j)
    return list(found.values())


def project_groups(
    matrix: ConstraintMatrix,
    v: Tensor,
    options: Options,
    groups: Sequence[Sequence[int]],
    gate: bool,
    warm_start: Tensor | None = None,
    moving: Sequence[bool] | None = None,
    weight: Tensor | None = None,
) -> tuple[DualSolution, bool]:
    """Project each group of columns of v in place, as `ConstraintMatrix.project` does for all of them.

    With `gate`, only where v as a whole violates a constraint. The solution has one problem per group.
    """
    vector, topology = matrix.vector, matrix.vector.topology
    here, grams = [], []
    with topology.measurement(len(matrix), len(groups)):
        for group in groups:
            chosen = group if moving is None else [j for j in group if moving[j]]
            columns, owned = vector.slices(chosen), vector.slices(chosen, owned=True)
            here.append(matrix.problems(v, weight, columns))
            grams.append(measure_sum(here[-1] if owned == columns else matrix.problems(v, weight, owned)))
    xp = namespace(grams[0].gram.b)
    gram = Gram(*(xp.stack(list(arrays)) for arrays in zip(*(one.gram for one in grams), strict=True)))
    rounding = max(one.rounding for one in grams)
    part = Measured(gram, rounding, grams[0].to_caller)
    measured = topology.sum_gram(part, vector.dtype == torch.float64)
    sol = solve_measured(measured, options, warm_start).to(measured.to_caller)
    host = vector.device.type == "cpu"
    if measured is part and host and not matrix.streamed:
        # Where K cannot tell rows apart, the rows themselves can.
        for k in torch.nonzero(sol.status & int(Status.UNRESOLVED)).flatten().tolist():
            again = solve_measured(measure(*here[k]), options, None).to(measured.to_caller)
            sol.multipliers[k], sol.status[k] = again.multipliers, again.status
    if gate:
        violated = sol.bounds.violated(sol.gram.b.sum(0)).any()
        left = (~violated).to(sol.status.dtype) * int(Status.APPROXIMATE)
        sol = replace(sol, multipliers=sol.multipliers * violated, _status=sol.status | left)
    changed = not host or bool(sol.multipliers.any())
    if changed:
        for problems, lam in zip(here, sol.multipliers, strict=True):
            for problem in problems:
                write_x(problem, problem.to_host(lam), problem.vector)
    return sol, changed
