"""Storage of a set of examples, with the current outputs and losses that the promise needs."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from gemproj.torch.batches import (
    Batch,
    Collate,
    Loss,
    PerExample,
    Remembered,
    Source,
    bare,
    join,
    leaves_of,
    moved,
    parts,
    take,
)
from gemproj.torch.constraint_gradients import preserved_state, reshard, unwrapped
from gemproj.torch.distributed import Replicated
from gemproj.torch.memory import EpisodicMemory
from gemproj.torch.parameters import ParameterVector
from gemproj.torch.promise import Promise, call_loss, explained
from gemproj.torch.reading import read

# Number of examples in a trial of the loss; with one example, some losses drop the first dimension.
_TRIED = 2
# Number of examples checked at a time.
_FETCHED = 64


def remember(
    memory: EpisodicMemory,
    data: Any,
    name: Hashable,
    model: torch.nn.Module | None,
    promise: Promise,
    *,
    collate: Collate | None = None,
    microbatch: int | None = None,
    process_group: Any = None,
) -> Hashable:
    """Store a set of examples for a promise, and return the name of the set; an error stores nothing.

    Outputs are stored if the loss has a method `outputs`, losses if the promise has a tolerance. If neither
    is stored, the model may be None. With a model, the loss is then tried on a few examples and, if this
    fails, on as many examples as a step uses. The other parameters are those of `gemproj.torch.GEM.keep`.
    """
    if name is None:
        name = next(k for k in itertools.count(len(memory)) if k not in memory.tasks)
    loss, bounded = promise.loss, promise.tolerance is not None
    outputs = getattr(loss, "outputs", None)
    evaluated = bounded or outputs is not None
    draft = memory.draft(name)
    if name in draft.tasks:
        draft.record(name)  # drops outputs and losses, which are recomputed or not needed
    if model is None:
        if evaluated:
            raise ValueError("model is needed, because outputs or losses of the examples are stored.")
        _add_all(draft, data, name, collate)
        memory.adopt(draft)
        return name
    model, parallel = unwrapped(model)
    reshard(model)
    floating: list[Tensor] = [p for p in model.parameters() if p.is_floating_point()]
    trainable = [p for p in floating if p.requires_grad]
    # In a frozen model, one parameter represents all parameters.
    held = trainable or [p.detach().requires_grad_() for p in floating[:1]]
    vector = ParameterVector.of(held, process_group)
    if parallel is not None and vector.topology.world == 1:
        vector.topology = Replicated(vector.device, parallel.process_group)
    topology = vector.topology
    with topology.agreement({"option tolerance": bounded, "option microbatch": microbatch}):
        _add_all(draft, data, name, collate)
        source = draft.source(name)
        with torch.random.fork_rng(devices=[]):  # a collate function may draw random numbers
            _check_examples(source, name, loss, evaluated)
    _, (most,) = topology.plan([source.size])
    model = model if evaluated else getattr(model, "_orig_mod", model)  # a trial should not compile

    # Sharded processes cannot agree to try again after an error.
    tried = not (evaluated or topology.collective)

    # Whether steps combine the examples in different batches.
    drawn = (promise.examples is not None or promise.per != "task") and not topology.collective

    def evaluate(size: int) -> None:
        found, values = [], []
        some = replace(source, examples=source.examples[:size])
        with topology.passes(), preserved_state(model, vector.device), torch.no_grad():
            for given, n, weight in parts(some, microbatch, min(most, size)):
                devices = [leaf.device for leaf in leaves_of(given) if isinstance(leaf, Tensor)]
                home, part = (devices or [torch.device("cpu")])[0], moved(given, vector.device)
                with explained(part):
                    stored = () if outputs is None else outputs(model, part)
                    if n == 1 and isinstance(stored, PerExample):  # a packed row of several texts
                        stored = PerExample([tree_map(lambda *leaves: torch.cat(leaves), *stored)])
                found.append(moved(take(stored, slice(weight)), home))
                if bounded or len(found) == 1:
                    with torch.set_grad_enabled(tried):
                        value = call_loss(loss, model, Remembered(part, stored) if evaluated else part, n)
                    values.append((value, n, weight, home))
                    if evaluated and drawn and len(found) == 1 and value.shape == (n,) and n > _TRIED:
                        few = slice(_TRIED)
                        again = Remembered(moved(some.fetch(few), vector.device), take(stored, few))
                        _warn_of_others(call_loss(loss, model, again, _TRIED), value[few], name)
        # Checked after all passes, because only then can sharded processes report an error to each other.
        with topology.agreement({}), torch.no_grad():
            for value, *_ in values:
                _check(value, name, trained=tried and bool(trainable))
            losses = [_one_each(value, n)[:weight].to(home) for value, n, weight, home in values if bounded]
            if evaluated:
                stored = None if outputs is None else join(found)
                draft.record(name, outputs=stored, losses=torch.cat(losses) if bounded else None)

    size = max(source.size, most) if evaluated or promise.examples is None else promise.examples
    try:
        evaluate(_TRIED if tried else size)
    except Exception:  # includes errors of other processes
        if not tried:
            raise
        evaluate(size)
    finally:
        reshard(model)
    memory.adopt(draft)
    return name


def _add_all(memory: EpisodicMemory, data: Any, name: Hashable, collate: Collate | None) -> None:
    """Offer all examples to the memory; raise if a new set has none."""
    # A loader draws the order of an epoch from torch's random state or from a generator. Both are restored,
    # because training continues with them.
    loads = isinstance(data, DataLoader)
    batches = getattr(data, "batch_sampler", None)
    holding = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(one, "generator", None) for one in holding if loads]
    states = [(one, one.get_state()) for one in found if isinstance(one, torch.Generator)]
    try:
        with torch.random.fork_rng(devices=[], enabled=loads):
            chunks, collate = read(data, collate)
            for chunk in chunks:
                memory.add(chunk, name, collate=collate)
    finally:
        for one, state in states:
            one.set_state(state)
    if name not in memory.tasks:
        raise ValueError("data holds no example. An iterator can be read only once: pass the loader itself.")


def _check_examples(source: Source, name: Hashable, loss: Loss, stored: bool) -> None:
    """Raise if no example has a label, or if collation is random although outputs or losses are `stored`."""
    size, labelled = source.size, getattr(loss, "labelled", None)
    if labelled is not None and not any(labelled(_batch(source, k)) for k in range(0, size, _FETCHED)):
        raise ValueError(
            f"No example of {name!r} has a label: all labels are -100, which is ignored. Check what the "
            "collate function or the chat template does to the labels."
        )
    if stored:
        first, again = ([a for a in leaves_of(_batch(source)) if isinstance(a, Tensor)] for _ in range(2))
        if not all(map(_equal, first, again)):
            raise ValueError(
                f"The collate function makes a different batch of the same examples of {name!r} each time, "
                "as masking at random does, so outputs and losses would be stored for other inputs than "
                "those of later steps. Pass batches, or a collate function without random numbers."
            )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether tensors are equal, with NaN equal to NaN; True if they cannot be compared."""
    with suppress(RuntimeError):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    return True


def _batch(source: Source, first: int = 0) -> Batch:
    """Return up to `_FETCHED` examples as a batch, without stored outputs and losses."""
    return bare(source.fetch(slice(first, first + _FETCHED)))


def _check(losses: Tensor, name: Hashable, trained: bool) -> None:
    """Raise if losses are not finite, or have no gradient although parameters are `trained`."""
    if trained and not losses.requires_grad:
        raise ValueError(
            "loss(model, batch) has no gradient: it does not depend on trainable parameters of the model, or "
            "runs under torch.no_grad() or detach()."
        )
    if not losses.isfinite().all():
        wrong = float(losses[~losses.isfinite()][0])
        raise ValueError(
            f"The loss of examples of {name!r} is {wrong}, so no promise about it is possible. Leave out "
            "examples without a label, and check the weights of the model."
        )


def _warn_of_others(losses: Tensor, among_more: Tensor, name: Hashable) -> None:
    """Warn if the loss of an example depends on the other examples of its batch."""
    apart = (losses - among_more).abs().max()
    if apart > 0.03 * (1 + among_more.abs().max()):  # more than rounding errors of bfloat16
        warnings.warn(
            f"Losses of examples of {name!r} depend on the other examples of their batch, by {apart:.1g}: "
            "the stored outputs or losses do not match those in later batches. Causes are negatives from the "
            "same batch, and padding on the left without position ids. Pass microbatch=1, or keep all "
            "examples in one batch: examples=None and per='task'.",
            stacklevel=4,
        )


def _one_each(losses: Tensor, n: int) -> Tensor:
    if losses.shape != (n,):
        raise ValueError(
            f"tolerance needs one loss for each example, shape ({n},); found {tuple(losses.shape)}. Compute "
            "it with reduction='none', or use CrossEntropy of gemproj.torch.losses (for causal language "
            "models with shift=True); or pass microbatch=1, so that the loss is called with one example at a "
            "time."
        )
    return losses
