"""Models of losses between looks, for ``look="auto"``.

A look computes the loss and the row of a set. After a way u from there the loss is modelled by
``loss + row . u + c |u|^2``; the parts of a way between projected steps are added up. The next look finds the
error of the model, and a part of it is put down to the curvature c. Right after storing, the divergence from
stored outputs is zero, and so are its row and c: looks follow each other until c is known.

A step in which no loss may pass its bound is left alone. Others are projected with the rows of the last
looks, and with losses that are larger than modelled by the expected error. It grows with the square of the
way, as it did before the last looks, and it holds the standard error of a mean of few drawn examples: after a
draw of examples with small losses, many steps would be left alone. (A model of the row, ``row + 2 c u``,
which is exact for a loss that curves alike in all directions, takes steps back, and what they have learned,
where it is not.) As in a trust region method, the next look comes before the error is large, and after at
most twice the way; and before a step that is projected if its row has changed, by 2 c u, more than its
length. What a mean of few drawn examples is off by is no error of the model.

No copy of weights is needed: whenever a step is projected, weights are copied, and the model moves there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gemproj.torch.memory import Draw
from gemproj.torch.rows import Rows

# A row is computed again after so many steps at the latest, and after so many if its loss may pass its bound.
_MOST_STEPS, _MOST_PRESSED = 64, 8
# Part of an error that is put down to the curvature, and how much of an error is left after another look.
_CURVED, _LEFT = 0.3, 0.85
# Errors are relative to the loss, or to this fraction of the tolerance if that is more. The largest error
# that is accepted, and a share of the loss that is added to every error.
_SMALL, _ACCEPTED, _MARGIN = 0.1, 0.05, 0.1
# Largest error of a mean of drawn examples, in standard errors; weight of a look in the mean of variances.
# The mean of what was found and modelled has, after some looks, an error of so many standard errors.
_DRAWN, _POOLED, _AVERAGED = 3.0, 0.2, 3.0**-0.5
# Weights that are so many times farther away than the next look were set, as by a checkpoint.
_JUMP = 4.0
_NEW = torch.zeros((8, 1), dtype=torch.float64)  # what is known about a new row


class Forecast:
    """Models of the losses of all rows. On a device, nothing waits for their numbers.

    Attributes
    ----------
    names : list
        The set of each row.
    known : Tensor, shape (8, t)
        By row: the loss where the model is, above its stored value; the curvature c, and the error of the
        model, both for a way of length one; the relative variance of the losses of examples; since the look,
        the way and the number of steps up to where the model is; the way to the next look; and the standard
        error of the loss.
    age : int
        Steps since the model was moved.
    """

    def __init__(self) -> None:
        self.names: list[Any] = []
        self.known, self.age = _NEW[:, :0], 0
        # What is due and pressed, on its way to the host, and where it comes from.
        self._copied: tuple[Tensor, Any, Tensor] | None = None

    def forget(self, name: Any) -> None:
        """Begin anew for a set whose examples are others now."""
        self.names = [None if known == name else known for known in self.names]

    def due(self, rows: Rows, terms: Any, whole: bool) -> tuple[list[bool] | None, bool]:
        """Return which rows are computed again in a step that begins, and whether the step is projected.

        The losses of all rows become those of their models. None stands for all rows, as if they were new,
        which is so where any process says `whole`.
        """
        topology, late = rows.vector.topology, rows.vector.device.type == "cuda"
        excess, curvature, error, variance, since, steps, most, doubt = self.known
        step, tolerance = rows.vector.read_step(), torch.as_tensor(terms.tolerance)
        square, products = rows.products(step)
        self.age += 1
        way, steps = since + square.sqrt(), steps + self.age
        now = excess - products + curvature * square
        rows.losses = rows.stored + now

        def unsure(loss: Tensor, way: Tensor) -> Tensor:
            return error * way**2 + _MARGIN * loss.abs() + doubt

        # After one or two more steps like those since the model was moved. A fall may end.
        ahead = 2 if late else 1
        longer = 1.0 + ahead / self.age
        later = excess - torch.where(products < 0.0, longer, 1.0) * products + curvature * square * longer**2
        far = way * (1.0 + ahead / steps)
        safe = later + unsure(later, far) <= tolerance  # False for NaN
        flags = (far > most) | (steps + ahead > torch.where(safe, _MOST_STEPS, _MOST_PRESSED))
        # A row that has changed by more than its length does not tell where the loss rises now.
        flags = flags | (~safe & (2.0 * curvature * far > rows.norms))
        always = tolerance.isnan()
        if terms.weight is not None:  # then the row is a part of every step
            always = always | (torch.as_tensor(terms.weight) > 0.0)
        flags = torch.cat([flags | always, ~safe, flags.new_full((1,), whole)])
        if topology.world > 1:  # rounding may differ between processes, and all must do the same
            flags = topology.sum_values(flags.to(square.dtype)) > 0.0
        told = self._told(flags, always, rows.vector.device) if late else flags
        found = [True] * (len(flags) - 1) + [whole] if told is None or whole else told.tolist()
        if projects := any(found):
            rows.unsure = unsure(now, way)
            known = now, curvature, error, variance, way, steps, most, doubt
            self.known, self.age = torch.stack(known), 0
        return None if found[-1] else found[: len(rows)], projects

    def _told(self, flags: Tensor, always: Tensor, device: torch.device) -> Tensor | None:
        """Return the flags of the step before, which have been on the host for long: nothing waits.

        Rows that this step computes by them are not asked for again by its own flags, but `always`.
        """
        had, event, t = self._copied, torch.cuda.Event(), len(always)
        flags[:t] = always if had is None else (flags[:t] & ~had[2][:t]) | always
        self._copied = flags.to("cpu", non_blocking=True), event, flags
        event.record(torch.cuda.current_stream(device))
        if had is None:
            return None
        had[1].synchronize()
        return had[0]

    def take(self, rows: Rows, draws: Sequence[Draw], tolerance: Any, fresh: bool) -> None:
        """Take the losses of the rows of these draws, and learn from the errors of their models.

        With `fresh` they are all rows, which may be those of other sets than before: nothing is learned.
        """
        found, self.age = rows.losses - rows.stored, 0
        none = torch.zeros_like(found)
        if fresh:
            at = {name: k for k, name in enumerate(self.names)}
            every = torch.cat([self.known.to(_NEW), _NEW], dim=1)
            every = every[:, [at.get(name, -1) for name in rows.names]].to(found)
            _, curvature, error, variance, _, _, most, doubt = every
            self.names, self._copied = list(rows.names), None
            known = found, curvature, error, variance, none, none, most, doubt
            self.known = _sound(torch.stack(known), every)
            return
        looked, drawn = [False] * len(rows), [math.inf] * len(rows)
        for draw in draws:
            looked[draw.k] = True
            if draw.kept.promise.examples is not None:
                drawn[draw.k] = draw.total
        now, curvature, error, pooled, since, _, most, _ = self.known
        size = now.maximum(torch.as_tensor(_SMALL * tolerance).nan_to_num(0.0)).clamp(min=1e-15)
        variance = (rows.squares(draws) - found**2).clamp(min=0.0) / size**2
        variance = torch.where(pooled > 0.0, pooled + _POOLED * (variance - pooled), variance)
        doubt = size * (variance / found.new_tensor(drawn)).sqrt()
        apart, square = found - now, torch.where(since > 0.0, since, math.inf) ** 2
        by_draw = apart.clamp(-_DRAWN * doubt, _DRAWN * doubt)  # the part of the error that the draw explains
        curvature = (curvature + _CURVED * apart / square).clamp(min=0.0)
        error = (_LEFT * error).maximum((apart - by_draw).abs() / square)
        longest = (_ACCEPTED * (size + _DRAWN * doubt) / error).sqrt()  # infinite without an error
        set_back = (most > 0.0) & (since > _JUMP * most)
        most = torch.where(set_back, 0.0, longest.minimum(2.0 * since))
        # The mean of the drawn examples has an error of its own, and so has the model: their mean has less.
        known = found - 0.5 * by_draw, curvature, error, variance, none, none, most, _AVERAGED * doubt
        new = _sound(torch.stack(known), self.known)
        self.known = torch.where(torch.tensor(looked, device=found.device), new, self.known)

    def state_dict(self) -> dict[str, Any]:
        """Return what is known about the rows, by name."""
        return {"names": list(self.names), "known": self.known.cpu()}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Forecast:
        """Return the forecast of a state."""
        found = cls()
        found.names, found.known = list(state["names"]), state["known"].clone()
        return found


def _sound(new: Tensor, known: Tensor) -> Tensor:
    """Return what is known after a look; where its loss is not finite, as before, and the next step looks."""
    none = torch.zeros_like(known[:2])
    lost = torch.cat([new[:1].nan_to_num(0.0, 0.0, 0.0), known[1:4], none, none[:1] - 1.0, known[7:]])
    return torch.where(new.isfinite().all(dim=0), new, lost)
