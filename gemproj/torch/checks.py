"""What `GEM` and the objects for frameworks were given by mistake, and what was meant."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from gemproj._checks import check_count
from gemproj.torch.memory import EpisodicMemory

_NAMES_ELSEWHERE = {
    "memory_strength": "it is called margin here",
    "patterns_per_experience": "it is called per_task here, an option of the memory",
    "per_task": "it is one of the memory: EpisodicMemory(per_task=...)",
    "label": "it is one of the memory: EpisodicMemory(label=...)",
    "eps": "the projection is exact without a ridge; method=GEM2017(...) has one",
}


def option_names(*classes: type) -> set[str]:
    """Return the names of the parameters of classes."""
    found = [p for one in classes for p in inspect.signature(one).parameters.values()]
    return {p.name for p in found if p.kind is not p.VAR_KEYWORD}


def check_names(owner: str, given: Iterable[str], known: set[str]) -> None:
    """Raise for options that there are not, and name the one that may be meant."""
    for name in given:
        if name not in known:
            close = get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            hint = f": {_NAMES_ELSEWHERE[name]}." if name in _NAMES_ELSEWHERE else hint
            raise TypeError(f"{owner} has no option {name!r}{hint}")


def check_kinds(model: Any, memory: Any, scaler: Any, **counts: Any) -> None:
    """Raise unless these are a module, and a memory, something with a scale, and counts, each or None."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}.")
    if not isinstance(memory, EpisodicMemory | None):
        raise TypeError(f"memory must be an EpisodicMemory; found {type(memory).__name__}.")
    for name, count in counts.items():
        if count is not None:
            check_count(count, name, 1)
    if scaler is not None and not (hasattr(scaler, "is_enabled") and hasattr(scaler, "get_scale")):
        raise TypeError(
            f"scaler must be the torch.amp.GradScaler of training; found {type(scaler).__name__}. Leave it "
            "out where losses are not scaled."
        )


def check_promise(promise: str, rows: int | None, sample: int | None, options: Mapping[str, Any]) -> None:
    """Raise for promises, draws and options that do not go together."""
    if sample is not None and (rows is not None or promise != "task"):
        raise ValueError(
            "sample is one constraint on examples of all tasks; rows and promise are for others."
        )
    if promise not in ("task", "label", "example"):
        raise ValueError(f"promise must be 'task', 'label' or 'example'; found {promise!r}.")
    if promise == "example" and rows is not None and options.get("smoothing"):
        raise ValueError("smoothing: with promise='example' and rows, rows are of other examples each time.")
    margin = options.get("margin", 0.0)
    weighted = isinstance(margin, torch.Tensor) or bool(margin)
    if weighted and options.get("refresh") == "cyclic" and not options.get("smoothing"):
        warnings.warn(
            "refresh='cyclic' with a margin adds the same old gradients at each step, which forgets more "
            "than new ones of each task do. Use refresh='all', or a bound without a margin.",
            stacklevel=3,
        )
    if options.get("refresh") == "rising" and not (sample is None and rows is None):
        raise ValueError(
            "refresh='rising' compares losses on the same examples; rows and sample draw others."
        )


def check_all_held(held: Iterable[torch.Tensor], model: torch.nn.Module) -> None:
    """Raise unless each trainable parameter of the model is held by one optimizer."""
    ids = [id(p) for p in held]
    if len(ids) > len(set(ids)):
        raise ValueError("optimizer: parameters are in several optimizers, which would each move them.")
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    lacking = [name for name, p in trainable.items() if id(p) not in set(ids)]
    if lacking:
        raise ValueError(
            f"optimizer lacks {len(lacking)} of the {len(trainable)} trainable parameters of the model, such "
            f"as {lacking[0]!r}. Freeze those that stay, with requires_grad_(False); if other optimizers "
            "move them, pass a list of all."
        )


def check_nothing_else_held(held: Iterable[torch.Tensor], projected: Iterable[torch.Tensor]) -> None:
    """Raise for parameters that optimizers move and nothing projects."""
    mine = set(map(id, projected))
    others = [tuple(p.shape) for p in held if id(p) not in mine]
    if others:
        raise ValueError(
            f"optimizer moves {len(others)} parameters that are not projected, the first one of shape "
            f"{others[0]}, so that nothing would be promised. Pass a model that has all of its "
            "parameters; after unfreezing or adding some, call remove() and make a new GEM with the same "
            "memory."
        )
