"""The options of a projection that follow from the promises about the rows: bounds of multipliers, and h.

For the step s of an optimizer, a promise with a tolerance requires ``G s >= repair * (loss - bound)``, the
discrete form of a control barrier condition. To first order, this gives
``loss' - bound <= (1 - repair) (loss - bound)``. A loss above its bound returns to the bound geometrically,
and a loss below its bound may rise towards it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from gemproj._arrays import namespace, to_numpy, wide_dtype
from gemproj._bounds import Options, accepted, check_accepted, check_options
from gemproj._tspace import Gram
from gemproj.methods import GEM2017, AnyMethod, as_method
from gemproj.torch.changes import Change, On
from gemproj.torch.promise import Promise

# Minimum rate, which keeps h finite for a learning rate of zero, as in the first step of a warmup.
_SMALLEST_RATE = 1e-30
# A gradient is zero up to rounding if its norm is at most this many eps times that of another gradient.
_NOISE = 16.0


@dataclass(frozen=True)
class Terms:
    """The numbers of the promises about the rows: one number for all rows, or a tensor (t,) if rows differ.

    Attributes
    ----------
    weight, penalty, equal : float, float or None, bool; or Tensor
        Numbers of the promises. An infinite penalty means no penalty.
    tolerance, repair : float or Tensor
        Numbers of the promises. NaN means no tolerance; all tolerances are NaN if `held` is False.
    held : bool
        Whether any promise has a tolerance.
    compared : bool or Tensor
        Whether the loss compares outputs with stored outputs, so it begins at zero; False with `equal`.
    """

    weight: Any = 0.0
    penalty: Any = None
    equal: Any = False
    tolerance: Any = float("nan")
    repair: Any = 1.0
    held: bool = False
    compared: Any = False

    @classmethod
    def of(cls, promises: Sequence[Promise], device: torch.device) -> Terms:
        """Return the terms of the promises about the rows, in their order."""

        def shared(values: list[Any]) -> Any:
            if values.count(values[0]) == len(values):
                return values[0]
            kind = torch.bool if isinstance(values[0], bool) else wide_dtype(torch, device)
            return torch.tensor(values, dtype=kind, device=device)

        if not promises:
            return cls()
        none, infinite = float("nan"), float("inf")  # one NaN object, which `list.count` matches by identity
        penalty = shared([infinite if p.penalty is None else p.penalty for p in promises])
        return cls(
            shared([p.weight for p in promises]),
            None if isinstance(penalty, float) and penalty == infinite else penalty,
            shared([p.equal for p in promises]),
            shared([none if p.tolerance is None else p.tolerance for p in promises]),
            shared([p.repair for p in promises]),
            any(p.tolerance is not None for p in promises),
            shared([not p.equal and hasattr(p.loss, "outputs") for p in promises]),
        )

    @property
    def in_units(self) -> bool:
        """Whether there is a weight or a penalty; both are in units of gradients."""
        return isinstance(self.weight, Tensor) or bool(self.weight) or self.penalty is not None

    def options(self, method: AnyMethod, weighted: bool, change: Change, G: Any) -> Options:
        """Return the options for the projection of a change; weights are included if `weighted` is True.

        `G` is the `ConstraintMatrix`, which has the losses of the rows.
        """
        weight, penalty = self.weight if weighted else 0.0, self.penalty
        if penalty is not None or isinstance(weight, Tensor) or weight:
            scale = change.scale()
            weight = weight * scale
            penalty = None if penalty is None else penalty * scale
        found = check_options(method, margin=weight, penalty=penalty, equality=self.equal)
        h = self._right_hand_side(change, G) if "h" in accepted(found.method) else None
        return found if h is None else Options(found.method, h, weight, penalty, self.equal)

    def excess(self, losses: Tensor, stored: Tensor) -> Tensor | None:
        """Return losses minus their bounds, shape (t,), NaN without a bound; None if no row has a bound."""
        return losses - stored - self.tolerance if self.held else None

    def _right_hand_side(self, change: Change, G: Any) -> Callable[[Gram], Any] | None:
        """Return h as a function of the Gram matrix; None if h is zero."""
        if not self.held and self.compared is False:
            return None
        losses, dtype = G.losses, G.vector.dtype
        noise, least = rounding(losses, dtype), _NOISE * torch.finfo(dtype).eps
        wanted = near = None
        excess = self.excess(losses, G.stored)
        if excess is not None:
            excess = torch.where((excess > 0.0) & (excess <= noise), 0.0, excess)  # rounding errors
            wanted = self.repair * excess / max(change.rate(), _SMALLEST_RATE)
            if isinstance(self.tolerance, Tensor):
                wanted = torch.where(self.tolerance.isnan(), 0.0, wanted)
        if self.compared is not False:
            near, unit = (losses.abs() <= noise) & self.compared, change.unit()
            if near.device.type == "cpu" and not bool(near.any()):
                near = None
        if wanted is None and near is None:
            return None

        def right(gram: Gram) -> Any:
            xp, host = namespace(gram.b), not isinstance(gram.b, Tensor)
            norms, size = xp.sqrt(xp.linalg.diagonal(gram.K)), xp.sqrt(gram.gg)
            h = xp.zeros_like(norms)
            if wanted is not None:
                # An h above |g_k| |s| would need a step longer than s, and a much longer step near a minimum
                # of a loss, where the row vanishes.
                most = xp.sqrt(xp.linalg.diagonal(gram.K) * gram.gg)
                h = xp.minimum(to_numpy(wanted) if host else wanted, most)
            if near is None:
                return h
            # A divergence from outputs that were just stored is zero up to rounding, and so is its gradient.
            # If the row of such a loss is below the rounding error of g, a low h makes the row inactive.
            small = (to_numpy(near) if host else near) & (unit * norms <= least * size)
            return xp.where(small, -norms * size, h)

        return right


def check_terms(promise: Promise, method: AnyMethod, on: On) -> None:
    """Raise if `on` is invalid, or if the method cannot use an option of the promise or project steps."""
    if on not in get_args(On):
        raise ValueError(f"on must be one of {', '.join(map(repr, get_args(On)))}; found {on!r}.")
    found = as_method(method)
    given = {
        ("weight", "margin"): promise.weight > 0.0,
        ("penalty", "penalty"): promise.penalty is not None,
        ("equal", "equality"): promise.equal,
        ("tolerance", "h"): promise.tolerance is not None,
    }
    check_accepted(found, [names for names in given if given[names]])
    if on != "gradient" and isinstance(found, GEM2017):
        raise ValueError(
            f"{found!r} is made for gradients, in their units; use on='gradient', or another method "
            "for steps."
        )


def rounding(losses: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest rounding difference between two computations of the same losses in a dtype."""
    return 4.0 * torch.finfo(dtype).eps * (1.0 + losses.abs())
