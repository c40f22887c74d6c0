"""What `GEM` was given by mistake, and what to pass instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gemproj._checks import check_count
from gemproj.torch.memory import EpisodicMemory


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
