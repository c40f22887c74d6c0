"""The cone of directions that raise no past loss, to first order: projections onto it, and its slopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gemproj._array import Problem, read_problem, wide_dtype
from gemproj._dual import Options, solve_problem
from gemproj._project import project_problem
from gemproj._solution import DualSolution
from gemproj.torch.constraints import ConstraintRows
from gemproj.torch.distributed import sum_over, total, withdraw
from gemproj.torch.layout import Layout


class Cone:
    """``{x : G x >= 0}`` for the constraint rows G of the parameters of a layout, over all its processes.

    Attributes
    ----------
    layout : Layout
    rows : ConstraintRows
    warm : dict of Tensor
        Multipliers of the last projection, by what was projected.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.rows = ConstraintRows(layout)
        self.warm: dict[str, Tensor] = {}

    def reset(self) -> None:
        """Forget the rows and the warm start."""
        self.rows.clear()
        self.warm = {}

    def project(
        self,
        name: str,
        v: Tensor,
        options: Options,
        moving: Sequence[bool] | None = None,
        weight: Tensor | None = None,
    ) -> tuple[DualSolution, bool]:
        """Project a vector in place, on the columns of the parameters that move; tell whether it changed.

        All columns that are here are changed; what several processes hold is measured by one of them.
        """
        layout, t, group = self.layout, len(self.rows), self.layout.group
        start = self.warm.get(name)
        if start is not None and len(start) != t:
            start = None
        if layout.sharded:
            try:
                whole = self._problem(v, weight, layout.spans(moving))
                measured = self._problem(v, weight, layout.spans(moving, counted=True))
            except ValueError:
                withdraw(t, layout.device, group)
                raise
            sol = solve_problem(measured, options, start, total=lambda part: total(part, measured, group))
        else:
            whole = self._problem(v, weight, layout.spans(moving))
            sol = solve_problem(whole, options, start)
        # Only where looking is free: what does not change need not be written.
        changed = not whole.host or sol.keep is not None or bool(sol.multipliers.any())
        if changed:
            project_problem(whole, sol, whole.pack(whole.vector), whole.vector)
        sol = sol.to(whole.xp, whole.device)
        self.warm[name] = sol.multipliers
        return sol, changed

    def slopes(self, step: Tensor) -> Tensor:
        """Return the cosine between a step and each constraint, zero where one of them is zero."""
        layout = self.layout
        G, wide = self.rows.matrix, wide_dtype(torch, step.device)
        parts = [(G[:, at], step[at]) for at in layout.counted]
        with torch.autocast(step.device.type, enabled=False):  # the caller's would round these products
            along = [(rows @ v).to(wide) for rows, v in parts]
        products = [
            torch.stack(along).sum(0),
            self.rows.squares,
            torch.stack([torch.linalg.vector_norm(v, dtype=wide) for _, v in parts]).square().sum(0, True),
        ]
        packed = torch.cat(products)
        if layout.sharded:
            sum_over(packed, layout.group)
        t = len(products[0])
        sizes = packed[t:-1].sqrt() * packed[-1].sqrt()
        return torch.where(sizes > 0, packed[:t] / sizes, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the rows and of the warm start."""
        warm = {name: lam.clone() for name, lam in self.warm.items()}
        return {"constraints": self.rows.state_dict(), "warm": warm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, onto the device of the parameters."""
        self.rows.load_state_dict(state["constraints"])
        self.warm = {name: lam.to(self.layout.device, copy=True) for name, lam in state["warm"].items()}

    def _problem(self, v: Tensor, weight: Tensor | None, spans: list[slice]) -> Problem:
        G = self.rows.matrix
        if spans == [slice(0, self.layout.d)]:
            return read_problem(G, v, weight)
        weights = None if weight is None else [weight[at] for at in spans]
        return read_problem([G[:, at] for at in spans], [v[at] for at in spans], weights)
