"""A list of parameters as one vector: which entries of it this process holds, and which of them count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Layout:
    """Where each parameter stands in a vector of the entries that this process holds.

    Of a `DTensor` (FSDP2, tensor parallelism) that is the local shard. In a sharded model an entry that
    several processes hold counts on one of them only. Parameters that are spread alike are neighbours there,
    so that those that count are few slices; their order is the same on all processes.

    Attributes
    ----------
    parameters : list of Tensor
        Those that require a gradient, each once.
    d : int
        Number of entries here, all parameters together.
    counted : list of slice
        Those that count here: all, unless a sharded model repeats some elsewhere.
    sharded : bool
        Whether any parameter is a `DTensor`.
    several : bool
        Whether several processes train together: with shards, or with replicas and a `group`.
    group : ProcessGroup or None
        These processes; None is all of them, if there are several.
    """

    def __init__(self, parameters: Iterable[Tensor], group: Any = None) -> None:
        if isinstance(parameters, torch.nn.Module):
            raise TypeError(
                "parameters must be an iterable of tensors; found a module, pass module.parameters()."
            )
        listed = list(parameters)
        for p in listed:
            if not isinstance(p, Tensor) or p.is_complex():
                found = p.dtype if isinstance(p, Tensor) else type(p).__name__
                raise TypeError(f"parameters must be an iterable of real tensors; found {found}.")
        chosen = list({id(p): p for p in listed if p.requires_grad}.values())
        if not chosen:
            raise ValueError("parameters holds none that requires a gradient; nothing could be projected.")
        self.group = group
        self.sharded = any(mesh_of(p) is not None for p in chosen)
        self.several = self.sharded or group is not None
        if self.sharded:
            chosen.sort(key=_spread)  # stable: otherwise in their own order
        self.parameters = chosen
        held = [local(p) for p in chosen]
        devices = {p.device for p in held}
        if len(devices) > 1:
            raise ValueError(f"parameters must be on one device; found {', '.join(map(str, devices))}.")
        self.device = held[0].device
        self.dtype = held[0].dtype
        for p in held:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.sizes = [p.numel() for p in held]
        self._shapes = [p.shape for p in held]
        self.d = sum(self.sizes)
        self._counts = [not self.sharded or _counts(p, group) for p in chosen]
        self.counted = self.spans(counted=True)

    def join(self, group: Any) -> None:
        """Train together with other processes, which hold replicas."""
        self.group, self.several = group, True

    def empty(self, *lead: int) -> Tensor:
        """Return memory for a vector, or with `lead` for that many rows."""
        return torch.empty((*lead, self.d), dtype=self.dtype, device=self.device)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the part of a vector that belongs to each parameter, in its shape, as views."""
        parts = vector.split(self.sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def held(self) -> list[Tensor]:
        """Return what this process holds of each parameter, outside of autograd."""
        return [local(p) for p in self.parameters]

    def placed(self, j: int, gradient: Tensor) -> Tensor:
        """Return a gradient of parameter j, which must be dense, spread as the parameter is."""
        if gradient.layout != torch.strided:
            raise TypeError(
                f"Gradients must be dense; found layout {gradient.layout} for a parameter of shape "
                f"{tuple(self.parameters[j].shape)}. Use sparse=False in the embedding."
            )
        p: Any = self.parameters[j]
        spread: Any = gradient
        if mesh_of(p) is not None and spread.placements != p.placements:
            return spread.redistribute(p.device_mesh, p.placements)
        return gradient

    def spans(self, chosen: Sequence[bool] | None = None, *, counted: bool = False) -> list[slice]:
        """Return the columns of the chosen parameters, or those of them that count, in few slices."""
        wanted = self._counts if counted else [True] * len(self.sizes)
        if chosen is not None:
            wanted = [a and b for a, b in zip(wanted, chosen, strict=True)]
        if all(wanted):
            return [slice(0, self.d)]
        spans: list[slice] = []
        start = 0
        for n, one in zip(self.sizes, wanted, strict=True):
            if one and n:
                if spans and spans[-1].stop == start:
                    spans[-1] = slice(spans[-1].start, start + n)
                else:
                    spans.append(slice(start, start + n))
            start += n
        return spans or [slice(0, 0)]

    def signature(self) -> dict[str, int]:
        """Return numbers that are the same on all processes that train the same model."""
        entries = sum(p.numel() for p in self.parameters)
        return {"parameters": len(self.parameters), "entries of all parameters": entries}


def local(tensor: Tensor) -> Tensor:
    """Return what this process holds of a tensor, outside of autograd."""
    held: Any = tensor.detach()
    return held.to_local() if mesh_of(tensor) is not None else held


def mesh_of(tensor: Tensor) -> Any:
    """Return the device mesh of a `DTensor`, None for any other tensor."""
    return getattr(tensor, "device_mesh", None)


def like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return a gradient for a parameter of which this process holds `part`."""
    # In memory as the parameter is: fused optimizers go through both alike.
    part = torch.empty_like(local(parameter)).copy_(part)
    if mesh_of(parameter) is None:
        return part
    from torch.distributed.tensor import DTensor

    p: Any = parameter
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def _spread(parameter: Tensor) -> tuple[int, ...]:
    """Return how a parameter is spread over processes, what most of them repeat first."""
    mesh = mesh_of(parameter)
    if mesh is None:
        return ()
    placed: Any = parameter
    return (mesh.size(), *(not at.is_replicate() for at in placed.placements))


def _counts(parameter: Tensor, group: Any) -> bool:
    """Tell whether this process is the one that counts what it holds of a parameter of a sharded model.

    A shard that a mesh replicates counts where its coordinate is zero. What lies on some processes only is
    taken to be repeated on the others (as in two-dimensional parallelism what tensor parallelism leaves
    alone), and counts on the mesh that holds the first process.
    """
    mesh = mesh_of(parameter)
    if mesh is None:
        return dist.get_rank(group) == 0
    coordinate = mesh.get_coordinate()
    placed: Any = parameter
    first = dist.get_global_rank(group, 0) if group is not None else 0
    return (
        coordinate is not None
        and first in mesh.mesh.flatten().tolist()
        and all(c == 0 for c, at in zip(coordinate, placed.placements, strict=True) if at.is_replicate())
    )
