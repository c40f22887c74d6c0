"""Losses for promises, with one value per example: cross-entropy, and divergence from stored outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from gemproj._checks import check_count, check_number
from gemproj.torch.chosen import chosen, drawn, likeliest, log_probabilities, widened, with_rest
from gemproj.torch.data import Batch, Field, PerExample
from gemproj.torch.vector import mesh_of

# The label that torch and transformers ignore.
_IGNORED = -100
_MASK = "attention_mask"
# What detectors return beside logits.
_MORE = ("pred_boxes", "pred_masks")
# Of more classes than this, only some are stored by default, and logits are not copied.
_MANY, _TOP = 1_000, 64
# Ways of peft to begin an adapter which subtract it from the base.
_SUBTRACTED = ("pissa", "olora", "corda", "loftq")
# Largest logarithm of a ratio of probabilities in an estimate, so that its exponential is finite.
_LARGEST = 10.0


def model_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a transformers model computes, ``model(**batch).loss``."""
    return _output_of(model, batch, "loss")


def model_logits(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a transformers model, ``model(**batch).logits``."""
    if not isinstance(batch, Mapping) or getattr(getattr(model, "config", None), "is_encoder_decoder", True):
        return _output_of(model, batch, "logits")
    inputs, takes = dict(batch), inspect.signature(model.forward).parameters.get("labels")
    if takes is None or takes.default is not takes.empty:
        inputs.pop("labels", None)  # the loss is not needed
    found = _output_of(model, inputs, "logits")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False) and found.ndim > 2:
        found = found[:, -inputs["input_ids"].shape[1] :]  # the first positions are those of the prompt
    return found


def _output_of(model: Any, batch: Batch, name: str) -> Any:
    """Return the output `name` of a transformers model; errors suggest a function for the argument `name`."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"Without {name}, batches must be mappings, for model(**batch).{name}; found "
            f"{type(batch).__name__}. Pass {name}, a function of model and batch."
        )
    returned = model(**batch)
    get = returned.get if isinstance(returned, Mapping) else partial(getattr, returned)
    found, more = get(name, None), [one for one in _MORE if name == "logits" and get(one, None) is not None]
    if more:
        raise ValueError(
            f"{type(model).__name__} also returns {', '.join(more)}, which a loss of its logits does not "
            "keep: pass a loss of your own. For classes alone pass logits=, a function of model and batch."
        )
    if found is None:
        keys = ", ".join(map(str, batch))
        raise ValueError(
            f"model(**batch) has no {name}: {type(returned).__name__}, for a batch with {keys}. "
            f"Models of transformers compute a loss if the batch has labels; or pass {name}, a function of "
            "model and batch."
        )
    return found


def _field_of(batch: Batch, field: Field, name: str) -> Any:
    """Return a field of a batch; `name` is the name of the argument in errors."""
    if callable(field):
        return field(batch)
    try:
        return batch[field]
    except (KeyError, IndexError, TypeError):
        found = f"keys {list(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"{name} {field!r} is not in the batch; found {found}.") from None


def labelled_rows(labels: Tensor) -> Tensor:
    """Return whether any label of each example counts, shape (n,)."""
    counts = _counting(labels)
    return counts.flatten(1).any(1) if labels.ndim > 1 else counts


def _counting(labels: Tensor) -> Tensor:
    """Return which labels are not ignored; in uint8, -100 would be class 156."""
    return (labels if labels.is_signed() else labels.long()) != _IGNORED


class CrossEntropy:
    """Cross-entropy of each example; for tokens, the mean over the labelled tokens of the example.

    Transformers models return the mean over all tokens of a batch, which gives no bound for an example. In
    padding-free batches and packed rows, ``batch["position_ids"]`` separates the examples.

    Parameters
    ----------
    logits : callable, default `model_logits`
        ``logits(model, batch)`` returns logits of shape (n, ..., classes).
    labels : key or callable, default "labels"
        Integer labels (n, ...) are ``batch[labels]`` or ``labels(batch)``; labels of -100 are ignored.
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
        return self.of(self._logits(model, batch), batch, model if self._logits is model_logits else None)

    def labelled(self, batch: Batch) -> Tensor:
        """Return whether each example has any label, shape (n,)."""
        labels = _field_of(batch, self._labels, "labels")
        return labelled_rows(labels[:, 1:] if self._shift and labels.ndim > 1 else labels)

    def of(self, logits: Tensor, batch: Batch, model: Any = None) -> Tensor:
        """Return the losses for given logits; pass `model` if a transformers model computed the logits."""
        logits = _whole(logits)
        if not self._shift and getattr(model, "can_generate", bool)() and not _has_encoder(model):
            raise ValueError(
                "The model is a causal language model, whose logits predict the next token: use "
                "CrossEntropy(shift=True). If the labels are shifted already, pass logits=, a function of "
                "model and batch."
            )
        labels = _field_of(batch, self._labels, "labels")
        if labels.shape != logits.shape[:-1] or labels.is_floating_point():
            raise ValueError(
                f"labels must be integers of shape {tuple(logits.shape[:-1])}, to match logits (n, ..., "
                f"classes) of shape {tuple(logits.shape)}; found {tuple(labels.shape)}, {labels.dtype}. If "
                "classes are in another dimension, or do not exclude each other, pass logits= or a loss of "
                "your own."
            )
        examples = _examples_of(batch, labels.shape)
        if self._shift and labels.ndim < 2:
            raise ValueError(
                f"shift=True is for logits of tokens, (n, tokens, classes); found {tuple(logits.shape)}."
            )
        if self._shift:  # of the labels, because logits without the last position would be a copy
            labels = labels.long().roll(-1, 1)
            labels[:, -1] = _IGNORED
            if examples is not None:  # no example predicts the first label of another
                labels[:, :-1].masked_fill_(examples.diff(dim=1) != 0, _IGNORED)
        flat, target, counts = logits.flatten(0, -2), labels.flatten().long(), _counting(labels)
        if flat.shape[-1] > _MANY:  # without a copy of the logits
            classes = target.masked_fill(target == _IGNORED, 0)
            values = -chosen(flat, None, classes[:, None], 1.0)
        else:
            values = cross_entropy(widened(flat), target, ignore_index=_IGNORED, reduction="none")
        return _means(values.view(labels.shape), counts, examples)


class Distillation:
    """Kullback-Leibler divergence between the stored and the current outputs of each example.

    The loss is ``T^2 sum_c p_c (log p_c - log q_c)``, where ``p`` are the stored and ``q`` the current
    probabilities at temperature T (Hinton et al., 2015). For tokens, the loss is the mean over the example,
    as in `CrossEntropy`. With `labels`, `weight` times the cross-entropy is added, as in DER++ (Buzzega et
    al., 2020). The divergence needs no labels, and constrains the probabilities of all classes.

    `gemproj.torch.Keeper.keep` stores the outputs. With adapters, they are those of the model at that time.

    Parameters
    ----------
    logits : callable, default `model_logits`
        ``logits(model, batch)`` returns logits of shape (n, ..., classes).
    temperature : float, default 1
    top : int, optional
        Number of classes to store for each position, at least 2. Half of them are the most probable ones, the
        others are drawn from the rest in proportion to their probabilities, and the loss estimates the
        divergence over all classes. On examples that are trained on it may come out too low; where a few rare
        classes rise a lot, it is rough. A position takes ``top * (bytes of dtype + 4)`` bytes, not one number
        per class. By default 64 if there are more than 1,000 classes, else all.
    dtype : torch.dtype, optional
        Dtype of the stored log-probabilities; by default ``torch.float16`` if `top` is chosen by default,
        else the dtype of the logits.
    mask : key or callable, default "attention_mask"
        Mask (n, ...), nonzero at positions that count; all positions count if a batch lacks the default mask.
        For an encoder-decoder model the default is the positions with a label. Outputs are stored only for
        these positions, so the padding may later differ or be absent.
    labels : CrossEntropy, optional
        A cross-entropy to add, computed from the same logits.
    weight : float, default 1
        Weight of the added cross-entropy.
    teacher : "base", optional
        Compare with the model without its adapters of peft, in one more forward pass: nothing is stored. A
        tolerance is the largest divergence from that model, however far it is when texts are kept.

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
        teacher: Literal["base"] | None = None,
    ) -> None:
        if teacher not in (None, "base"):
            raise ValueError(f"teacher must be 'base' or None; found {teacher!r}.")
        check_number(temperature, "temperature", 0.0, strict=True)
        check_number(weight, "weight", 0.0)
        if top is not None:
            check_count(top, "top", 2)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a floating-point dtype of torch; found {dtype!r}.")
        if labels is not None and teacher is not None:
            raise ValueError("labels is for stored outputs; with a teacher, keep the labels as another set.")
        if labels is not None and not isinstance(labels, CrossEntropy):
            raise TypeError(f"labels must be a CrossEntropy, such as CrossEntropy(); found {labels!r}.")
        self._logits, self._temperature, self._top, self._dtype = logits, float(temperature), top, dtype
        self._mask, self._labels, self._weight, self.teacher = mask, labels, float(weight), teacher

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Any:
        """Return log-probabilities (n, ..., classes) to store; with `top`, a pair of these and the classes.

        The log-probabilities of classes that were drawn are those given the rest, without the likeliest.
        With a mask, or for a padding-free batch, return a `PerExample` with one tensor (positions, classes),
        or one pair of tensors, per example. With a teacher, None: nothing is stored.
        """
        return self._said(model, batch) if self.teacher is None else None

    @torch.no_grad()
    def _said(self, model: torch.nn.Module, batch: Batch) -> Any:
        """Return what the model says about a batch, in the form in which it is stored."""
        logits, mask, examples = self._computed(model, batch)
        n, usual = logits.shape[-1], self._top is None and logits.shape[-1] > _MANY
        top = _TOP if usual else self._top
        dtype = self._dtype or (torch.float16 if usual else logits.dtype)
        flat, at = logits.flatten(0, -2), _indices(mask)
        if top is None or top >= n:
            stored: Any = log_probabilities(flat, at, self._temperature).to(dtype)
        else:
            found, classes = drawn(flat, at, top, self._temperature)
            stored = found.to(dtype), classes.int()
        if mask is None:
            return tree_map(lambda leaf: leaf.view(*logits.shape[:-1], -1), stored)
        sizes = _sums(mask.long(), examples).tolist()
        split = tree_map(lambda leaf: leaf.split(sizes), stored)
        return PerExample(split if isinstance(stored, Tensor) else zip(*split, strict=True))

    def __call__(self, model: torch.nn.Module, batch: Batch, outputs: Any = None) -> Tensor:
        """Return the losses, shape (n,), for stored `outputs` of the same examples."""
        if self.teacher is not None:
            with without_adapters(model):
                outputs = self._said(model, batch)
        logits, mask, examples = self._computed(model, batch)
        if mask is None and isinstance(outputs, PerExample):
            mask = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
        for leaf in tree_leaves(outputs) if mask is None else ():
            if leaf.shape[:-1] != logits.shape[:-1]:
                raise ValueError(
                    f"Outputs were stored for {tuple(leaf.shape[:-1])} positions, and the logits have "
                    f"{tuple(logits.shape[:-1])}: their number depends on the padding of the batch. Pass "
                    "mask=, a function of the batch that returns which positions of the logits count."
                )
        outputs = _at_positions(outputs, mask, examples)
        flat, at = logits.flatten(0, -2), _indices(mask)
        if isinstance(outputs, Tensor):
            _check_classes(outputs.shape[-1] == logits.shape[-1], outputs.shape[-1], logits)
            now = log_probabilities(flat, at, self._temperature)
            before = torch.log_softmax(outputs.to(now.dtype), dim=-1)  # sums to one despite rounding
            divergence = _divergence(before, now)
        else:
            values, classes = outputs
            if classes.device.type == "cpu" and classes.numel():  # on a device, this would synchronise
                most = int(classes.max()) + 1
                _check_classes(most <= logits.shape[-1], f"at least {most}", logits)
            now = chosen(flat, at, classes.long(), self._temperature)
            divergence = _estimate(values.to(now.dtype), now)
        divergence = divergence * self._temperature**2
        if mask is None:
            divergence = divergence.view(logits.shape[:-1])
            mask = torch.ones_like(divergence, dtype=torch.bool)
        else:
            divergence = divergence.new_zeros(mask.shape).masked_scatter(mask, divergence)
        losses = _means(divergence, mask, examples)
        if self._labels is None:
            return losses
        known = model if self._logits is model_logits else None
        return losses + self._weight * self._labels.of(logits, batch, known)

    def _computed(self, model: Any, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return logits, the mask of positions that count, or None for all, and the result of `_examples_of`.

        Raise if the classes do not exclude each other.
        """
        logits, field = _whole(self._logits(model, batch)), self._mask
        if self._logits is model_logits and (logits.ndim > 3 or not _exclusive(model, batch)):
            raise ValueError(
                f"logits must be of classes that exclude each other, in the last dimension; found "
                f"{tuple(logits.shape)} of {type(model).__name__}. Pass logits=, a function of model and "
                "batch: for images model(**batch).logits.movedim(1, -1), for labels that do not exclude each "
                "other torch.stack([0 * z, z], -1) with their logits z, and mask=, a function to ones. For "
                "numbers, as of a regression, pass your own loss, such as a squared difference."
            )
        shape = logits.shape[:-1]
        examples = _examples_of(batch, shape)
        if field == _MASK and len(shape) > 1 and _has_encoder(model):
            # The attention mask is about the input, and the logits are about the output.
            return logits, _counting(_field_of(batch, "labels", "mask")), examples
        # In a sequence classifier, the mask is per token, but the logits are per sequence.
        if field != _MASK or (isinstance(batch, Mapping) and _MASK in batch and len(shape) > 1):
            mask = _field_of(batch, field, "mask")
            if mask.shape != shape:
                raise ValueError(
                    f"mask must have the shape of the logits without classes, {tuple(shape)}; "
                    f"found {tuple(mask.shape)}. Pass another key, or a function of the batch."
                )
            return logits, mask.bool(), examples
        mask = None if examples is None else torch.ones_like(examples, dtype=torch.bool)
        return logits, mask, examples


def has_teacher(loss: Any) -> bool:
    """Return whether a loss compares with a teacher, and stores nothing."""
    return isinstance(loss, Distillation) and loss.teacher is not None


def moved_base(model: Any) -> str:
    """Return how adapters of peft began, if they were subtracted from the base; else nothing."""
    begun = (getattr(one, "init_lora_weights", None) for one in getattr(model, "peft_config", {}).values())
    return next((how for how in begun if isinstance(how, str) and how.startswith(_SUBTRACTED)), "")


@contextmanager
def without_adapters(model: Any) -> Iterator[None]:
    """Switch the adapters of a model of peft off."""
    if not hasattr(model, "disable_adapter"):
        raise TypeError(
            "teacher='base' needs a model of peft, whose adapters can be off; found "
            f"{type(model).__name__}. Without a teacher, outputs are stored."
        )
    if found := moved_base(model):
        raise ValueError(
            f"teacher='base' is the model without its adapters, from which init_lora_weights={found!r} has "
            "subtracted them. Without a teacher, outputs are stored."
        )
    trained = [p.requires_grad for p in model.parameters()]
    merged = [(one, [*names]) for one in model.modules() if (names := getattr(one, "merged_adapters", ()))]
    try:
        with model.disable_adapter():
            yield
    finally:  # peft has all of the adapter trained again, also what is frozen, and what was merged apart
        for p, was in zip(model.parameters(), trained, strict=True):
            p.requires_grad_(was)
        for one, names in merged:
            if not one.merged_adapters:
                one.merge(adapter_names=names)


def _indices(mask: Tensor | None) -> Tensor | None:
    """Return the indices of the positions of a mask, (m,); None for all."""
    return None if mask is None else mask.flatten().nonzero().flatten()


def _has_encoder(model: Any) -> bool:
    """Return whether a model of transformers is an encoder-decoder model."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _exclusive(model: Any, batch: Batch) -> bool:
    """Return whether a model of transformers has classes that exclude each other, not numbers."""
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    numbers = isinstance(labels, Tensor) and labels.is_floating_point()
    return kind == "single_label_classification" or (kind is None and not numbers)


def _whole(logits: Any) -> Tensor:
    """Return logits, gathered if they are sharded; raise for a single class, of probability one."""
    if logits.ndim < 2 or logits.shape[-1] < 2:
        raise ValueError(
            "logits must have shape (n, ..., classes), with at least two classes; found "
            f"{tuple(logits.shape)}. For two classes with one logit z return "
            f"torch.{'stack' if logits.ndim < 2 else 'cat'}([0 * z, z], -1); for scores pass your own loss, "
            "such as a squared difference."
        )
    return logits if mesh_of(logits) is None else logits.full_tensor()


def _check_classes(fits: bool, stored: Any, now: Tensor) -> None:
    """Raise if the stored outputs have other classes than the model."""
    if not fits:
        raise ValueError(
            f"Outputs were stored for {stored} classes, and the model has {now.shape[-1]}. If classes were "
            "added, pass logits=, a function that returns the logits of the old classes; a teacher must have "
            "the same classes."
        )


def _divergence(before: Tensor, now: Tensor) -> Tensor:
    """Return the divergence of log-probabilities of all classes; those of probability zero add nothing."""
    return torch.where(before.isneginf(), 0.0, before.exp() * (before - now)).sum(-1)


def _estimate(before: Tensor, now: Tensor) -> Tensor:
    """Return an estimate of the divergence over all classes, from those that `drawn` returned.

    With the rest as one class the divergence is a lower bound; what it lacks is the probability of the rest
    times the divergence within the rest, the mean of ``r - 1 - log r`` over classes drawn from the rest, with
    ``r = q_c / p_c`` given the rest. The mean of r is one, and adding ``r - 1`` makes the estimate least, and
    zero, where q is p (Schulman, "Approximating KL divergence", 2020).
    """
    first = likeliest(before.shape[-1])
    then, current = with_rest(before[..., :first]), with_rest(now[..., :first])
    ratio = now[..., first:] - current[..., -1:] - before[..., first:]
    ratio = torch.where(before[..., first:].isneginf(), 0.0, ratio.clamp(max=_LARGEST))
    within = (torch.expm1(ratio) - ratio).mean(-1)
    return _divergence(then, current) + then[..., -1].exp() * within


def _means(values: Tensor, counts: Tensor, examples: Tensor | None = None) -> Tensor:
    """Return the mean of each example's values over positions that count; 0 if no position counts."""
    totals = _sums(torch.where(counts, values, 0.0), examples)
    return totals / _sums(counts.long(), examples).clamp(min=1)


def _sums(values: Tensor, examples: Tensor | None) -> Tensor:
    """Sum values over each row, or over each example."""
    if examples is None:
        return values.reshape(len(values), -1).sum(1)
    sums = values.new_zeros(int(examples[-1, -1]) + 1)
    return sums.index_add(0, examples.flatten(), values.flatten())


def _examples_of(batch: Batch, shape: torch.Size) -> Tensor | None:
    """Return the index of the example at each position; None if each row of the batch is one example.

    Without an attention mask, a row may hold several examples. As in transformers models, a new example
    begins wherever the position id does not increase by one.
    """
    if not isinstance(batch, Mapping) or _MASK in batch or "position_ids" not in batch:
        return None
    positions = batch["position_ids"]
    if positions.shape != shape or len(shape) != 2:
        return None
    begins = torch.ones_like(positions)
    begins[:, 1:] = positions.diff(dim=1) != 1
    return begins.flatten().cumsum(0).view(shape) - 1


def _at_positions(outputs: Any, mask: Tensor | None, examples: Tensor | None) -> Any:
    """Return the stored outputs of all positions that count, one after the other."""
    if mask is None or not isinstance(outputs, PerExample):
        return tree_map(lambda leaf: leaf.flatten(0, -2) if mask is None else leaf[mask], outputs)
    stored = [len(tree_leaves(one)[0]) for one in outputs]
    found = _sums(mask.long(), examples).tolist()
    if sum(stored) != sum(found) or (len(stored) > 1 and stored != found):
        raise ValueError(
            f"Outputs were stored for {stored} positions of the examples, and now {found} count: the mask, "
            "and the truncation in the collate function, must be the same whenever an example is drawn."
        )
    return tree_map(lambda *leaves: torch.cat(leaves), *outputs)
