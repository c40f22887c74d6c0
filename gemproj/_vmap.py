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

    `own` holds the number of dimensions of each tensor without a batch: 2 for G, 1 for g, h and other
    vectors. Missing batch dimensions are inserted after the mapped dimension. Tensors that are not mapped are
    returned unchanged, except for those with an index in `needed`, which are expanded.
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
