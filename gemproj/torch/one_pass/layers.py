"""Each task's gradient of the parameters of one module, from its input and the gradient of its output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from gemproj.torch.one_pass.calls import Call, NotPossible, tensors_of
from gemproj.torch.one_pass.rows import TaskRows


def add_gradients(call: Call, gradients: Sequence[Tensor | None], rows: TaskRows) -> None:
    """Add what one call contributes to the gradient of each task.

    Parameters
    ----------
    call : Call
        With all examples of all tasks along dimension 0.
    gradients : sequence of Tensor or None
        The gradient of each of its outputs that require one.
    rows : TaskRows
        Receives the gradients.
    """
    if all(dy is None for dy in gradients):
        return
    name = type(call.module).__name__
    taken = call.tensors
    tensors = [x for x in [*taken, *gradients] if x is not None and x.ndim]
    if not taken or any(len(x) != rows.total for x in tensors):
        raise NotPossible(f"dimension 0 of what goes into or out of a {name} is not the examples.")
    if [x._version for x in taken] != call.versions:
        raise NotPossible(f"the input of a {name} was changed in place after its call.")
    (dy, *others), (x, *_) = gradients, taken
    weight, bias = call.owned.get("weight"), call.owned.get("bias")
    if dy is not None and not others and _is_linear(call) and x.ndim > 1:
        if weight is not None:
            x = x.to(dy.dtype)
            rows.add_products(weight, *((dy, x) if isinstance(call.module, nn.Linear) else (x, dy)))
        if bias is not None:
            rows.add_sums(bias, dy)
    elif dy is not None and weight is not None and _is_table(call):
        padding = getattr(call.module, "padding_idx", None)
        if padding is not None:
            dy = dy.masked_fill(torch.eq(x, padding).unsqueeze(-1), 0)
        rows.add_lookups(weight, x, dy)
    else:
        _rerun(call, gradients, rows)


def _is_linear(call: Call) -> bool:
    """Return whether a module is a plain linear map: nn.Linear, or transformers' Conv1D, (in, out)."""
    kind = type(call.module)
    linear = kind is nn.Linear or (kind.__name__, kind.__module__) == ("Conv1D", "transformers.pytorch_utils")
    return linear and _is_plain(call)


def _is_table(call: Call) -> bool:
    """Return whether a module looks rows of its weight up, and does nothing else."""
    module = call.module
    if type(module) is not nn.Embedding or not _is_plain(call):
        return False
    return not (module.scale_grad_by_freq or module.sparse or module.max_norm is not None)


def _is_plain(call: Call) -> bool:
    """Return whether weight and bias are the parameters of that name and forward is the one of the class."""
    return call.owned.keys() <= {"weight", "bias"} and "forward" not in vars(call.module)


def _rerun(call: Call, gradients: Sequence[Tensor | None], rows: TaskRows) -> None:
    """Call the module again with each task's examples and differentiate that: for any other module."""
    module, name = call.module, type(call.module).__name__
    if module._forward_pre_hooks:
        raise NotPossible(f"a {name} has hooks before its forward.")
    for below in module.modules():
        rates = [getattr(below, key, 0) for key in ("dropout", "p")]
        if below.training and any(isinstance(rate, float) and rate > 0 for rate in rates):
            raise NotPossible(f"a {name} owns parameters and drops out: its masks cannot be drawn again.")
    named = dict(module.named_parameters(remove_duplicate=False))
    parameters = {j: named[key] for key, j in call.owned.items()}
    device = next(iter(parameters.values())).device.type
    autocast = torch.autocast(device, call.autocast, enabled=call.autocast is not None, cache_enabled=False)
    for k, part in enumerate(rows.slices()):
        leaves = [x[part] if isinstance(x, Tensor) and x.ndim else x for x in call.arguments]
        args, kwargs = tree_unflatten(leaves, call.spec)
        with torch.enable_grad(), autocast:
            outputs = [y for y in tensors_of(module.forward(*args, **kwargs)) if y.requires_grad]
        pairs = [(y, dy[part]) for y, dy in zip(outputs, gradients, strict=True) if dy is not None]
        found = torch.autograd.grad(
            [y for y, _ in pairs],
            list(parameters.values()),
            [dy for _, dy in pairs],
            allow_unused=True,
            materialize_grads=True,
        )
        for j, gradient in zip(parameters, found, strict=True):
            rows.add(j, k, gradient)
