"""A promise: what an optimizer's step must not do to a loss on stored examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from gemproj._checks import check_count, check_number
from gemproj.torch.batches import Loss
from gemproj.torch.calling import check_function
from gemproj.torch.losses import model_loss

Per = Literal["task", "label", "example", "all"]


@dataclass(frozen=True)
class Promise:
    """What each step keeps of a loss on stored examples; by default, that it does not rise.

    Parameters
    ----------
    loss : callable
        ``loss(model, batch)`` returns the mean over the examples, or one number for each, shape (n,); by
        default ``model(**batch).loss``. If it has a method ``outputs(model, batch)``, as
        `gemproj.torch.losses.Distillation` does, what that returns is stored with the examples, and the loss
        is called as ``loss(model, batch, outputs)``.
    per : {"task", "label", "example", "all"}, default "task"
        What has a row of G: each set of examples; each label of each set; each example; or all sets with an
        equal promise together (A-GEM).
    examples : int, optional
        So many fresh examples of each set (or label) at every step, without replacement until all were
        drawn; with ``per="all"``, of all sets together. By default all of them.
    weight : float, default 0
        The gradient of the loss is added with this weight before the projection, as in replay: the lower
        bound of the multiplier (GEM's memory strength). In units of gradients.
    tolerance : float, optional
        The loss may exceed its value when the examples were stored by this much, and may rise up to there.
        By default no step raises it. Needs a loss with one number per example.
    repair : float, default 1
        Share of the excess over the tolerance that one step takes back, above 0 and at most 1.
    equal : bool, default False
        Whether the loss must not fall either: ``G x = 0`` instead of ``G x >= 0``.
    penalty : float, optional
        The upper bound of the multiplier: a larger one is not paid for keeping the promise, which is then
        broken. At least `weight`.

    Examples
    --------
    >>> from gemproj.torch import Promise
    >>> from gemproj.torch.losses import Distillation
    >>> Promise(Distillation(top=32), tolerance=0.05).repair
    1.0
    """

    loss: Loss = model_loss
    per: Per = "task"
    examples: int | None = None
    weight: float = 0.0
    tolerance: float | None = None
    repair: float = 1.0
    equal: bool = False
    penalty: float | None = None

    def __post_init__(self) -> None:
        check_function(self.loss)
        if self.per not in get_args(Per):
            known = ", ".join(map(repr, get_args(Per)))
            raise ValueError(f"per must be one of {known}; found {self.per!r}.")
        if self.examples is not None:
            check_count(self.examples, "examples", 1)
        check_number(self.weight, "weight", 0.0)
        check_number(self.repair, "repair", 0.0, strict=True)
        if self.repair > 1.0:
            raise ValueError(f"repair must be at most 1; found {self.repair}.")
        if not isinstance(self.equal, bool):
            raise TypeError(f"equal must be True or False; found {self.equal!r}.")
        if self.equal and self.weight:
            raise ValueError("weight and equal exclude each other: an equality cancels what is added.")
        if self.penalty is not None:
            check_number(self.penalty, "penalty", self.weight)
        if self.tolerance is None:
            if self.repair != 1.0:
                raise ValueError("repair is for a tolerance; without one, no step raises the loss.")
            return
        check_number(self.tolerance, "tolerance", 0.0)
        if self.equal:
            raise ValueError("tolerance and equal exclude each other: an equality has no side to stay on.")

    def numbers(self) -> tuple[Any, ...]:
        """Return all but the loss, in which processes that train together must agree."""
        return (self.per, self.examples, self.weight, self.tolerance, self.repair, self.equal, self.penalty)
