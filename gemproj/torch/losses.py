"""Losses to promise, one number for each example: of the labels, and of what the model said before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from gemproj._checks import check_count, check_number
from gemproj.torch.batches import Batch, Field, Loss, Remembered, count_examples, field_of, output_of

# Labels that torch and transformers leave out.
_IGNORED = -100
_MASK = "attention_mask"


def model_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a model of transformers computes itself: ``model(**batch).loss``."""
    return output_of(model, batch, "loss")


def model_logits(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a model of transformers, ``model(**batch).logits``."""
    return output_of(model, batch, "logits")


class CrossEntropy:
    """Cross-entropy of each example: for tokens, the mean over those of the example that have a label.

    The losses of models of transformers are means over all tokens of a batch, from which no bound of an
    example can be told.

    Parameters
    ----------
    logits : callable, default `model_logits`
        ``logits(model, batch)`` of shape (n, ..., classes).
    labels : key or callable, default "labels"
        Where the labels (n, ...) are, integers; those of -100 do not count.
    shift : bool, default False
        Whether position i predicts label i + 1, as in causal language models of transformers.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch.losses import CrossEntropy
    >>> loss = CrossEntropy(lambda model, batch: model(batch[0]), labels=1)
    >>> batch = torch.tensor([[0.0, 0.0], [0.0, -9.0]]), torch.tensor([0, 0])
    >>> loss(torch.nn.Identity(), batch).round(decimals=3)
    tensor([0.6930, 0.0000])
    """

    def __init__(
        self,
        logits: Callable[[Any, Batch], Tensor] = model_logits,
        *,
        labels: Field = "labels",
        shift: bool = False,
    ) -> None:
        self._logits, self._labels, self._shift = logits, labels, shift

    def __call__(self, model: torch.nn.Module, batch: Batch) -> Tensor:
        """Return the losses, shape (n,)."""
        return self.of(self._logits(model, batch), batch)

    def of(self, logits: Tensor, batch: Batch) -> Tensor:
        """Return the losses for logits that have been computed."""
        labels = field_of(batch, self._labels, "labels")
        if labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"labels must have shape {tuple(logits.shape[:-1])} to go with logits of shape "
                f"{tuple(logits.shape)}; found {tuple(labels.shape)}."
            )
        if self._shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        logits = _widened(logits).flatten(0, -2)
        values = cross_entropy(logits, labels.flatten(), ignore_index=_IGNORED, reduction="none")
        return _means(values.view(labels.shape), labels != _IGNORED)


class Distillation:
    """Kullback-Leibler divergence of each example from what the model put out when it was stored.

    ``T^2 sum_c p_c (log p_c - log q_c)`` with ``p`` the stored and ``q`` the present probabilities at
    temperature T, for tokens the mean over the example (Hinton et al., 2015); plus, with `labels`, a weight
    times the cross-entropy, as in DER++ (Buzzega et al., 2020). Promises of it need no labels, and say
    more: the model is held to what it said about every class.

    `gemproj.torch.GEM` stores the outputs of a task when it ends. By hand:
    ``memory.add(batch, task, outputs=loss.outputs(model, batch))``.

    Parameters
    ----------
    logits : callable, default `model_logits`
        ``logits(model, batch)`` of shape (n, ..., classes).
    temperature : float, default 1
    top : int, optional
        Store the most probable classes only, and one number for the others together: a lower bound of
        the divergence, in ``top * (bytes of dtype + 4)`` bytes a position instead of one number for
        each class.
    dtype : torch.dtype, optional
        Of the stored log-probabilities, such as ``torch.float16``; by default that of the logits.
    mask : key or callable, default "attention_mask"
        Positions (n, ...) that count, those not zero. Batches need not have the default one; then all count.
    labels : CrossEntropy, optional
        Adds its losses, from the same logits.
    weight : float, default 1
        Of these losses.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch.losses import Distillation
    >>> model, x = torch.nn.Linear(2, 3), torch.randn(5, 2)
    >>> loss = Distillation(lambda model, x: model(x))
    >>> stored = loss.outputs(model, x)
    >>> loss(model, x, stored).shape, bool(loss(model, x, stored).abs().max() < 1e-6)
    (torch.Size([5]), True)
    """

    def __init__(
        self,
        logits: Callable[[Any, Batch], Tensor] = model_logits,
        *,
        temperature: float = 1.0,
        top: int | None = None,
        dtype: torch.dtype | None = None,
        mask: Field = _MASK,
        labels: CrossEntropy | None = None,
        weight: float = 1.0,
    ) -> None:
        check_number(temperature, "temperature", 0.0, strict=True)
        check_number(weight, "weight", 0.0)
        if top is not None:
            check_count(top, "top", 1)
        if labels is not None and not isinstance(labels, CrossEntropy):
            raise TypeError(f"labels must be a CrossEntropy, such as CrossEntropy(); found {labels!r}.")
        self._logits, self._temperature, self._top, self._dtype = logits, float(temperature), top, dtype
        self._mask, self._labels, self._weight = mask, labels, float(weight)

    @torch.no_grad()
    def outputs(self, model: torch.nn.Module, batch: Batch) -> Any:
        """Return what to store: log-probabilities (n, ..., classes); with `top`, those and their classes."""
        logits = self._logits(model, batch)
        found, dtype = self._log_probabilities(logits), self._dtype or logits.dtype
        if self._top is None:
            return found.to(dtype)
        if self._top >= found.shape[-1]:
            raise ValueError(
                f"top must be below the number of classes, {found.shape[-1]}; found {self._top}."
            )
        values, classes = found.topk(self._top, dim=-1)
        return values.to(dtype), classes.int()

    def __call__(self, model: torch.nn.Module, batch: Batch, outputs: Any) -> Tensor:
        """Return the losses, shape (n,), for stored `outputs` of the same examples."""
        logits = self._logits(model, batch)
        now = self._log_probabilities(logits)
        if self._top is None:
            before = torch.log_softmax(outputs.to(now.dtype), dim=-1)  # sums to one whatever was rounded
        else:
            values, classes = outputs
            before = _with_rest(values.to(now.dtype))
            now = _with_rest(now.gather(-1, classes.long()))
        # What had probability zero adds nothing, although its logarithm is infinite.
        terms = torch.where(before.isneginf(), 0.0, before.exp() * (before - now))
        divergence = terms.sum(-1) * self._temperature**2
        counts = torch.ones_like(divergence, dtype=torch.bool)
        # Of a classifier of sequences, the mask is about tokens and the logits are not.
        if self._mask != _MASK or (isinstance(batch, Mapping) and _MASK in batch and divergence.ndim > 1):
            mask = field_of(batch, self._mask, "mask")
            if mask.shape != divergence.shape:
                raise ValueError(
                    f"mask must have the shape of the logits without classes, {tuple(divergence.shape)}; "
                    f"found {tuple(mask.shape)}. Pass another key, or a function of the batch."
                )
            counts = mask.bool()
        losses = _means(divergence, counts)
        return losses if self._labels is None else losses + self._weight * self._labels.of(logits, batch)

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(_widened(logits) / self._temperature, dim=-1)


def _widened(logits: Tensor) -> Tensor:
    """Return logits in float32 at least: sums in half precision lose the digits of a bound."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _with_rest(top: Tensor) -> Tensor:
    """Append the logarithm of the probability of all other classes."""
    tiny = torch.finfo(top.dtype).tiny
    rest = (1.0 - top.exp().sum(-1, keepdim=True)).clamp(min=tiny)
    return torch.cat([top, rest.log()], dim=-1)


def _means(values: Tensor, counts: Tensor) -> Tensor:
    """Return the means of (n, ...) over all but the first dimension, where `counts`; 0 where nothing does."""
    values, counts = values.reshape(len(values), -1), counts.reshape(len(counts), -1)
    return torch.where(counts, values, 0.0).sum(1) / counts.sum(1).clamp(min=1)


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
    loss: Loss, model: torch.nn.Module, examples: Batch | Remembered, name: tuple[Any, ...] = ()
) -> Tensor:
    """Return the loss, one number or one for each example; with stored outputs it is a function of these."""
    if not isinstance(examples, Remembered):
        examples = Remembered(examples)
    given = (examples.outputs,) if "outputs" in examples.fields else ()
    if not given and getattr(loss, "outputs", None) is not None:
        raise ValueError(
            f"Examples{f' of {name[0]!r}' if name else ''} are stored without outputs, with which "
            "this loss compares. Store them with end_task(batches, task), with add(..., outputs=) or with "
            "record(task, outputs=), or remove(task)."
        )
    with explained(examples.batch):
        value = loss(model, examples.batch, *given)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss(model, batch) must return a tensor; found {type(value).__name__}.")
        if value.shape not in ((), (1,)) and value.shape != ((n := count_examples(examples)),):
            raise ValueError(
                "loss(model, batch) must return the mean over the examples, or one number for each of these "
                f"{n}, shape ({n},); found {tuple(value.shape)}. Of logits compute a loss; of losses of "
                "tokens, (n, T) or (n * T,), the mean over the tokens of each example that have a label, as "
                "CrossEntropy of gemproj.torch.losses does."
            )
    return value


@contextmanager
def explained(batch: Batch) -> Iterator[None]:
    """Add to an error in a loss what it was called with."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # of Python 3.11
            shapes = tree_map(lambda leaf: tuple(leaf.shape), batch)
            note = f"The loss was called with stored examples, of shapes {shapes}."
            if all(leaf.ndim == 1 for leaf in tree_leaves(batch)):
                note += (
                    " Their first dimension counts examples: if they are elements of a data set, pass a "
                    "DataLoader, which collates."
                )
            error.add_note(note)
        raise
