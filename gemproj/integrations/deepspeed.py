"""Projection of the steps of DeepSpeed ZeRO, on float32 shards of the parameters; experimental.

DeepSpeed reduces, unscales and clips gradients within its step, so only the step can be projected. The shards
are stored before the step, and projected shards are written after the step. The module for Accelerate imports
this one where DeepSpeed trains; DeepSpeed itself is not imported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemproj.torch.keeper import KeeperBase
from gemproj.torch.processes import Processes, everyone
from gemproj.torch.promise import Loss, Promise
from gemproj.torch.step import On, ProjectedStep
from gemproj.torch.vector import ParameterVector


class Keeper(KeeperBase):
    """`gemproj.torch.Keeper` for an engine of DeepSpeed with ZeRO 1, 2 or 3; experimental.

    With Accelerate or a Trainer, use their integrations.

    Parameters
    ----------
    engine : deepspeed.DeepSpeedEngine
    promise, **options
        As in `gemproj.torch.Keeper`; only ``on="step"``, the default here, is possible.
    """

    def __init__(
        self, engine: Any, promise: Promise | Loss | float | None = None, *, on: On = "step", **options: Any
    ) -> None:
        super().__init__(promise, on=on, **options)
        self._vector_type, self._step_type = ZeroVector, ZeroStep
        optimizer = adapted(engine.optimizer)
        self._attach(engine.module, optimizer, scaler=optimizer, group=everyone())


class ZeroVector(ParameterVector):
    """A `ParameterVector` of the float32 shards that this process holds, for ZeRO 1, 2 and 3.

    The shard of a parameter is a contiguous range of its entries. The padding of stage 3 is left out, because
    its values are arbitrary.
    """

    publish: Any = None  # copies changed shards to the parameters of all processes

    def local(self) -> list[Tensor]:  # noqa: D102
        return [_fragment(p)[0] for p in self.parameters]

    def assign(self, values: Sequence[Tensor]) -> None:  # noqa: D102
        for p, value in zip(self.parameters, values, strict=True):
            if _stage3(p):
                padded = p._z3_optimizer.get_local_fp32_param(p)
                padded[: value.numel()] = value
                p._z3_optimizer.set_local_hp_param(padded, p)
            elif value.numel():
                p._hp_mapping.hp_fragment.copy_(value)
        self.publish()

    def gradients(self, loss: Tensor) -> list[Tensor | None]:  # noqa: D102
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        # `placed` is a collective operation, so every process must call it for every parameter.
        return [
            torch.zeros(getattr(p, "ds_shape", p.shape), device=loss.device) if g is None else g
            for p, g in zip(self.parameters, gradients, strict=True)
        ]

    def placed(self, j: int, gradient: Tensor) -> Tensor:
        """Sum a gradient over processes, and return the local entries of the sum."""
        p = self.parameters[j]
        part, start = _fragment(p)
        whole = gradient.detach().to(torch.float32, copy=True).reshape(-1)
        dist.all_reduce(whole, group=self.topology.group)
        return whole[start : start + part.numel()].to(part.device)

    def _topology(self, group: Any) -> Processes:
        world = dist.get_world_size(group)
        for p in self.parameters:
            if dist.get_world_size(p.ds_process_group if _stage3(p) else p._dp_group) != world:
                raise ValueError(
                    "parameters are partitioned by DeepSpeed over only some processes (as by MiCS, "
                    "experts or tensor parallelism). Partition them over all processes, or use FSDP2."
                )
        # `placed` sums gradients over processes, not the backward pass.
        return Processes(self.device, group, collective=True, averaged=False)

    def _owns(self, p: Any) -> bool:
        return True


def adapted(zero: Any) -> ZeroOptimizer:
    """Return the adapter of a ZeRO optimizer, always the same one."""
    if not hasattr(zero, "_gemproj"):
        zero._gemproj = ZeroOptimizer(zero)
    return zero._gemproj


class ZeroOptimizer:
    """An adapter of a ZeRO optimizer: step hooks, groups, states by parameter, and the scale of losses."""

    def __init__(self, zero: Any) -> None:
        if not (hasattr(zero, "bit16_groups") or hasattr(zero, "fp32_partitioned_groups_flat")):
            raise ValueError(
                f"optimizer is DeepSpeed's {type(zero).__name__}; a keeper needs one of ZeRO 1, 2 "
                'or 3. Set "zero_optimization": {"stage": 1} or more; in bfloat16 stage 2 or more, or '
                '"grad_accum_dtype": "bf16".'
            )
        if getattr(zero, "swap_optimizer", False):
            raise ValueError(
                "optimizer keeps its state on NVMe, where a projector cannot read it. Keep it on the device."
            )
        if getattr(zero, "round_robin_gradients", False):  # then DeepSpeed reports wrong shards
            raise ValueError(
                'optimizer has "round_robin_gradients", with which DeepSpeed does not report where '
                'parameters are in its shards. Set it to false in "zero_optimization".'
            )
        self.zero = zero
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._plain = zero.step
        zero.step = self._step

    register_step_pre_hook = torch.optim.Optimizer.register_step_pre_hook
    register_step_post_hook = torch.optim.Optimizer.register_step_post_hook

    def is_enabled(self) -> bool:
        """Return whether losses are scaled."""
        return float(self.zero.loss_scale) != 1.0

    def get_scale(self) -> float:
        """Return the loss scale of training."""
        return float(self.zero.loss_scale)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, with the parameters of the model."""
        groups = [dict(group, params=[]) for group in self.zero.optimizer.param_groups]
        for p, (i, _) in self._flat().items():
            groups[i]["params"].append(p)
        return groups

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """The local second moments and the number of steps of each parameter."""
        groups, flat = self.zero.optimizer.param_groups, self._flat()
        return {p: self._state(p, groups[i], whole) for p, (i, whole) in flat.items()}

    def publish(self) -> None:
        """Copy changed float32 shards to the parameters of all processes."""
        zero = self.zero
        if not hasattr(zero, "fp32_partitioned_groups_flat"):
            zero.update_lp_params()
            return
        zero.parameter_offload.partition_all_parameters()
        for p in self._flat():
            p.ds_tensor.data.copy_(zero.get_local_fp32_param(p))
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        zero.invalidate_secondary_tensor()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Call pre-hooks, take a step, and call post-hooks unless an overflow has skipped the step."""
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(self, args, kwargs)
        result = self._plain(*args, **kwargs)
        if not self.zero.overflow:
            for hook in list(self._optimizer_step_post_hooks.values()):
                hook(self, args, kwargs)
        return result

    def _flat(self) -> dict[Any, tuple[int, Tensor]]:
        """Map each parameter to the index of its group and the flat tensor that holds its shard."""
        zero = self.zero
        if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3
            numbers = [zero.sub_group_to_group_id[k] for k in range(len(zero.fp16_groups))]
            lists, flat = zero.fp16_groups, zero.fp32_partitioned_groups_flat
        else:
            numbers = list(range(len(zero.bit16_groups)))
            lists, flat = zero.bit16_groups, zero.single_partition_of_fp32_groups
        return {p: (i, whole) for i, whole, some in zip(numbers, flat, lists, strict=True) for p in some}

    def _state(self, p: Any, group: Mapping[str, Any], whole: Tensor) -> dict[str, Any]:
        held = self.zero.optimizer.state.get(whole, {})
        moments = [key for key in ("exp_avg_sq", "max_exp_avg_sq") if key in held]
        found = {key: _fragment(p, key, held[key])[0] for key in moments}
        return found | {"step": held.get("step", group.get("step"))}  # FusedAdam counts steps in the group


class ZeroStep(ProjectedStep):
    """The step of a ZeRO optimizer, which moves all parameters whose learning rate is not zero."""

    optimizer: Any

    def use(self, vector: Any) -> None:  # noqa: D102
        vector.publish = self.optimizer.publish
        super().use(vector)

    def check(self, on: On) -> None:  # noqa: D102
        if on != "step":
            raise ValueError(
                f"on={on!r} needs gradients, which DeepSpeed reduces and clips within its step; use "
                "on='step'."
            )
        super().check(on)

    def _finish(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        zero = self.optimizer.zero
        if zero.clip_grad > 0.0:
            self.clips(zero.clip_grad, torch.as_tensor(zero._global_grad_norm))
        super()._finish(optimizer, args, kwargs)

    def _moves(self) -> list[bool]:
        return [group is not None and bool(group["lr"]) for group in self._groups]


def _stage3(p: Any) -> bool:
    return hasattr(p, "ds_id")


def _fragment(p: Any, key: str | None = None, flat: Any = None) -> tuple[Tensor, int]:
    """Return the local entries of a parameter, or of its state `key`, and the index of the first entry.

    Before stage 3, the states of a group are the parts of one `flat` tensor.
    """
    if _stage3(p):
        padded = p._z3_optimizer.get_local_fp32_param(p, key)
        start = padded.numel() * dist.get_rank(p.ds_process_group)
        return padded[: max(p.ds_numel - start, 0)], start
    mapping = p._hp_mapping
    if mapping is None:  # other processes hold the whole parameter
        return torch.empty(0, device=p.device), 0
    at = mapping.hp_fragment_address
    part = mapping.hp_fragment.detach() if flat is None else flat.narrow(0, at.start, at.numel)
    return part, mapping.lp_fragment_address.start
