"""Promises about losses on stored examples, and the calls of these losses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gemproj._checks import check_count, check_number
from gemproj.torch.batches import Batch, Loss, Remembered, leaves_of, map_nested
from gemproj.torch.losses import model_loss
from gemproj.torch.parameters import mesh_of

Per = Literal["task", "label", "example", "all"]


@dataclass(frozen=True)
class Promise:
    """A condition on a loss of stored examples that every step keeps; by default, the loss must not rise.

    Parameters
    ----------
    loss : callable
        ``loss(model, batch)`` returns the mean over the examples, or one number per example, shape (n,); by
        default ``model(**batch).loss``. If the loss has a method ``outputs(model, batch)``, as
        `gemproj.torch.losses.Distillation` does, these outputs are stored with the examples, and the loss is
        called as ``loss(model, batch, outputs)``.
    per : {"task", "label", "example", "all"}, default "task"
        What each row of G is about: a set of examples; a label of a set; an example (on several processes,
        the mean of one example of each process); or all sets with equal promises together (A-GEM).
    examples : int, optional
        Number of examples drawn from each set (or label) at every step, without replacement until all are
        drawn. With ``per="all"``, the number drawn from all sets together. By default all examples.
    weight : float, default 0
        Weight with which each row is added to the gradient before the projection, as in replay: the lower
        bound of its multiplier (GEM's memory strength), in units of gradients. It is the weight of each set's
        mean loss; with ``per="example"``, of each loss; with ``per="all"``, of one mean over all sets.
    tolerance : float, optional
        The loss may rise up to a bound: its value when the examples were stored, plus the tolerance. By
        default no step raises the loss. Needs a loss with one number per example.
    repair : float, default 1
        Fraction of the excess over the bound that one step removes, above 0 and at most 1.
    equal : bool, default False
        Whether the loss must neither rise nor fall: ``G x = 0`` instead of ``G x >= 0``.
    penalty : float, optional
        Upper bound of the multiplier, at least `weight`. The promise may be broken if keeping it needs a
        larger multiplier.

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
            raise ValueError("weight and equal exclude each other: an equality cancels the added row.")
        if self.penalty is not None:
            check_number(self.penalty, "penalty", self.weight)
        if self.tolerance is None:
            if self.repair != 1.0:
                raise ValueError("repair is for a tolerance; without one, no step raises the loss.")
            return
        check_number(self.tolerance, "tolerance", 0.0)
        if self.equal:
            raise ValueError("tolerance and equal exclude each other: an equality forbids any change.")

    def numbers(self) -> tuple[Any, ...]:
        """Return all options except the loss; they must be equal on all processes of a training."""
        return (self.per, self.examples, self.weight, self.tolerance, self.repair, self.equal, self.penalty)


def check_function(loss: Any) -> None:
    """Raise unless the loss can be called as ``loss(model, batch)``."""
    kind = type(loss) if isinstance(loss, torch.nn.Module) else loss
    if getattr(kind, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        raise TypeError(
            f"loss is called as loss(model, batch), and {kind.__name__} takes predictions. Pass a function, "
            "such as lambda model, batch: cross_entropy(model(batch[0]), batch[1]), or CrossEntropy of "
            "gemproj.torch.losses."
        )
    if isinstance(loss, type):
        raise TypeError(f"loss is the class {loss.__name__}; pass an object of it, {loss.__name__}(...).")
    if not callable(loss):
        raise TypeError(f"loss must be a function of model and batch; found {type(loss).__name__}.")


def call_loss(
    loss: Loss, model: torch.nn.Module, examples: Batch | Remembered, n: int, name: tuple[Any, ...] = ()
) -> Tensor:
    """Return the loss of n examples, their mean or n numbers; stored outputs are passed to the loss.

    The loss of a single example has shape (1,).
    """
    if not isinstance(examples, Remembered):
        examples = Remembered(examples)
    given = (examples.outputs,) if "outputs" in examples.fields else ()
    if not given and getattr(loss, "outputs", None) is not None:
        raise ValueError(
            f"Examples{'' if name[:1] in ((), (None,)) else f' of {name[0]!r}'} are stored without outputs, "
            "which this loss needs. Store them with keep or end_task, with add(..., outputs=), with "
            "record(task, outputs=), or remove(task)."
        )
    with explained(examples.batch):
        value = loss(model, examples.batch, *given)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss(model, batch) must return a tensor; found {type(value).__name__}.")
        if mesh_of(value) is not None:  # with tensor parallelism and outputs that are not local
            value = value.full_tensor()  # type: ignore[attr-defined]
        if value.ndim == 1 and n == 1:  # a packed row has one number for each of its texts
            value = value.mean()
        if value.shape not in ((), (1,)) and value.shape != (n,):
            raise ValueError(
                "loss(model, batch) must return the mean over the examples, or one number for each of these "
                f"{n}, shape ({n},); found {tuple(value.shape)}. For logits, return their loss; for losses "
                "of tokens, (n, T) or (n * T,), the mean over the labelled tokens of each example, as "
                "CrossEntropy of gemproj.torch.losses does. For packed rows of several texts without "
                "padding, pass microbatch=1."
            )
    return value.reshape(1) if n == 1 else value


def stored_losses(batch: Batch, promise: Promise, name: Any) -> Tensor | None:
    """Return the stored losses of examples, shape (n,), or None; raise if a tolerance lacks them."""
    if isinstance(batch, Remembered) and "losses" in batch.fields:
        return batch.losses
    if promise.tolerance is not None:
        raise ValueError(
            f"tolerance needs the losses that examples{f' of {name[0]!r}' if name else ''} had when they "
            "were stored: use keep or end_task of GEM, memory.record(name, losses=...) or "
            "memory.add(..., losses=...)."
        )
    return None


@contextmanager
def explained(batch: Batch) -> Iterator[None]:
    """Add the shapes of the examples to an error in a loss."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # since Python 3.11
            shapes = map_nested(_shape_of, batch)
            error.add_note(f"The loss was called with stored examples, of shapes {shapes}.")
            tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
            if tensors and all(leaf.ndim == 1 for leaf in tensors):
                error.add_note(
                    "Their first dimension counts examples. If the batches are elements of a data set, pass "
                    "the data set, or a DataLoader of it, which collates. Lists in them need collate=, or "
                    "data.with_format('torch')."
                )
        raise


def _shape_of(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
