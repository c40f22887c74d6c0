"""Calling a loss of one's own: what it may be, what it may return, and what is said where it fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gemproj.torch.batches import Batch, Loss, Remembered, leaves_of, map_nested


def check_function(loss: Any) -> None:
    """Raise for what cannot be called as ``loss(model, batch)``."""
    kind = type(loss) if isinstance(loss, torch.nn.Module) else loss
    if getattr(kind, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        raise TypeError(
            f"loss is called as loss(model, batch), and {kind.__name__} takes predictions. Pass a function, "
            "such as lambda model, batch: cross_entropy(model(batch[0]), batch[1]), or CrossEntropy of "
            "gemproj.torch.losses."
        )
    if not callable(loss):
        raise TypeError(f"loss must be a function of model and batch; found {type(loss).__name__}.")


def call_loss(
    loss: Loss, model: torch.nn.Module, examples: Batch | Remembered, n: int, name: tuple[Any, ...] = ()
) -> Tensor:
    """Return the loss of n examples, one number or one for each; of stored outputs it is a function, too.

    Where it is one number for one example, it is returned with shape (1,).
    """
    if not isinstance(examples, Remembered):
        examples = Remembered(examples)
    given = (examples.outputs,) if "outputs" in examples.fields else ()
    if not given and getattr(loss, "outputs", None) is not None:
        raise ValueError(
            f"Examples{'' if name[:1] in ((), (None,)) else f' of {name[0]!r}'} are stored without outputs, "
            "with which this loss compares. Store them with keep or end_task, with add(..., outputs=), with "
            "record(task, outputs=), or remove(task)."
        )
    with explained(examples.batch):
        value = loss(model, examples.batch, *given)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss(model, batch) must return a tensor; found {type(value).__name__}.")
        if value.ndim == 1 and n == 1:  # a packed row has one number for each of its texts
            value = value.mean()
        if value.shape not in ((), (1,)) and value.shape != (n,):
            raise ValueError(
                "loss(model, batch) must return the mean over the examples, or one number for each of these "
                f"{n}, shape ({n},); found {tuple(value.shape)}. Of logits compute a loss; of losses of "
                "tokens, (n, T) or (n * T,), the mean over the tokens of each example that have a label, as "
                "CrossEntropy of gemproj.torch.losses does. Of packed rows of several texts, unpadded, "
                "pass microbatch=1."
            )
    return value.reshape(1) if n == 1 else value


@contextmanager
def explained(batch: Batch) -> Iterator[None]:
    """Add to an error in a loss what it was called with."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # of Python 3.11
            shapes = map_nested(_shape_of, batch)
            error.add_note(f"The loss was called with stored examples, of shapes {shapes}.")
            tensors = [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]
            if tensors and all(leaf.ndim == 1 for leaf in tensors):
                error.add_note(
                    "Their first dimension counts examples: if they are elements of a data set, pass the "
                    "data set, or a DataLoader of it, which collates. Lists in them need collate=, or "
                    "data.with_format('torch')."
                )
        raise


def _shape_of(leaf: Any) -> Any:
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
