"""The trainable parameters of a model as one vector, and the columns that enter global sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gemproj._arrays import wide_dtype
from gemproj.torch.processes import Processes


class Buffer(NamedTuple):
    """A vector with one view per parameter, in the shape of the local shard."""

    whole: Tensor
    parts: list[Tensor]


class ParameterVector:
    """The trainable parameters of a model as one vector of the entries that this process holds.

    For a `DTensor` (FSDP2, tensor parallelism), these are the entries of the local shard. Parameters with
    equal placements are contiguous, so the owned columns form few slices. The order of parameters is the same
    on all processes. Parameters on several devices are gathered on the first one.
    """

    def __init__(self, named: Iterable[tuple[str, Any]], group: Any = None) -> None:
        chosen = [(name, p) for name, p in named if p.requires_grad]
        if not chosen:
            raise ValueError("model has no parameter that requires a gradient; nothing could be projected.")
        wrong = next((name for name, p in chosen if p.is_complex()), None)
        if wrong is not None:
            raise TypeError(f"Parameters must be real; {wrong} is complex.")
        chosen.sort(key=lambda pair: _placement(pair[1]))  # stable: keeps the order of equal placements
        self.names, self.parameters = [name for name, _ in chosen], [p for _, p in chosen]
        shards = self.local()
        self.device, self.dtype = shards[0].device, shards[0].dtype
        for p in shards:
            self.dtype = torch.promote_types(self.dtype, p.dtype)
        self.sizes, self.shapes = [p.numel() for p in shards], [p.shape for p in shards]
        self._starts = [0, *accumulate(self.sizes)]
        self.d = self._starts[-1]  # number of local entries
        if group is None and (part := group_of(self.parameters)) is not None:
            raise ValueError(
                f"Parameters are sharded over {part.size()} of {dist.get_world_size()} processes. If others "
                "train another model, pass process_group=, the group of these processes; if they train "
                "replicas, make these with fully_shard, over a mesh of all processes."
            )
        self.topology = self._topology(group)
        self._owned = [self._owns(p) for p in self.parameters]
        # Columns that this process contributes to global sums are all, unless shards are replicated.
        self.columns, self.owned = self.slices(), self.slices(owned=True)

    def buffer(self, dtype: torch.dtype | None = None) -> Buffer:
        """Return an uninitialised vector with its parts."""
        whole = torch.empty(self.d, dtype=dtype or self.dtype, device=self.device)
        return Buffer(whole, self.split(whole))

    scratch = cached_property(buffer)  # of gradients and steps
    before = cached_property(buffer)  # the parameters at the beginning of the last projected step

    @cached_property
    def weights(self) -> Buffer:
        """The weights of the metric in which steps are projected; at small rates, float16 would overflow."""
        return self.buffer(torch.float32 if self.dtype == torch.float16 else None)

    def rounding(self) -> Tensor:
        """Return by how much the rounding of the parameters changes a step, as a norm, shape (1,)."""
        eps = [torch.finfo(p.dtype).eps for p in self.parameters]
        norms = torch.stack(torch._foreach_norm(self.before.parts)).to(wide_dtype(torch, self.device))
        square = (norms.new_tensor(eps) * norms).square().sum().reshape(1)
        return self.topology.sum_shards(square).sqrt()  # replicas may count more than once

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return views of vectors (..., d), one per parameter, in the shapes of the local shards."""
        parts = zip(vector.split(self.sizes, dim=-1), self.shapes, strict=True)
        return [part.view((*vector.shape[:-1], *shape)) for part, shape in parts]

    def local(self) -> list[Tensor]:
        """Return the local shard of each parameter; see `local`."""
        return [local(p) for p in self.parameters]

    def read_step(self) -> Tensor:
        """Return `before` minus the parameters, in `scratch`."""
        step = self.scratch
        torch._foreach_copy_(step.parts, self.local())
        return torch.sub(self.before.whole, step.whole, out=step.whole)

    def take_step(self) -> None:
        """Set the parameters to `before` minus the step in `scratch`, which is overwritten."""
        step = self.scratch
        torch.sub(self.before.whole, step.whole, out=step.whole)
        self.assign(step.parts)

    def assign(self, values: Sequence[Tensor]) -> None:
        """Set the local shards of the parameters."""
        torch._foreach_copy_(self.local(), list(values))

    def gradients(self, loss: Tensor) -> list[Tensor | None]:
        """Return the gradient of a loss with respect to each parameter; ``.grad`` of shards must be None."""
        if not self.topology.collective:
            found: list[Tensor | None] = [*torch.autograd.grad(loss, self.parameters, allow_unused=True)]
            if any(gradient is None for gradient in found):
                refuse_reentrant(loss)
            return found
        # FSDP computes with gathered parameters and writes the gradients of shards to .grad, which was None.
        loss.backward()
        found = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        if all(gradient is None for gradient in found):
            raise RuntimeError(
                "The loss of kept examples left no gradient on any parameter. If gradient synchronisation is "
                "off (set_requires_gradient_sync(False)), switch it on before the step."
            )
        return found

    def gather(
        self, gradients: Sequence[Tensor | None], parts: Sequence[Tensor], add: bool = False
    ) -> list[int]:
        """Copy, or add, the local entries of gradients to the parts of a vector; None stands for zero.

        Return the indices of the others.
        """
        given = {j: gradient for j, gradient in enumerate(gradients) if gradient is not None}
        found = {j: local(self.placed(j, gradient)).to(self.device) for j, gradient in given.items()}
        if found:
            write = torch._foreach_add_ if add else torch._foreach_copy_
            write([parts[j] for j in found], [*found.values()])
        for j in () if add else range(len(parts)):
            if j not in found:
                parts[j].zero_()
        return [*found]

    def placed(self, j: int, gradient: Any) -> Tensor:
        """Return a dense gradient of parameter j with the placements of the parameter."""
        if gradient.layout != torch.strided:
            raise TypeError(
                f"Gradients must be dense; found layout {gradient.layout} for {self.names[j]}. Use "
                "sparse=False in the embedding."
            )
        p: Any = self.parameters[j]
        if mesh_of(p) is not None and gradient.placements != p.placements:
            return gradient.redistribute(p.device_mesh, p.placements)
        return gradient

    def read_gradient(self) -> Tensor:
        """Copy the ``.grad`` of all parameters to `scratch` and return it; missing gradients are zero."""
        for j, p in enumerate(self.parameters):
            if p.grad is not None and (placed := self.placed(j, p.grad)) is not p.grad:
                p.grad = placed
        self.gather([p.grad for p in self.parameters], self.scratch.parts)
        return self.scratch.whole

    def write_gradient(self, reached: Sequence[bool]) -> None:
        """Copy `scratch` to each ``.grad``; create missing gradients of `reached` parameters.

        Missing gradients are created even if they are zero, because a test for zeros would synchronise.
        """
        to, given = [], []
        for p, part, wanted in zip(self.parameters, self.scratch.parts, reached, strict=True):
            if p.grad is None and wanted:
                p.grad = torch.empty_like(p)  # with its strides, on which fused optimizers rely
            if p.grad is not None:
                to.append(local(p.grad))
                given.append(part)
        if to:
            torch._foreach_copy_(to, given)

    def slices(self, chosen: Iterable[int] | None = None, *, owned: bool = False) -> list[slice]:
        """Return columns of the chosen parameters, in increasing order; with `owned`, only owned columns."""
        slices: list[slice] = []
        for j in range(len(self.sizes)) if chosen is None else chosen:
            start, stop = self._starts[j], self._starts[j + 1]
            if start == stop or (owned and not self._owned[j]):
                continue
            if slices and slices[-1].stop == start:
                slices[-1] = slice(slices[-1].start, stop)
            else:
                slices.append(slice(start, stop))
        return slices or [slice(0, 0)]

    def signature(self) -> dict[str, Any]:
        """Return facts that must be equal on all processes that train the same model."""
        entries = sum(getattr(p, "ds_numel", p.numel()) for p in self.parameters)  # ZeRO-3's are elsewhere
        return {"number of parameters": len(self.parameters), "number of entries of all parameters": entries}

    def _topology(self, group: Any) -> Processes:
        plain = sum(n for n, p in zip(self.sizes, self.parameters, strict=True) if mesh_of(p) is None)
        meshes = [mesh for mesh in map(mesh_of, self.parameters) if mesh is not None]
        found = Processes(self.device, group, collective=bool(meshes), plain=plain)
        if meshes and meshes[0].device_type != self.device.type:
            raise ValueError(
                f"Parameters are on {self.device.type}, and passes on {meshes[0].device_type}, as with "
                "CPUOffloadPolicy: this is not supported. Shard without it."
            )
        most = max((mesh.size() for mesh in meshes), default=found.world)
        if most < found.world:
            raise ValueError(
                f"Parameters are sharded over {most} of {found.world} processes of the group; how others "
                "share them is unknown. Make replicas with fully_shard, over a mesh of all."
            )
        return found

    def _owns(self, p: Any) -> bool:
        """Return whether this rank contributes its local shard to global sums; replicas count once.

        For a replicated shard, the rank at coordinate zero contributes. If the mesh of a parameter has only
        some ranks, other ranks are assumed to hold replicas, and the mesh with the first rank contributes.
        In two-dimensional parallelism, parameters without tensor parallelism have such meshes.
        """
        if not self.topology.collective:
            return True
        mesh, group = mesh_of(p), self.topology.group
        if mesh is None:
            return dist.get_rank(group) == 0
        coordinate, first = mesh.get_coordinate(), dist.get_global_rank(group, 0)
        if coordinate is None or first not in mesh.mesh.flatten().tolist():
            return False
        return all(c == 0 for c, at in zip(coordinate, p.placements, strict=True) if at.is_replicate())


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a tensor, detached if gradients are recorded."""
    held: Any = tensor.detach() if tensor.requires_grad and torch.is_grad_enabled() else tensor
    return held.to_local() if mesh_of(tensor) is not None else held


def mesh_of(tensor: Tensor) -> Any:
    """Return the device mesh of a `DTensor`; None for any other tensor."""
    return getattr(tensor, "device_mesh", None)


def group_of(parameters: list[Any]) -> Any:
    """Return the group of the processes that share the parameters; None if all processes do."""
    meshes = [mesh for mesh in map(mesh_of, parameters) if mesh is not None]
    ranks = {tuple(mesh.mesh.flatten().tolist()) for mesh in meshes}
    together = len(set().union(*ranks))
    if not meshes or together == dist.get_world_size():
        return None
    if len(ranks) > 1 or meshes[0].ndim > 1:
        raise ValueError(
            f"Parameters are sharded over {together} of {dist.get_world_size()} processes: pass "
            "the group of these processes as process_group=."
        )
    return meshes[0].get_group()


def refuse_reentrant(loss: Tensor) -> None:
    """Raise if the graph has a reentrant checkpoint, which supports only ``backward()``."""
    seen, left = set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            if node.name() == "CheckpointFunctionBackward":
                raise RuntimeError(
                    "Gradients of single losses cannot be computed through checkpoints with "
                    "use_reentrant=True; checkpoint with use_reentrant=False, or compute these losses "
                    "without checkpoints."
                )
            seen.add(node)
            left.extend(following for following, _ in node.next_functions)


def _placement(parameter: Any) -> tuple[int, ...]:
    """Return a sort key of a parameter's placements, which sorts replicated placements first."""
    mesh = mesh_of(parameter)
    if mesh is None:
        return ()
    return (mesh.size(), *(not at.is_replicate() for at in parameter.placements))
