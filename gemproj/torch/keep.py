"""A new kept set: every example is looked at once, and what the model says about it is stored."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader

from gemproj._arrays import wide_dtype
from gemproj._warn import warn
from gemproj.torch.data import Collate, PerExample, divided, leaves_of, moved, owned
from gemproj.torch.losses import (
    Distillation,
    has_teacher,
    labelled_rows,
    model_loss,
    moved_base,
    without_adapters,
)
from gemproj.torch.memory import KeptSet
from gemproj.torch.promise import Loss, call_loss, explain, value_of
from gemproj.torch.rows import evaluating, forked, passes, seed
from gemproj.torch.vector import ParameterVector

# Number of examples whose labels are looked at together, and with which adapters and batches are compared.
_FETCHED, _ADAPTED, _GROWN = 64, 4, 16
_OUTPUTS = "These are what loss.outputs returned: for other outputs, it must return a PerExample."
_NO_LABEL = (
    "Check what the collate function or the chat template does to the labels: those of -100 are ignored."
)


def examine(
    kept: KeptSet, model: nn.Module, vector: ParameterVector, loss: Loss, microbatch: int | None, apart: bool
) -> None:
    """Store the outputs and losses of the model for a new set, and leave out examples without a label.

    The model is called with as many examples as in a step. `loss` is the loss of the promise as it is
    computed in training. `apart` says that some examples will be held out.
    """
    promise = kept.promise
    topology, outputs = vector.topology, getattr(loss, "outputs", None)
    with topology.agreement({}), forked():  # a collate function may draw numbers
        kept.check()
        numbers = _labelled(kept, loss)
        if outputs is not None or promise.allowed is not None:
            _check_collate(kept)
    found: list[Any] = []

    def look(at: list[int], weight: int, first: bool) -> Tensor:
        """Store the outputs of the first `weight` examples, and return the losses of all."""
        batch, _ = kept.fetch(at, vector.device)
        stored = None
        if outputs is not None:
            try:
                stored = _of_one(outputs(model, batch), len(at))
            except Exception as error:
                explain(error, batch)
                raise
        if stored is not None:  # None also with a teacher
            kept.listed = isinstance(stored, PerExample)
            tensors = leaves_of(kept.examples[0], Tensor)
            there = moved(stored, vector.device if any(a.device.type != "cpu" for a in tensors) else "cpu")
            found.extend(owned(there if kept.listed else divided(there, _OUTPUTS))[:weight])
        first = first and not topology.collective
        with torch.set_grad_enabled(first):
            value = (call_loss if first else value_of)(loss, model, batch, len(at), stored)
        if first and not value.requires_grad:
            raise ValueError(
                "loss(model, batch) has no gradient: it does not depend on trainable parameters of the "
                "model, or runs under torch.no_grad() or detach()."
            )
        if first and value.ndim and len(at) > 2 and promise.allowed is not None and promise.examples:
            warn_of_others(value.detach())
        return value

    def warn_of_others(among_more: Tensor) -> None:
        """Warn of outputs that are random, and of losses that depend on the other examples of a batch."""

        def by(at: list[int]) -> float:
            batch, stored = replace(kept, outputs=found).fetch(at, vector.device)
            value = value_of(loss, model, batch, len(at), stored)
            return float((among_more[: len(at)] - value).abs().max())

        apart, drawn = by([0, 1]), by(list(range(len(among_more))))  # with only two examples, and as before
        rounding = 0.03 * (1 + float(among_more.abs().max()))  # of bfloat16
        if isinstance(promise.loss, Distillation) and drawn > 0.3 * rounding:
            warn(
                f"Outputs of examples of {kept.title} are random in evaluation mode, by {drawn:.1g}: those "
                "of later steps do not match the stored ones. Does the model call dropout without "
                "training=self.training?"
            )
        elif apart > rounding >= drawn:  # a loss may draw random numbers, as those of diffusion models do
            warn(
                f"Losses of examples of {kept.title} depend on the other examples of their batch, by "
                f"{apart:.1g}: the stored outputs or losses do not match those in later batches. Causes are "
                "negatives from the same batch, and padding on the left without position ids. Pass "
                "microbatch=1, or use all examples in every step: examples=None."
            )

    kept.losses, means, batches = _losses(model, vector, kept, microbatch, look)
    if topology.least(-means) < 0:  # of any process
        kept.batches = batches
    # After all passes, because only then can sharded processes report an error to each other.
    with topology.agreement({}):
        if means and (apart or promise.allowed is not None):
            raise ValueError(
                f"{'hold_out' if apart else 'tolerance'} needs one loss for each example, shape ({means},); "
                "found (). Compute it with reduction='none', or use CrossEntropy of gemproj.torch.losses "
                "(shift=True for causal language models), or Distillation to keep outputs; or pass "
                "microbatch=1, so that it gets one example at a time."
            )
        _check_finite(kept, numbers, loss, model, vector)
        if has_teacher(promise.loss):  # whose own loss is zero
            kept.losses = torch.zeros_like(kept.losses)
        kept.outputs = found
        kept.check_outputs()
        if kept.listed:  # without a position that counts
            full = [k for k, one in enumerate(kept.outputs) if any(leaf.numel() for leaf in tree_leaves(one))]
            _leave_out(kept, full, numbers)


def warn_of_adapters(kept: KeptSet, model: nn.Module, vector: ParameterVector, loss: Loss) -> None:
    """Warn if what is kept is not what the model says without its adapters of peft, which may be new."""
    allowed, stored = kept.promise.allowed, isinstance(kept.promise.loss, Distillation) and kept.outputs
    # Adapters that transformers or peft have put into a model cannot be switched off in this way.
    switched = hasattr(model, "peft_config") and hasattr(model, "disable_adapter") and not moved_base(model)
    if allowed is None or vector.topology.collective or not (stored and switched):
        return
    some = kept.part(list(range(min(len(kept), _ADAPTED))))
    with without_adapters(model):
        score = scored(model, vector, some, loss, None)
    if (apart := score.mean - score.stored) > allowed:
        warn(
            f"{kept.title} keeps what the model says with its adapters, {apart:.2g} nats from what it says "
            "without them. If the adapters are new, and begin at random as prompts do, keep the model "
            "without them: Promise(Distillation(teacher='base'))."
        )


def check_growth(
    known: KeptSet, collate: Collate, model: nn.Module, vector: ParameterVector, loss: Loss
) -> None:
    """Raise if examples of a set have another loss in batches of the collate function of those to be added.

    Batches may differ in what no loss sees, such as padding.
    """
    if collate is known.collate:
        return
    some = replace(known.part(list(range(min(len(known), _GROWN)))), batches=[])
    makers = known.collate, known.collate, collate
    try:
        own, again, other = (
            scored(model, vector, replace(some, collate=make), loss, None).mean for make in makers
        )
    except Exception:  # of a function whose data are gone, or that does not fit, of which `joined` tells
        return
    rounding = 3e-3 * (1.0 + abs(own))
    draws = abs(own - again) > 0.1 * rounding  # then nothing is known
    if not draws and abs(own - other) > rounding:
        raise ValueError(
            f"The collate function makes other batches of the examples of {known.title} than that with which "
            f"they were kept: their mean loss is {other:.4g}, not {own:.4g}. Use another name, or pass the "
            "same collate= each time."
        )


class Score(NamedTuple):
    """The mean loss of n examples now, its 95 % interval, its bound, and the mean when they were kept."""

    mean: float
    low: float
    high: float
    bound: float
    stored: float
    n: int


def scored(
    model: nn.Module, vector: ParameterVector, kept: KeptSet, loss: Loss, microbatch: int | None
) -> Score:
    """Return the score of all examples of a set.

    Losses are computed as they were when kept. The unit is the example: the interval is that of the mean of
    differences from the losses when kept, by Student's distribution. On several processes, all of them must
    call this function.
    """

    def look(at: list[int], weight: int, first: bool) -> Tensor:
        batch, outputs = kept.fetch(at, vector.device)
        return value_of(loss, model, batch, len(at), outputs)

    (losses, *_), topology = _losses(model, vector, kept, microbatch, look), vector.topology
    rise = losses - kept.losses
    sums = torch.stack([torch.ones_like(rise).sum(), rise.sum(), rise.square().sum(), kept.losses.sum()])
    sums = topology.sum_distinct(sums.to(vector.device, wide_dtype(torch, vector.device)))
    n, first, second, before = sums.tolist()
    mean, spread = (before + first) / n, max(second / n - (first / n) ** 2, 0.0)
    half = _student(n - 1) * math.sqrt(spread / (n - 1)) if n > 1 else math.inf
    bound = before / n + (kept.promise.allowed or 0.0)
    return Score(mean, mean - half, mean + half, bound, before / n, round(n))


def _losses(
    model: nn.Module, vector: ParameterVector, kept: KeptSet, microbatch: int | None, look: Any
) -> tuple[Tensor, int, list[tuple[list[int], int]]]:
    """Return the loss of each example, from calls of `look` with as many examples at a time as in a step.

    A loss that draws random numbers, as diffusion models do, draws the same ones in every call of this
    function. If a loss is a mean, it stands for all of its examples, whose number is returned, too; else
    zero. The batches are the last result.
    """
    topology, losses, means = vector.topology, torch.zeros_like(kept.losses), 0
    _, (most,) = topology.plan([len(kept)])
    size = microbatch or kept.promise.examples or most
    batches = kept.batches or passes(list(range(len(kept))), size, most)
    _, (count,) = topology.plan([len(batches)])
    batches = [*batches, *[(batches[0][0], 0)] * (count - len(batches))]  # processes make as many passes
    with topology.passes(), evaluating(model, vector.device, topology.collective), torch.no_grad():
        for k, (at, weight) in enumerate(batches):
            seed(k, vector.device)
            value = look(at, weight, k == 0).detach().cpu().double()
            losses[at[:weight]] = value[:weight] if value.ndim else value
            means = means or (0 if value.ndim else len(at))
    return losses, means, batches


def _student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's distribution, by its expansion at the normal one."""
    if freedom <= 3:  # where the expansion is not close
        return (12.7062, 4.3027, 3.1824)[round(freedom) - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@contextmanager
def undisturbed(data: Any) -> Iterator[None]:
    """Restore the random states from which a loader draws an order, and a data set what it does at random."""
    loads = isinstance(data, DataLoader)
    batches = getattr(data, "batch_sampler", None)
    holding = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(one, "generator", None) for one in holding if loads]
    found.append(getattr(data, "synchronized_generator", None))  # of Accelerate
    states = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
    try:
        with forked():
            yield
    finally:
        for one, state in states:
            one.set_state(state)


def _labelled(kept: KeptSet, loss: Loss) -> list[int]:
    """Leave out the examples without any label; return the numbers of the others."""
    n, labelled = len(kept), getattr(loss, "labelled", None)
    if labelled is None and loss is not model_loss:
        return list(range(n))
    numbers: list[int] = []
    for start in range(0, n, _FETCHED):
        at = list(range(start, min(start + _FETCHED, n)))
        batch, _ = kept.fetch(at, None)
        if labelled is not None:
            mask = labelled(batch)
        elif isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
            mask = labelled_rows(batch["labels"])
        else:
            return list(range(n))
        # Labels of another shape, as in a packed row of several texts, cannot be told apart.
        numbers += compress(at, mask.tolist()) if len(mask) == len(at) else at
    _leave_out(kept, numbers, list(range(n)))
    return numbers


def _leave_out(kept: KeptSet, some: list[int], numbers: list[int]) -> None:
    """Keep only some of the examples, and say how many are left out; raise if none is left."""
    n = len(kept)
    if len(some) == n:
        return
    if not some:
        raise ValueError(f"No example of {kept.title} has a label. {_NO_LABEL}")
    gone = [numbers[k] for k in sorted(set(range(n)) - set(some))]
    warn(
        f"{len(gone)} of {n} examples of {kept.title} have no label and are left out: number "
        f"{', '.join(map(str, gone[:10]))}{', ...' if len(gone) > 10 else ''}. {_NO_LABEL}"
    )
    part = kept.part(some)
    kept.examples, kept.losses, kept.outputs, kept.batches = part.examples, part.losses, part.outputs, []


def _check_collate(kept: KeptSet) -> None:
    """Raise if collation is random although outputs or losses are stored."""
    some = list(range(min(_FETCHED, len(kept))))
    first, again = (leaves_of(kept.fetch(some, None)[0], Tensor) for _ in range(2))
    with suppress(RuntimeError):  # of tensors that cannot be compared
        if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, again, strict=True)):
            return
        raise ValueError(
            f"The collate function makes a different batch of the same examples of {kept.title} each time, "
            "as masking at random does, so outputs and losses would be stored for other inputs than "
            "those of later steps. Pass batches, or a collate function without random numbers."
        )


def _check_finite(
    kept: KeptSet, numbers: list[int], loss: Loss, model: nn.Module, vector: ParameterVector
) -> None:
    """Raise if a loss is not finite, and name the examples."""
    wrong = (~kept.losses.isfinite()).nonzero().flatten().tolist()
    if not wrong:
        return
    if not vector.topology.collective:  # a mean does not tell of which example
        with suppress(Exception), evaluating(model, vector.device):
            single = [value_of(loss, model, kept.fetch([k], vector.device)[0], 1) for k in wrong]
            wrong = [k for k, one in zip(wrong, single, strict=True) if not one.isfinite()] or wrong
    named = ", ".join(str(numbers[k]) for k in wrong[:10])
    raise ValueError(
        f"The loss of example {named} of {kept.title} is {float(kept.losses[wrong[0]])}, so no promise "
        "about it is possible. Leave out examples with NaN or without a label, and check the weights of the "
        "model."
    )


def _of_one(outputs: Any, n: int) -> Any:
    """Return outputs with one element per example; a packed row of several texts is one example."""
    if n == 1 and isinstance(outputs, PerExample) and len(outputs) > 1:
        return PerExample([tree_map(lambda *leaves: torch.cat(leaves), *outputs)])
    return outputs
