"""`torch.func.vmap` over projections: the mapped dimension becomes a batch of problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def refuse_blocks(alone: bool) -> None:
    """Raise for blocks, which have no batch dimension."""
    if not alone:
        raise ValueError(
            "torch.func.vmap over a projection of blocks is not supported: blocks have no batch dimension. "
            "Concatenate them to G (t, d) and g (d,)."
        )


def mapped(
    size: int,
    dims: Sequence[int | None],
    tensors: Sequence[Tensor],
    form: Any,
    *,
    all_of_them: bool = False,
) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """Return tensors with the mapped dimension first, so that they broadcast as a batch; and their shapes.

    g and a warm start always get that dimension, others that are not mapped only if asked for. Where the
    problem has leading dimensions already, missing ones are inserted after the mapped one.
    """
    always = (form.blocks[0], len(tensors) - 1 if form.given[-1] else None)
    own = [
        a.ndim - (d is not None) - (2 if i == 0 else 1)
        for i, (a, d) in enumerate(zip(tensors, dims, strict=True))
    ]
    rank = max(own)
    front, shapes = [], []
    for i, (a, d) in enumerate(zip(tensors, dims, strict=True)):
        if d is not None:
            a = a.movedim(d, 0)
        elif i in always or all_of_them:
            a = a.expand(size, *a.shape)
        else:
            front.append(a)
            continue
        shapes.append(tuple(a.shape))
        front.append(a.reshape(size, *(1,) * (rank - own[i]), *a.shape[1:]))  # own is -1 for a number
    return front, shapes
