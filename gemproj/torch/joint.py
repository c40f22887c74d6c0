"""Several rows of G from one forward and backward pass; an optimisation that may say no.

Rows of one loss with equal numbers of examples can share a pass: layer by layer, if examples do not depend on
each other, as in language models, or by ``torch.func.vmap``. Two are compared with rows of their own.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vjp, vmap
from torch.utils.data import default_collate

from gemproj.torch.data import kind_of, leaves_of, map_nested
from gemproj.torch.memory import Draw, fetched
from gemproj.torch.promise import call_loss, rounding_of

# Maximum bytes of activations per thread, for a pass and for one row: a row that fills the caches of a core
# is faster in its own pass (docs/cost.md).
_CPU_PASS, _CPU_ROW = 2**25, 2**22
# Maximum difference between two computations of a row in half precision, relative to its norm. Products of
# float32 numbers on a GPU may have ten bits, too.
_MOST_APART = 0.03

# What a way returns: the largest relative error of its products, indices of parameters on which rows depend,
# the losses of the rows, and those of their examples.
Found = tuple[float, Sequence[int], Tensor, Tensor]


@dataclass
class Plan:
    """How rows of a kind are computed: a function, and the number of rows per pass."""

    way: Any = None
    rows: int = 1
    reached: Sequence[int] = ()  # the parameters on which the first rows depend
    entries: int | None = None  # of the batch of the first pass
    rounding: float = 0.0  # the largest relative error of the products of the last pass


class SharedPasses:
    """Computes several rows of G in one pass, if that is possible and saves time."""

    def __init__(self) -> None:
        self.reason: str | None = None  # why some of the last rows were computed one by one
        self._plans: dict[Hashable, Plan] = {}

    def fill(self, G: Any, model: nn.Module, draws: Sequence[Draw], alone: Any, most: int) -> list[Draw]:
        """Compute rows in passes of at most `most` examples; return the draws left for ``alone(draw)``."""
        left: list[Draw] = []
        # Rows of a pass are adjacent in the buffer: between them is no row that stays as it is.
        for (kind, _), same in groupby(enumerate(draws), lambda pair: (_kind(pair[1]), pair[1].k - pair[0])):
            some = [draw for _, draw in same]
            if len(some) < 2 or not some[0].at or G.vector.topology.collective:
                left += some
                continue
            try:
                if kind not in self._plans:
                    if (plan := _planned(G, model, some, alone, most)) is None:
                        self.reason = "losses are zero, and gradients are zero or rounding errors"
                        left += some
                        continue
                    self._plans[kind], self.reason = plan, None
                plan = self._plans[kind]
                parts = (some[start : start + plan.rows] for start in range(0, len(some), plan.rows))
                left += [draw for part in parts for draw in _share(G, model, part, plan)]
            except Exception as error:  # an error of the loss itself is raised again by `alone`
                self.reason, self._plans[kind] = str(error), Plan()
                left += some
        return left


def _kind(draw: Draw) -> Hashable:
    """Return what rows of a pass have in common: loss, collation and number of examples."""
    # Torch's collate function would leave out what the first example lacks.
    alike = kind_of(draw.kept.examples[0]) if draw.kept.collate is default_collate else id(draw.kept.collate)
    return id(draw.kept.promise.loss), alike, draw.kept.listed, len(draw.at)


def _planned(G: Any, model: nn.Module, draws: list[Draw], alone: Any, most: int) -> Plan | None:
    """Find a way that computes two rows as their own passes do; None if this look cannot tell."""
    n, device, threads = len(draws[0].at), G.vector.device, torch.get_num_threads()
    of_pass, of_row, rounding = threads * _CPU_PASS, threads * _CPU_ROW, 0.0
    if device.type == "cuda":  # large passes are faster on GPUs (docs/performance.md)
        of_pass = torch.cuda.mem_get_info(device)[0] // 4
        of_row, rounding = of_pass // 2, torch.finfo(torch.bfloat16).eps
    own, used = dict[int, Tensor](), 0
    some = draws[: min(max(2, most // n), 32)]
    some = [draw for draw in some if draw.stored()] or some
    entries = [sum(a.numel() for a in leaves_of(fetched([(d.kept, d.at)], None)[0], Tensor)) for d in some]
    # The shortest and the longest of at most 32 rows, because padding may change a loss.
    order = sorted(range(len(some)), key=entries.__getitem__)
    for draw in some[order[0]], some[order[-1]]:
        used, loss = max(used, _activations(model, partial(alone, draw))), abs(float(G.found[draw.k]))
        # A loss that is zero up to rounding has such a gradient.
        if loss > rounding_of(loss, G.buffer.dtype):
            own[draw.k] = G.buffer[draw.k].clone()
    if not own:
        return None
    reached, errors = [j for j, reached in enumerate(G.reached) if reached], []
    # With vmap, the gradients of a pass are in memory twice.
    for way, more in ((_by_layers, 1), (_by_vmap, G.vector.d * G.G.element_size())):
        plan = Plan(way, min(len(draws), of_pass // (used + more), most // n), reached)
        tried = draws[max(0, min(min(own) - draws[0].k, len(draws) - plan.rows)) :][: plan.rows]
        try:
            if used > of_row or plan.rows < 2:
                raise ValueError(f"a row has {n} examples, {used / 2**20:.3g} MiB: no two share a pass")
            with warnings.catch_warnings():  # of an operation that vmap takes one by one
                warnings.filterwarnings("error", "There is a performance drop")
                _share(G, model, tried, plan)
            for k in (k for k in own if k <= tried[-1].k):
                kind = torch.promote_types(own[k].dtype, torch.float32)
                size, apart = (float(a.norm(dtype=kind)) for a in (own[k], G.buffer[k] - own[k]))
                if not apart <= min(4.0 * max(rounding, plan.rounding) ** 0.5, _MOST_APART) * size:
                    raise ValueError(
                        f"rows of a shared pass differ by {apart / max(size, 1e-30):.1g} of their norm. Does "
                        "the loss of an example depend on the others of its batch, or draw random numbers?"
                    )
            return plan
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _share(G: Any, model: nn.Module, draws: list[Draw], plan: Plan) -> list[Draw]:
    """Compute several rows in one pass; return those that are left, without a second one for their pass."""
    if len(draws) < 2:
        return draws
    batch, outputs = fetched([(draw.kept, draw.at) for draw in draws], G.vector.device)
    tensors, half = leaves_of(batch, Tensor), len(draws) // 2
    entries = sum(leaf.numel() for leaf in tensors)
    plan.entries = plan.entries or entries
    if entries > 1.5 * plan.entries:  # longer than when the plan was made
        return _share(G, model, draws[:half], plan) + _share(G, model, draws[half:], plan)
    if any(p._backward_hooks for p in G.vector.parameters):
        raise ValueError("parameters have hooks, which change each gradient")
    if any(leaf.shape[:1] != (len(draws) * len(draws[0].at),) for leaf in tensors):
        raise ValueError("the first dimension of a batch does not count examples, as in packed texts")
    plan.rounding, reached, losses, values = plan.way(G, model, draws, batch, outputs)
    G.note(draws[0].k, [*plan.reached, *reached], losses.detach())
    for draw, some in zip(draws, values.detach().reshape(len(draws), -1), strict=True):
        G.values[draw.k] = [(draw.weight, draw.at, some)]
    return []


def _by_vmap(G: Any, model: nn.Module, draws: Sequence[Draw], batch: Any, outputs: Any) -> Found:
    """Compute rows by torch's vectorised gradient; what the pass stores in modules cannot be read later."""
    t, first = len(draws), draws[0]
    given = (batch,) if outputs is None else (batch, outputs)
    given = map_nested(lambda leaf: leaf.view(t, -1, *leaf.shape[1:]), given)
    at = {id(p): j for j, p in enumerate(G.vector.parameters)}

    def scaled(own: list[Any], given: Any) -> tuple[Tensor, Tensor]:
        with ExitStack() as restored:  # a parameter may be in several modules; each module is here once
            for held in [d for m in model.modules() for d in (vars(m), m._buffers, m._parameters)]:
                restored.callback(held.update, dict(held))
                held.update({name: own[at[id(p)]] for name, p in held.items() if id(p) in at})
            values = call_loss(first.loss, model, given[0], len(first.at), *given[1:])
        return values.mean() * G.scale, values

    own = [p.detach() for p in G.vector.parameters]
    gradients, (losses, values) = vmap(grad_and_value(scaled, has_aux=True), (None, 0))(own, given)
    weights = losses.new_tensor([draw.weight for draw in draws])
    for gradient, part in zip(gradients, G.parts(first.k, t), strict=True):
        part.copy_(gradient * weights.view(t, *[1] * (gradient.ndim - 1)))
    # A gradient of zeros may be that of no parameter.
    return max(torch.finfo(p.dtype).eps for p in own), [], losses / G.scale * weights, values


def _by_layers(G: Any, model: nn.Module, draws: Sequence[Draw], batch: Any, outputs: Any) -> Found:
    """Compute rows in one backward pass through the sum of their losses, from what each layer gets.

    In the forward pass of its own layer, a parameter is a constant. The output of the layer passes through an
    identity function, whose backward pass receives the input x of the layer and the gradient e of the output,
    and adds the gradients of the parameters to G.
    """
    t, n, first = len(draws), len(draws[0].at), draws[0]
    parts = dict(zip(map(id, G.vector.parameters), G.parts(first.k, t), strict=True))
    reached, rounding = set[int](), {torch.finfo(part.dtype).eps for part in parts.values()}

    def forward(layer: Any, own: Mapping[str, Any], x: Tensor) -> Any:
        x = x.expand(t * n, *x.shape[1:])  # position ids for all examples; an error for other sizes
        constant = {name: p.detach() for name, p in own.items()}

        def add(x: Tensor, e: Tensor) -> None:
            rounding.add(torch.finfo(e.dtype).eps)
            x, e = (a.reshape(t, n, *a.shape[1:]) for a in (x, e))
            for name, found in _gradients(layer, constant, x, e).items():
                into, fresh = parts[id(own[name])], id(own[name]) not in reached
                reached.add(id(own[name]))
                if callable(found):
                    found(into, fresh)
                else:
                    (into.copy_ if fresh else into.add_)(found)

        out = type(layer).forward(_with(layer, constant), x)
        return _Recorded.apply(out, x.detach(), add, *own.values())  # type: ignore[no-untyped-call]

    with ExitStack() as restored:
        for layer in model.modules():
            if "_orig_mod" in layer._modules or layer._compiled_call_impl is not None:
                raise ValueError("a part of the model is compiled")
            own = {name: p for name, p in layer._parameters.items() if id(p) in parts}
            if own and (layer._modules or "forward" in layer.__dict__):
                raise ValueError(f"{type(layer).__name__} has parameters and layers, or a replaced forward")
            if own:
                # Written to the dict of the layer, because `Module.__setattr__` takes much longer.
                restored.callback(layer.__dict__.pop, "forward", None)  # before it is set, for Ctrl-C
                layer.__dict__["forward"] = partial(forward, layer, own)
        values = call_loss(first.loss, model, batch, t * n, outputs)
        losses = values.view(t, n).mean(1)  # an error for the mean over all examples
        losses = losses * losses.new_tensor([draw.weight for draw in draws])
        elsewhere = torch.autograd.grad(losses.sum() * G.scale, G.vector.parameters, allow_unused=True)
    if any(gradient is not None for gradient in elsewhere):
        raise ValueError("a parameter is used outside of the layer that owns it")
    for p in parts.keys() - reached:
        parts[p].zero_()
    return max(rounding), [j for j, p in enumerate(parts) if p in reached], losses, values


class _Recorded(torch.autograd.Function):
    """The identity function; its backward pass also receives the input of the recorded layer."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, add: Callable[..., None], *own: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.add = add
        ctx.mark_dirty(out)  # returns `out` itself instead of a view: the next layer may work in place
        return out

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        ctx.add(*ctx.saved_tensors, e)
        return e, *[None] * (len(ctx.needs_input_grad) - 1)


def _gradients(layer: Any, own: Mapping[str, Tensor], x: Tensor, e: Tensor) -> dict[str, Any]:
    """Return the gradients of a layer's parameters for t rows: tensors (t, *shape), or functions to add them.

    x and e have the shape (t, n, ...), of the n examples of each row. For the weight of a linear layer, the
    gradient is ``e' x``; of any other layer, torch derives it.
    """
    kind, dtype = f"{type(layer).__module__}.{type(layer).__name__}", next(iter(own.values())).dtype
    if type(layer) is nn.Linear or kind == "transformers.pytorch_utils.Conv1D":  # with a transposed weight
        x, e = (a.flatten(1, -2) for a in (x.to(e.dtype), e))  # of another dtype under autocast
        left, right = (e.mT, x) if type(layer) is nn.Linear else (x.mT, e)

        def product(into: Tensor, fresh: bool) -> None:
            into.baddbmm_(left, right, beta=0.0 if fresh else 1.0)

        weight = product if e.dtype == dtype else left @ right
        return {name: weight if name == "weight" else e.sum(1) for name in own}
    if type(layer) is nn.Embedding and not (layer.max_norm or layer.scale_grad_by_freq or layer.sparse):
        if layer.padding_idx is not None:
            e = e.masked_fill((x == layer.padding_idx)[..., None], 0.0)

        def scatter(into: Tensor, fresh: bool) -> None:
            at = torch.arange(len(into), device=x.device)[:, None], x.flatten(1)
            (into.zero_() if fresh else into).index_put_(at, e.flatten(1, -2).to(dtype), accumulate=True)

        return {"weight": scatter}
    x = x.to(dtype) if x.is_floating_point() else x  # the backward pass runs outside of autocast

    def of_row(x: Tensor, e: Tensor) -> dict[str, Tensor]:
        out, pulled, *_ = vjp(lambda values: type(layer).forward(_with(layer, values), x), own)
        return dict(pulled(e.to(out.dtype))[0])

    return vmap(of_row)(x, e)


def _with(layer: nn.Module, values: Mapping[str, Tensor]) -> Any:
    """Return a shallow copy of a layer with new values for some of its parameters."""
    other = object.__new__(type(layer))
    other.__dict__.update(layer.__dict__, _parameters={**layer._parameters, **values})
    return other


def _activations(model: nn.Module, compute: Callable[[], None]) -> int:
    """Return the bytes of all tensors except parameters that are saved for the backward pass."""
    found = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        with suppress(RuntimeError):  # sparse and quantised tensors may have no storage
            found.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    for p in model.parameters():
        keep(p)
    found.update(dict.fromkeys(found, 0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(found.values())
