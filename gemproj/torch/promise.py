"""Promises about losses on kept examples, and the calls of these losses."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gemproj._checks import STRENGTHS, check_count, check_number, is_number
from gemproj._warn import warn
from gemproj.torch.data import Batch, kind_of, leaves_of, map_nested
from gemproj.torch.losses import Distillation, model_loss
from gemproj.torch.vector import mesh_of

# Called as (model, batch) or (model, batch, outputs); returns the mean loss, or one loss per example.
Loss = Callable[..., Tensor]

# The tolerance of losses that compare with stored outputs, in nats: small beside the divergence that
# fine-tuning causes (.2 to .3 for a chat model), and large beside its rounding.
_USUAL = 0.05
# Number of characters after which the description of a batch is cut.
_LONGEST = 1_000


@dataclass(frozen=True)
class Promise:
    """A condition on a loss of kept examples that every step keeps; by default, the loss must not rise.

    Parameters
    ----------
    loss : callable
        ``loss(model, batch)`` returns the mean over the examples, or one number per example, shape (n,); by
        default ``model(**batch).loss``. If the loss has a method ``outputs(model, batch)``, as
        `gemproj.torch.losses.Distillation` does, these outputs are stored with the examples, and the loss is
        called as ``loss(model, batch, outputs)``. If it has a method ``labelled(batch)``, which returns one
        boolean per example, examples without a label are left out.
    examples : int or None, default 16
        Number of examples drawn from the set in every step, without replacement until all are drawn; None
        for all of them.
    weight : float, default 0
        Weight with which the gradient of the loss is added before the projection, as in replay: the lower
        bound of its multiplier (GEM's memory strength). With ``on="step"``, weights and penalties are in the
        unit of a step of Adam, if the optimizer has its moments, else of SGD.
    tolerance : float, optional
        The loss may rise up to a bound: its value when the examples were kept (zero with a teacher), plus the
        tolerance. By default 0.05 nats for a loss with stored outputs; for other losses no step raises the
        loss. Needs a loss with one number per example.
    repair : float, default 1
        Fraction of the excess over the bound that one projected step removes, to first order, above 0 and at
        most 1. With momentum or Adam, a projected gradient removes more or less than that, as it is not the
        step; it asks for at most this fraction of what a step along the row could remove.
    equal : bool, default False
        Whether the loss must neither rise nor fall: ``G x = 0`` instead of ``G x >= 0``.
    penalty : float, optional
        Upper bound of the multiplier, at least `weight`; with ``on="both"``, of both projections together.
        The promise may be broken if keeping it needs a larger multiplier.

    Attributes
    ----------
    allowed : float or None
        The tolerance, or its default.

    Examples
    --------
    >>> from gemproj.torch import Promise
    >>> from gemproj.torch.losses import CrossEntropy, Distillation
    >>> Promise(Distillation()).allowed, Promise(CrossEntropy()).allowed
    (0.05, None)
    """

    loss: Loss = model_loss
    examples: int | None = 16
    weight: float = 0.0
    tolerance: float | None = None
    repair: float = 1.0
    equal: bool = False
    penalty: float | None = None

    def __new__(cls, *args: Any, **options: Any) -> Promise:
        """Raise for other names of the weight."""
        for name in options.keys() & STRENGTHS - {"weight"}:
            raise TypeError(f"{name} is named weight here: Promise(loss, weight=...).")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        _check_function(self.loss)
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
        if self.equal and isinstance(self.loss, Distillation):
            raise ValueError("equal is not for Distillation, whose divergence is least when it is stored.")
        if self.penalty is not None:
            check_number(self.penalty, "penalty", self.weight)
        if self.tolerance is not None:
            check_number(self.tolerance, "tolerance", 0.0)
            if self.equal:
                raise ValueError("tolerance and equal exclude each other: an equality forbids any change.")
            if self.tolerance > 1.0 and isinstance(self.loss, Distillation):
                warn(
                    f"A tolerance of {self.tolerance:g} nats for each token is nearly no limit. For a fall "
                    "of probabilities by 5 %, pass 0.05."
                )
        if self.repair != 1.0 and self.allowed is None:
            raise ValueError("repair is for a tolerance; without one, no step raises the loss.")

    @property
    def allowed(self) -> float | None:  # noqa: D102
        usual = hasattr(self.loss, "outputs") and not self.equal
        return _USUAL if self.tolerance is None and usual else self.tolerance

    def numbers(self) -> tuple[Any, ...]:
        """Return all options except the loss, which must be equal on all processes of a training.

        They are Python's numbers, because a state with others could not be read.
        """
        given = self.examples, self.weight, self.allowed, self.repair, self.equal, self.penalty
        return tuple(one if one is None else float(one) for one in given)


_signature = inspect.signature(Promise.__init__)  # `__new__` would hide the options from help
Promise.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=list(_signature.parameters.values())[1:]
)


def as_promise(given: Promise | Loss | float | None, default: Promise) -> Promise:
    """Return a promise; a loss or a tolerance alone takes the other options of the default."""
    if given is None or isinstance(given, Promise):
        return default if given is None else given
    if is_number(given):
        return replace(default, tolerance=float(given))
    if not callable(given):
        raise TypeError(
            f"promise must be a Promise, a loss, or a tolerance such as 0.05; found {type(given).__name__}."
        )
    return replace(default, loss=given)


def _check_function(loss: Any) -> None:
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


def call_loss(loss: Loss, model: torch.nn.Module, batch: Batch, n: int, outputs: Any = None) -> Tensor:
    """Return the loss of n examples, their mean or n numbers; stored outputs are passed to the loss.

    The loss of a single example has shape (1,). The dtype is float32 at least, because means in half
    precision would differ from the stored ones.
    """
    try:
        value = loss(model, batch) if outputs is None else loss(model, batch, outputs)
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
    except Exception as error:
        explain(error, batch)
        raise
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    return value.reshape(1) if n == 1 else value.reshape(()) if value.numel() == 1 else value


def value_of(loss: Loss, model: torch.nn.Module, batch: Batch, n: int, outputs: Any = None) -> Tensor:
    """Return what `call_loss` does, without a graph, if the loss does not need one itself, as of a PINN."""
    try:
        with torch.no_grad():
            return call_loss(loss, model, batch, n, outputs)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    with torch.enable_grad():
        return call_loss(loss, model, batch, n, outputs).detach()


def explain(error: Exception, batch: Batch) -> None:
    """Add to an error in a loss what it was called with."""
    if not hasattr(error, "add_note"):  # before Python 3.11
        return
    found = kind_of(map_nested(lambda leaf: leaf, batch))
    error.add_note(
        "loss(model, batch) was called with the model in evaluation mode, and a batch of kept examples: "
        f"{found if len(found) < _LONGEST else found[:_LONGEST] + ' ...'}."
    )
    if isinstance(error, AttributeError | KeyError | AssertionError):
        error.add_note(
            "A loss that exists in training mode only, as in detectors of torchvision, can set "
            "model.training = True on the model itself, and leave its layers as they are."
        )
    tensors = leaves_of(batch, Tensor)
    if tensors and all(leaf.ndim == 1 for leaf in tensors):
        error.add_note(
            "Their first dimension counts examples. If the batches are elements of a data set, pass the data "
            "set, or a DataLoader of it, which collates. Lists in them need collate=, or "
            "data.with_format('torch')."
        )


def rounding_of(losses: Any, dtype: torch.dtype, unit: Any = 1.0) -> Any:
    """Return differences between computations of the same losses, which are summed in float32 at least.

    `unit` is the size of the numbers that are summed, see `unit_of`.
    """
    return 4.0 * min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) * (unit + abs(losses))


def unit_of(tolerance: float | None) -> float:
    """Return the size of losses for their rounding: 1, but less if their tolerance is below a thousandth."""
    return min(1e3 * (tolerance or 1.0), 1.0)
