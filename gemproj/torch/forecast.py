"""Forecasts of losses, from which ``look="auto"`` decides when the row of a set is computed again.

After a way u from the weights of its last look, a loss is forecast to second order::

    loss + row . u + c |u|^2,    c = (loss - stored) / |w|^2,

where w is the way from the weights where the loss was stored to those of the last look. The divergence from
stored outputs is zero there, and so is its gradient: a row of that time says nothing, and c is the curvature
along the way that was taken. The forecast is exact for a quadratic loss along a line. It needs no copy of
weights: u is measured from the copy that the last projected step has made, and |w| is a sum of such lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gemproj.torch.rows import Rows

# A row is computed again after so many steps at the latest.
_MOST_STEPS = 64
# The first safety; how much of what is above one is left after a look; and its largest value.
_SAFETY, _DECAY, _MOST_SAFETY = 1.5, 0.9, 4.0
# Errors of a forecast are relative to the forecast, or to this fraction of the tolerance if it is smaller.
_SMALL = 0.1
# Fraction of the loss at the last look below which weights have been set back.
_BACK = 1.0 / 16.0
# What is known about each row, one after the other; those of a new row.
_NEW = torch.tensor([[0.0], [0.0], [_SAFETY], [0.0], [0.0], [0.0], [0.0]], dtype=torch.float64)


class Forecast:
    """Forecasts of the losses of all rows. On a device, nothing waits for its numbers.

    Attributes
    ----------
    names : list
        The set of each row.
    known : Tensor, shape (7, t)
        By row: the loss at its last look, above its stored value; the way |w| from where it was stored to
        this look; the safety; since the look the rise to first order, the way up to the last projected step,
        and the number of steps; and the way between the last two looks.
    """

    def __init__(self) -> None:
        self.names: list[Any] = []
        self.known = _NEW[:, :0]
        self._copied: tuple[Tensor, Any] | None = None  # which rows are due, on their way to the host
        self._pressed: Tensor | None = None  # which rows the last step needed, if it was projected

    def forget(self, name: Any) -> None:
        """Begin anew for a set whose examples are others now."""
        self.names = [None if known == name else known for known in self.names]

    def due(self, rows: Rows, terms: Any, whole: bool) -> list[bool]:
        """Return which rows are computed again in a step that begins, and update the losses of all rows.

        A row is computed again if its loss may pass the bound in this step. All rows are due if any process
        says `whole`.
        """
        topology, late = rows.vector.topology, rows.vector.device.type == "cuda"
        square, products = rows.products(rows.vector.read_step())
        _, _, safety, rise, since, steps, gap = self.known
        steps += 1
        self._rise, self._since = rise - products, since + square.sqrt()
        self._now = self._ahead(0)
        rows.losses = rows.stored + self._now
        ahead = 2 if late else 1
        forecast = self._ahead(ahead)  # it may be below zero
        kept = forecast + (safety - 1.0) * forecast.abs() <= torch.as_tensor(terms.tolerance)  # False for NaN
        # Beyond twice the way between the last two looks, the forecast is a guess.
        near = self._since * (1.0 + ahead / steps) <= 2.0 * gap
        flags = ~(kept & near & (steps + ahead <= _MOST_STEPS)) | whole
        if self._pressed is not None:  # without the last projection this loss would have risen more
            flags, self._pressed = flags | self._pressed, None
        if terms.weight is not None:  # then the row is a part of every step
            flags = flags | (torch.as_tensor(terms.weight) > 0.0)
        if topology.world > 1:  # rounding may differ between processes, and all must do the same
            flags = topology.sum_values(flags.to(square.dtype)) > 0.0
        if not late:
            return flags.tolist()
        # Flags are read in the next step, when they have been on the host for long: nothing waits.
        had, event = self._copied, torch.cuda.Event()
        self._copied = flags.to("cpu", non_blocking=True), event
        event.record(torch.cuda.current_stream(rows.vector.device))
        if had is None or whole:
            return [True] * len(rows)
        had[1].synchronize()
        return had[0].tolist()

    def _ahead(self, steps: int) -> Tensor:
        """Return the losses above their stored values after so many more steps like those since the look."""
        excess, way, _, _, _, age, _ = self.known
        longer = 1.0 + steps / age
        curvature = torch.where(way > 0.0, excess.clamp(min=0.0) / way**2, 0.0)
        rise = torch.where(self._rise > 0.0, self._rise * longer, self._rise)
        return excess + rise + curvature * (self._since * longer) ** 2

    def take(self, rows: Rows, due: Sequence[bool] | None, tolerance: Any) -> None:
        """Take the losses of the rows that are due, and learn from the errors of their forecasts.

        None stands for all rows, which may be those of other sets than before: then nothing is learned.
        """
        found = rows.losses - rows.stored
        if due is None:
            at = {name: k for k, name in enumerate(self.names)}
            every = torch.cat([self.known.to(_NEW), _NEW], dim=1)
            _, way, safety, _, since, *_ = every[:, [at.get(name, -1) for name in rows.names]].to(found)
            self.names, none = list(rows.names), torch.zeros_like(found)
            self._copied = self._pressed = None
            self.known = torch.stack([found, way + since, safety, *[none] * 4])
            return
        _, way, safety, _, _, steps, gap = self.known
        expected = self._now.maximum(torch.as_tensor(_SMALL * tolerance)).clamp(min=1e-30)
        error = (found / expected).clamp(max=_MOST_SAFETY).nan_to_num(0.0)  # NaN without a tolerance
        safer, none = error.maximum(1.0 + _DECAY * (safety - 1.0)), torch.zeros_like(found)
        # Weights that were set back, as by a checkpoint, are near where the loss was stored, however long the
        # way was: then the loss is much smaller than at the last look, and the way begins anew.
        back = (way > 0.0) & (found.abs() < _BACK * self.known[0])
        # A mean of the drawn examples has an error of its own, and so has the forecast: their mean has less.
        mean = torch.where((way > 0.0) & ~back, 0.5 * (found + self._now), found)
        ways = torch.where(back, none, torch.stack([way + self._since, self._since]))
        fresh = [mean, ways[0], safer, none, none, none, ways[1]]
        old = [self.known[0], way, safety, self._rise, self._since, steps, gap]
        self.known = torch.where(torch.tensor(due, device=found.device), torch.stack(fresh), torch.stack(old))

    def press(self, solutions: Sequence[Any], device: torch.device) -> None:
        """Note which rows were active in the projections of a step; the next step may press as well."""
        found = [torch.as_tensor(sol.multipliers, device=device) != 0.0 for sol in solutions if sol]
        self._pressed = torch.stack(found).any(0) if found else None

    def state_dict(self) -> dict[str, Any]:
        """Return what is known about the rows, by name."""
        return {"names": list(self.names), "known": self.known.cpu()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Forecast:
        """Return the forecast of a state."""
        found = cls()
        found.names, found.known = list(state["names"]), state["known"].clone()
        return found
