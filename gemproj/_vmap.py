"""`torch.func.vmap` over projections: the mapped dimension becomes a batch of problems."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def refuse_blocks(alone: int) -> None:
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
    own: Sequence[int],
    needed: Sequence[int],
) -> list[Tensor]:
    """Return tensors with the mapped dimension first, so that they broadcast as a batch.

    Each has so many dimensions of its own behind the leading ones of the problem: two for G, one for g and
    what there is for each constraint. Missing leading dimensions are inserted after the mapped one. Tensors
    that are not mapped stay as they are, but for those that are `needed` with it.
    """
    lead = [a.ndim - (d is not None) - n for a, d, n in zip(tensors, dims, own, strict=True)]
    rank, front = max(lead), []
    for i, (a, d) in enumerate(zip(tensors, dims, strict=True)):
        if d is None and i not in needed:
            front.append(a)
            continue
        a = a.expand(size, *a.shape) if d is None else a.movedim(d, 0)
        front.append(a.reshape(size, *(1,) * (rank - lead[i]), *a.shape[1:]))  # lead is -1 for a number
    return front
