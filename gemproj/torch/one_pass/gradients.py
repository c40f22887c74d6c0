"""The gradients of all past tasks from one forward and one backward pass over all their examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from gemproj.torch.batches import Batch, Loss, flatten
from gemproj.torch.one_pass.calls import NotPossible, audit, owners, recorded
from gemproj.torch.one_pass.layers import add_gradients
from gemproj.torch.one_pass.rows import TaskRows


class Pass(NamedTuple):
    """What one pass found besides the gradients."""

    reached: list[bool]
    """For each parameter, whether any loss depends on it."""
    tolerance: float
    """By how much, relative to its norm, a gradient may differ from one taken alone, by rounding only."""


def one_pass(
    model: nn.Module,
    loss: Loss,
    batches: Sequence[Batch],
    parameters: Sequence[Tensor],
    out: Sequence[Tensor],
) -> Pass:
    r"""Write the gradient of each batch's mean loss, from one pass over all batches together.

    The gradient of a linear map's weight is a sum over examples of products of its input and the
    gradient of its output (Goodfellow, 2015). One backward pass over all examples gives the latter for
    every layer; summed over the examples of one task at a time, the products are that task's gradient.
    The arithmetic is that of one pass per task, in fewer and larger operations, but the activations of
    all examples are held at once. The ``.grad`` of the parameters is not touched.

    Parameters
    ----------
    model : torch.nn.Module
        Must treat examples independently, with examples along dimension 0 of what each module takes and
        returns; another dimension of the same length cannot be told from it. Dropout draws other masks
        than a pass per task would.
    loss : callable
        ``loss(model, batch)``, the mean over the examples of the batch, or one loss per example, shape (n,).
    batches : sequence of batches
        One per task: nestings of dicts, lists and tuples of tensors, of which dimension 0 is the examples.
    parameters : sequence of Tensor
        Those of the model to differentiate with respect to, p_j.
    out : sequence of Tensor
        For each of them a tensor of shape (t, \*p_j.shape) that is written to, for example a view of the
        constraint matrix. After an error its content is undefined.

    Returns
    -------
    Pass

    Raises
    ------
    NotPossible
        If batches do not fit together, or if a gradient cannot be told apart by task: a parameter that is
        used outside of the module that owns it, dimension 0 that is not the examples, and so on.

    References
    ----------
    I. Goodfellow, "Efficient per-example gradient computations", arXiv:1510.01799, 2015.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch.one_pass import one_pass
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> G = torch.empty(2, 2)
    >>> past = [torch.eye(2)[:1], torch.tensor([[3.0, 4.0], [1.0, 0.0]])]
    >>> one_pass(model, lambda model, x: model(x)[:, 0], past, [model.weight], [G.view(2, 1, 2)]).reached
    [True]
    >>> G.tolist()
    [[1.0, 0.0], [2.0, 2.0]]
    """
    batch, counts = concatenate(batches)
    total = sum(counts)
    _check(model, parameters)
    with recorded(owners(model, parameters), total) as calls:
        value = loss(model, batch)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.reshape(())
    if not isinstance(value, Tensor) or not value.requires_grad or value.shape not in ((), (total,)):
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise NotPossible(
            f"the loss must be a scalar or one number per example, with a graph; found {found}."
        )
    if value.ndim:
        seed, scale = torch.cat([value.new_full((n,), 1 / n) for n in counts]), [1.0] * len(counts)
    else:  # of a mean over all examples, a task's share is n / total
        seed, scale = value.new_full((), len(counts)), [total / n / len(counts) for n in counts]
    reached = audit(value, calls, model, parameters)
    rows = TaskRows(out, counts, scale)
    dtypes = {p.dtype for p in [*model.parameters(), *parameters] if p.is_floating_point()}
    if calls:
        edges = [edge for call in calls for edge in call.outputs]
        gradients = list(torch.autograd.grad(value, edges, seed, allow_unused=True))
        del value, edges
        with torch.no_grad(), torch.autocast(parameters[0].device.type, enabled=False):
            while calls:  # from the last to the first; what is done with is freed
                call = calls.pop()
                first = len(gradients) - len(call.outputs)
                mine, gradients[first:] = gradients[first:], []
                add_gradients(call, mine, rows)
                dtypes |= {dy.dtype for dy in mine if dy is not None}
                del call, mine
    rows.finish()
    return Pass(reached, _tolerance(model, dtypes, parameters[0].device))


def concatenate(batches: Sequence[Batch]) -> tuple[Batch, list[int]]:
    """Return all batches as one, and the number of examples of each; `NotPossible` if they differ in kind."""
    try:
        flat = [flatten(batch) for batch in batches]
    except (TypeError, ValueError) as error:
        raise NotPossible(str(error)) from error
    if not flat:
        raise NotPossible("there is no batch.")
    first, spec = flat[0]
    for leaves, other in flat:
        if other != spec or any(
            (a.shape[1:], a.dtype, a.device) != (b.shape[1:], b.dtype, b.device)
            for a, b in zip(leaves, first, strict=True)
        ):
            raise NotPossible("the batches of the tasks differ in structure, in shape or in kind.")
    counts = [len(leaves[0]) for leaves, _ in flat]
    if 0 in counts:
        raise NotPossible("a batch is empty.")
    joined = [torch.cat(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    return tree_unflatten(joined, spec), counts


def _check(model: nn.Module, parameters: Sequence[Tensor]) -> None:
    if any(p._backward_hooks for p in parameters):
        raise NotPossible("parameters have hooks that see their gradients.")
    for name, module in model.named_modules():
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise NotPossible(f"module {name or 'model'} is compiled: hooks would compile it again.")
        # All kinds of batch and instance normalisation with running statistics.
        if isinstance(module, nn.modules.batchnorm._NormBase):
            mixes = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
            if mixes or (module.training and module.track_running_stats):
                raise NotPossible(f"module {name} takes statistics of the batch: tasks would mix.")


def _tolerance(model: nn.Module, dtypes: set[torch.dtype], device: torch.device) -> float:
    """Return the root of the unit roundoff: half of the digits."""
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if torch.float32 in dtypes and _multiplies_shorter(model, device):
        eps = max(eps, 2.0**-10)
    return min(eps**0.5, 3e-2)


def _multiplies_shorter(model: nn.Module, device: torch.device) -> bool:
    """Return whether products of float32 may have the digits of TF32."""
    try:
        if torch.get_float32_matmul_precision() != "highest":
            return True
        if device.type != "cuda" or not torch.backends.cudnn.allow_tf32:
            return False
    except RuntimeError:  # set for each operation, which torch then cannot tell in one word
        return True
    return any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules())
