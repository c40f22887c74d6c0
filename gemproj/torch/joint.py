"""Several rows of G from one forward and backward pass; an optimisation that may say no.

Rows of one loss with equal numbers of examples can share a pass. Two ways are tried: layer by layer, if the
loss of an example does not depend on the others and all layers are known, as in language models; and
``torch.func.vmap``, which computes each row by itself. The first rows that share a pass are compared with
rows of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_map

from gemproj.torch.data import concatenated, leaves_of, moved, owned, take
from gemproj.torch.memory import Draw
from gemproj.torch.promise import call_loss

# Maximum bytes of activations per thread, for a pass and for one row. A shared pass saves calls of small
# operations, but a row that fills the caches of a core is faster in its own pass (docs/cost.md).
_CPU_PASS, _CPU_ROW = 2**25, 2**22
# Maximum difference between two computations of a row in half precision, relative to its norm. Products of
# float32 numbers on a GPU may have ten bits, too.
_MOST_APART = 0.03


class RowByRow(Exception):
    """Raised if rows cannot share a pass; the message is the reason."""


@dataclass
class Plan:
    """How rows of a kind are computed: the way, or None for one by one, and the number of rows per pass."""

    way: Callable[..., float] | None
    rows: int = 1
    entries: float = 0.0  # of the largest batch of a pass


class SharedPasses:
    """Computes several rows of G in one pass, if that is possible and saves time.

    Attributes
    ----------
    reason : str or None
        Why some of the last rows were computed one by one.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._plans: dict[Hashable, Plan] = {}

    def fill(self, G: Any, model: nn.Module, draws: Sequence[Draw], alone: Any, most: int) -> list[Draw]:
        """Compute rows of G in passes of at most `most` examples; return the draws of the rows that are left.

        ``alone(draw)`` computes a row in its own pass, and returns its losses.
        """
        left: list[Draw] = []
        # Rows of a pass are adjacent in the buffer: between them is no row that stays as it is.
        for (kind, _), same in groupby(enumerate(draws), lambda pair: (_kind(pair[1]), pair[1].k - pair[0])):
            some = [draw for _, draw in same]
            if len(some) < 2 or not some[0].at or G.vector.topology.collective:
                left += some
                continue
            if kind not in self._plans:
                self._plans[kind] = self._plan(G, model, some, alone, most)
                for draw in some:  # rows of trials may be wrong
                    G.drop(draw.k)
            plan = self._plans[kind]
            try:
                for start in range(0, len(some) if plan.way else 0, plan.rows):
                    _share(G, model, some[start : start + plan.rows], plan)
            except Exception as error:  # an error of the loss itself is raised again by `alone`
                self._plans[kind], self.reason = Plan(None), str(error)
                for draw in some:
                    G.drop(draw.k)
            left += [draw for draw in some if draw.k not in G._written]
        return left

    def _plan(self, G: Any, model: nn.Module, draws: Sequence[Draw], alone: Any, most: int) -> Plan:
        """Find a way that computes the first rows as their own passes do, and the number of rows per pass."""
        with _counted_activations(model) as count:
            alone(draws[0])
        n, device, threads = len(draws[0].at), G.vector.device, torch.get_num_threads()
        of_pass, of_row = threads * _CPU_PASS, threads * _CPU_ROW
        if device.type == "cuda":  # large passes are faster on GPUs (docs/performance.md)
            of_pass = torch.cuda.mem_get_info(device)[0] // 4
            of_row = of_pass // 2
        if count[0] > of_row:
            self.reason = f"a row has {n} examples, {count[0] / 2**20:.3g} MiB"
            return Plan(None)
        reasons, entries = [], sum(leaf.numel() for leaf in _tensors(_joined(G, draws[:1])[0]))
        # With vmap, the gradients of a pass are in memory twice.
        for way, more in ((_by_layers, 1), (_by_vmap, G.vector.d * G.G.element_size())):
            some = draws[: min(of_pass // (count[0] + more), most // n)]
            try:
                return _checked(G, model, some, Plan(way, len(some), len(some) * entries), alone)
            except Exception as error:
                reasons.append(str(error))
        self.reason = reasons[0]
        return Plan(None)


def _kind(draw: Draw) -> Hashable:
    """Return what rows of a pass have in common: loss, collate function and number of examples."""
    return id(draw.kept.promise.loss), id(draw.kept.collate), len(draw.at)


def _checked(G: Any, model: nn.Module, draws: Sequence[Draw], plan: Plan, alone: Any) -> Plan:
    """Return the plan if the first and the last row of a pass are the same in passes of their own."""
    if len(draws) < 2:
        raise RowByRow("no two rows fit into a pass")
    own = []
    for draw in (draws[0], draws[-1]):
        G.drop(draw.k)
        loss = float(alone(draw).mean())
        own.append((draw.k, G._buffer[draw.k].clone(), loss))
    eps = _share(G, model, draws, plan)
    for k, row, loss in own:
        kind = torch.promote_types(row.dtype, torch.float32)
        size, apart = (float(torch.linalg.vector_norm(a, dtype=kind)) for a in (row, G._buffer[k] - row))
        # At the beginning of a distillation, losses are zero and gradients are rounding errors.
        rounding = 4.0 * torch.finfo(row.dtype).eps * (1.0 + abs(loss))
        if abs(loss) > rounding and not apart <= min(4.0 * eps**0.5, _MOST_APART) * size:
            raise RowByRow(
                f"rows of a shared pass differ by {apart / max(size, 1e-30):.1g} of their norm. Does the "
                "loss of an example depend on the others of its batch, or draw random numbers?"
            )
    return plan


def _share(G: Any, model: nn.Module, draws: Sequence[Draw], plan: Plan) -> float:
    """Compute several rows in one pass; return the largest rounding error of their products."""
    if len(draws) < 2:
        return 0.0  # left for a pass of its own
    batch, outputs = _joined(G, draws)
    tensors = _tensors(batch)
    if sum(leaf.numel() for leaf in tensors) > 1.5 * plan.entries:  # longer than when the plan was made
        half = len(draws) // 2
        return max(_share(G, model, some, plan) for some in (draws[:half], draws[half:]))
    if any(p._backward_hooks for p in G.vector.parameters):
        raise RowByRow("parameters have hooks, which change each gradient")
    if any(leaf.shape[:1] != (len(draws) * len(draws[0].at),) for leaf in tensors):
        raise RowByRow("the first dimension of a batch does not count examples, as in packed texts")
    assert plan.way is not None
    return plan.way(G, model, draws, batch, outputs)


def _joined(G: Any, draws: Sequence[Draw]) -> tuple[Any, Any]:
    """Return the examples of all draws as one batch, and their stored outputs."""
    first, device, outputs = draws[0].kept, G.vector.device, None
    batch = concatenated([take(draw.kept.examples, draw.at) for draw in draws])
    if first.collate is not None:
        batch = first.collate(list(owned(batch)))
    if first.outputs is not None:
        outputs = moved(concatenated([take(draw.kept.outputs, draw.at) for draw in draws]), device)
    return moved(batch, device), outputs


def _weights(draws: Sequence[Draw], like: Tensor) -> Any:
    """Return the weights of the rows, as one number if they are equal, which needs no copy to a device."""
    weights = [draw.weight for draw in draws]
    return weights[0] if len(set(weights)) == 1 else like.new_tensor(weights)


def _by_layers(G: Any, model: nn.Module, draws: Sequence[Draw], batch: Any, outputs: Any) -> float:
    """Compute rows from the inputs and the gradients of all layers; see `Recorder`."""
    t, n, first = len(draws), len(draws[0].at), draws[0]
    parts = dict(zip(map(id, G.vector.parameters), G.parts(first.k, t), strict=True))
    recorder = Recorder(parts, t * n)
    with recorder.recording(model):
        values = call_loss(first.loss, model, batch, t * n, outputs)
        if values.shape != (t * n,):
            raise RowByRow("the loss is a mean over examples")
        losses = values.view(t, n).mean(1)
        losses = losses * _weights(draws, losses)
        recorder.differentiate(losses.sum() * G._scale, G.vector.parameters)
    for p, part in parts.items():
        if p not in recorder.reached:
            part.zero_()
    G.note(first.k, [j for j, p in enumerate(parts) if p in recorder.reached], losses.detach())
    return recorder.rounding


class _Loss(nn.Module):
    """The mean loss of the examples of a draw, as a module with the parameters of the model."""

    def __init__(self, model: nn.Module, draw: Draw) -> None:
        super().__init__()
        self.model, self._draw = model, draw

    def forward(self, batch: Any, *outputs: Any) -> Tensor:
        return call_loss(self._draw.loss, self.model, batch, len(self._draw.at), *outputs).mean()


def _by_vmap(G: Any, model: nn.Module, draws: Sequence[Draw], batch: Any, outputs: Any) -> float:
    """Compute rows by the vectorised gradient of torch, which knows most operations."""
    t, first = len(draws), draws[0]
    given = (batch,) if outputs is None else (batch, outputs)
    given = tree_map(lambda leaf: leaf.view(t, -1, *leaf.shape[1:]), given)
    loss, names = _Loss(model, first), [f"model.{name}" for name in G.vector.names]

    def scaled(values: Sequence[Tensor], given: Any) -> Tensor:
        return functional_call(loss, dict(zip(names, values, strict=True)), given) * G._scale

    own = [p.detach() for p in G.vector.parameters]
    found, losses = vmap(grad_and_value(scaled), (None, 0))(own, given)
    weights = _weights(draws, losses)
    for gradient, part in zip(found, G.parts(first.k, t), strict=True):
        part.copy_((gradient.reshape(t, -1).mT * weights).mT.view(part.shape))
    G.note(first.k, range(len(names)), losses / G._scale * weights)
    return max(map(_rounding, own))


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


@contextmanager
def _counted_activations(model: nn.Module) -> Iterator[list[int]]:
    """Count the bytes of all tensors except parameters that are saved for backward passes."""
    seen, found = set[int](), [0]

    def keep(tensor: Tensor) -> Tensor:
        with suppress(RuntimeError):  # sparse and quantised tensors may have no storage
            storage = tensor.untyped_storage()
            found[0] += storage.nbytes() * (storage.data_ptr() not in seen)
            seen.add(storage.data_ptr())
        return tensor

    for p in model.parameters():
        keep(p)
    found[0] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


class Recorder:
    """Computes the gradients of all rows in one backward pass through the sum of the losses.

    In the forward pass of its own layer, a parameter is a constant. The output of the layer passes through an
    identity function, whose backward pass receives the input x of the layer and the gradient e of the output.
    The gradient of a row follows from x and e of its examples: for the weight of a linear layer, it is
    ``e' x``. A parameter that is used outside its layer gets a gradient, which `differentiate` detects.

    `into` has the part of G of each parameter, shape (t, *shape), keyed by parameter id.
    """

    def __init__(self, into: Mapping[int, Tensor], examples: int) -> None:
        self.into, self._examples, self.reached = into, examples, set[int]()
        self.rounding = max(map(_rounding, into.values()))
        self._anchor = torch.zeros((), device=next(iter(into.values())).device, requires_grad=True)

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record the inputs of all layers with parameters of G in a forward pass."""
        with ExitStack() as restored:
            for layer in model.modules():
                if "_orig_mod" in layer._modules or layer._compiled_call_impl is not None:
                    raise RowByRow("a part of the model is compiled")
                own = {k: p for k, p in layer._parameters.items() if p is not None and id(p) in self.into}
                if not own:
                    continue
                rule = _rule(layer)
                if rule is None or "forward" in layer.__dict__:
                    raise RowByRow(f"{type(layer).__name__} is none of the layers whose gradients are known")
                # Written to the dict of the layer, because `Module.__setattr__` takes much longer.
                layer.__dict__["forward"] = self._recorded(layer, own, rule)
                restored.callback(layer.__dict__.pop, "forward")
            yield

    def differentiate(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        """Add the gradient of the loss to each row; raise if a parameter is used outside its layer."""
        _, *elsewhere = torch.autograd.grad(loss, [self._anchor, *parameters], allow_unused=True)
        if any(gradient is not None for gradient in elsewhere):
            raise RowByRow("a parameter is used outside of the layer that owns it")

    def _recorded(self, layer: Any, own: Mapping[str, Tensor], rule: Rule) -> Callable[..., Tensor]:
        constant = _with(layer, {name: p.detach() for name, p in own.items()})

        def add(x: Tensor, gradient: Tensor) -> None:
            self.rounding = max(self.rounding, _rounding(gradient))
            for name, p in own.items():
                rule(layer, name, x, gradient, self.into[id(p)], id(p) not in self.reached)
                self.reached.add(id(p))

        def recorded(*args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if args else None
            if rule is _embedding and isinstance(x, Tensor) and len(x) == 1:  # position ids for all examples
                x = x.expand(self._examples, *x.shape[1:])
            if not isinstance(x, Tensor) or x.ndim < 1 or len(x) != self._examples:
                raise RowByRow(f"the inputs of a {type(layer).__name__} do not count examples in dimension 0")
            out = type(layer).forward(constant, x, *args[1:], **kwargs)
            return _Recorded.apply(out, self._anchor, x.detach(), add)  # type: ignore[no-untyped-call]

        return recorded


class _Recorded(torch.autograd.Function):
    """The identity function; its backward pass also receives the input of the recorded layer."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, x: Tensor, add: Callable[..., None]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.add = add
        ctx.mark_dirty(out)  # returns `out` itself instead of a view: the next layer may work in place
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.add(*ctx.saved_tensors, gradient)
        return gradient, None, None, None


# Arguments: layer, name of a parameter, x, gradient of the output, part of G, and whether that part has no
# values yet. x and the gradient have shape (t * n, ...), with the n examples of each row in sequence.
Rule = Callable[[Any, str, Tensor, Tensor, Tensor, bool], None]


def _rule(layer: Any) -> Rule | None:
    """Return the function that adds the gradients for a type of layer; None for an unknown type.

    Subclasses are unknown types, because they may compute something else.
    """
    kind = type(layer)
    if kind is nn.Embedding:
        plain = layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
        return _embedding if plain else None
    if kind is nn.LayerNorm or (kind.__name__.endswith("RMSNorm") and list(layer._parameters) == ["weight"]):
        return _scaling
    transposed = (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return _linear if transposed or kind is nn.Linear else None


def _linear(layer: Any, name: str, x: Tensor, gradient: Tensor, into: Tensor, fresh: bool) -> None:
    """Add the gradients of a linear layer, of which that of transformers stores its weight transposed."""
    gradient = gradient.reshape(len(into), -1, gradient.shape[-1])
    if name == "bias":
        _add(gradient.sum(1), into, fresh)
        return
    left, right = gradient.mT, x.reshape(len(into), -1, x.shape[-1]).to(gradient.dtype)  # for autocast
    into = into if type(layer) is nn.Linear else into.mT
    if into.dtype == left.dtype:
        into.baddbmm_(left, right, beta=0.0 if fresh else 1.0)
    else:
        _add(left @ right, into, fresh)


def _scaling(layer: Any, name: str, x: Tensor, gradient: Tensor, into: Tensor, fresh: bool) -> None:
    """Add the gradients of a layer that normalises its input and multiplies it by a weight w.

    The output is affine in w, so its derivative is the output for w = 1 minus the output for w = 0. This also
    holds for layers that multiply by 1 + w.
    """
    if name == "weight":
        x = x.to(layer.weight.dtype)  # the backward pass runs outside of autocast
        one, zero = (
            _with(layer, dict.fromkeys(layer._parameters) | {"weight": torch.full_like(layer.weight, value)})
            for value in (1.0, 0.0)
        )
        gradient = gradient * (type(layer).forward(one, x) - type(layer).forward(zero, x))
    _add(gradient.reshape(len(into), -1, *into.shape[1:]).sum(1), into, fresh)


def _embedding(layer: Any, name: str, x: Tensor, gradient: Tensor, into: Tensor, fresh: bool) -> None:
    if layer.padding_idx is not None:
        gradient = gradient.masked_fill((x == layer.padding_idx)[..., None], 0.0)
    if fresh:
        into.zero_()
    rows = torch.arange(len(into), device=x.device)[:, None]
    values = gradient.reshape(len(into), -1, gradient.shape[-1]).to(into.dtype)
    into.index_put_((rows, x.reshape(len(into), -1)), values, accumulate=True)


def _rounding(gradient: Tensor) -> float:
    """Return the relative rounding error of the products from which a gradient is computed."""
    return torch.finfo(torch.bfloat16 if gradient.is_cuda else gradient.dtype).eps


def _add(values: Tensor, into: Tensor, fresh: bool) -> None:
    (into.copy_ if fresh else into.add_)(values)


def _with(layer: nn.Module, values: Mapping[str, Tensor | None]) -> Any:
    """Return a shallow copy of a layer with new values for some of its parameters."""
    other = object.__new__(type(layer))
    other.__dict__.update(layer.__dict__, _parameters={**layer._parameters, **values})
    return other
