"""Several rows of G from one forward and backward pass; an optimisation that may say no.

Rows can share a pass if the loss of an example does not depend on the other examples, is returned as one number
per example, and has the same loss function in all of them. Two ways are tried: layer by layer, for models of
known layers; and ``torch.func.vmap``. The first rows that share a pass are compared with rows of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_map

from gemproj._arrays import wide_dtype
from gemproj.torch.data import PerExample, join, leaves_of, moved, owned, take
from gemproj.torch.memory import Draw
from gemproj.torch.promise import call_loss

# Maximum bytes of activations per thread, for a pass and for one row. A shared pass saves calls of small
# operations, but a row that fills the caches of a core is faster in its own pass (docs/cost.md).
_CPU_PASS, _CPU_ROW = 2**25, 2**22
# Maximum difference between two computations of a row in half precision, relative to its norm.
_MOST_APART = 0.03


@dataclass
class Plan:
    """How the rows of a kind are computed: the way, or None for one by one, and the number of rows per pass."""

    way: Callable[..., tuple[Tensor, set[int], float]] | None
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
        for kind, same in groupby(draws, lambda d: (id(d.kept.promise.loss), id(d.kept.collate), len(d.at))):
            some = list(same)
            if len(some) < 2 or not some[0].at or G.vector.topology.collective:
                left += some
                continue
            if kind not in self._plans:
                self._plans[kind] = self._plan(G, model, some, alone, most)
            plan = self._plans[kind]
            try:
                for start in range(0, len(some) if plan.way else 0, plan.rows):
                    _share(G, model, some[start : start + plan.rows], plan, alone)
            except Exception as error:  # an error of the loss itself is raised again by `alone`
                self._say_no(kind, error)
                for draw in some:
                    G.drop(draw.k)
            left += [draw for draw in some if draw.k not in G._written]
        return left

    def _plan(self, G: Any, model: nn.Module, draws: Sequence[Draw], alone: Any, most: int) -> Plan:
        """Find a way that computes the first rows as their own passes do, and how many rows fit into a pass."""
        with _counted_activations(model) as count:
            values = alone(draws[0])
        n, (of_pass, of_row) = len(draws[0].at), _budget(G.vector.device)
        fit = min(of_pass // max(count[0], 1), most // n)
        if values.shape != (n,):
            self.reason = (
                "the loss is a mean over examples; if it returned one number for each, rows could share"
            )
        elif fit < 2 or count[0] > of_row:
            self.reason = f"a row has {n} examples, {count[0] / 2**20:.3g} MiB"
        else:
            for way in (_by_layers, _by_vmap):
                try:
                    return _checked(G, model, draws, way, int(fit), alone)
                except Exception as error:
                    self.reason = self.reason or str(error).partition("\n")[0]
        return Plan(None)

    def _say_no(self, kind: Hashable, error: Exception) -> None:
        self._plans[kind], self.reason = Plan(None), str(error).partition("\n")[0]


def _checked(G: Any, model: nn.Module, draws: Sequence[Draw], way: Any, fit: int, alone: Any) -> Plan:
    """Return a plan if the first and the last row of a pass are the same in passes of their own."""
    some = draws[:fit]
    ends = [some[0], some[-1]]
    own, own_losses = [], []
    for draw in ends:
        G.drop(draw.k)
        alone(draw)
        own.append([part.clone() for part in G.parts(draw.k)])
        own_losses.append(float(G._sums[0, draw.k]))
    entries = len(some) / len(draws[:1]) * _entries(_joined(G, draws[:1])[0])
    for draw in ends:
        G.drop(draw.k)
    plan = Plan(way, fit, entries)
    eps = _share(G, model, some, plan, alone)
    for draw, row, loss in zip(ends, own, own_losses, strict=True):
        found = G.parts(draw.k)
        wide = wide_dtype(torch, G.vector.device)
        size, apart = (
            math.sqrt(sum(float(torch.linalg.vector_norm(a, dtype=wide)) ** 2 for a in parts))
            for parts in (row, [a - b for a, b in zip(found, row, strict=True)])
        )
        # At the beginning of a distillation, losses are zero and gradients are rounding errors.
        rounding = 4.0 * torch.finfo(G.vector.dtype).eps * (1.0 + abs(loss))
        if abs(loss) > rounding and not apart <= min(4 * eps**0.5, _MOST_APART) * size:
            raise RowByRow(
                f"in a shared pass, a row differs by {apart / max(size, 1e-300):.1g} of its norm. Does the loss of "
                "an example depend on the other examples of its batch, or draw random numbers?"
            )
    for draw in some:
        G.drop(draw.k)
    return plan


def _share(G: Any, model: nn.Module, draws: Sequence[Draw], plan: Plan, alone: Any) -> float:
    """Compute several rows in one pass; return the largest rounding error of their products."""
    if len(draws) < 2:
        return 0.0
    batch, outputs = _joined(G, draws)
    if _entries(batch) > 1.5 * plan.entries:  # examples are longer than when the plan was made
        half = len(draws) // 2
        _share(G, model, draws[:half], plan, alone)
        return _share(G, model, draws[half:], plan, alone)
    if any(p._backward_hooks for p in G.vector.parameters):
        raise RowByRow("parameters have hooks, which change each gradient")
    assert plan.way is not None
    losses, reached, eps = plan.way(G, model, draws, batch, outputs)
    G.note(draws[0].k, reached, losses)
    return eps


def _joined(G: Any, draws: Sequence[Draw]) -> tuple[Any, Any]:
    """Return the examples of all draws as one batch, and their stored outputs."""
    first, device = draws[0].kept, G.vector.device
    batch = join([take(draw.kept.examples, draw.at) for draw in draws])
    if first.collate is not None:
        batch = first.collate(list(owned(batch)))
    outputs = None
    if first.outputs is not None:
        outputs = moved(join([take(draw.kept.outputs, draw.at) for draw in draws]), device)
    return moved(batch, device), outputs


def _weighted(losses: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the mean loss of each row, with its weight."""
    weights = [draw.weight for draw in draws]
    if len(set(weights)) == 1:  # needs no copy to a device, which would synchronise
        return losses * weights[0]
    return losses * torch.tensor(weights, dtype=losses.dtype, device=losses.device)


def _by_layers(
    G: Any, model: nn.Module, draws: Sequence[Draw], batch: Any, outputs: Any
) -> tuple[Tensor, set[int], float]:
    """Compute rows from the inputs and the gradients of all layers; see `RowGradients`."""
    t, n = len(draws), len(draws[0].at)
    if any(leaf.shape[:1] != (t * n,) for leaf in _tensors(batch)):
        raise RowByRow("the first dimension of a batch does not count examples, as in packed texts")
    parts = dict(zip(map(id, G.vector.parameters), G.parts(draws[0].k, t), strict=True))
    gradients = RowGradients(model.modules(), parts)
    with gradients.recorded(t * n):
        values = call_loss(draws[0].loss, model, batch, t * n, outputs)
        if values.shape != (t * n,):
            raise RowByRow("the loss is a mean over examples")
        losses = _weighted(values.view(t, n).mean(1), draws)
        gradients.differentiate(losses.sum() * G._scale, G.vector.parameters)
    reached = set()
    for j, (p, part) in enumerate(parts.items()):
        if p in gradients.reached:
            reached.add(j)
        else:
            part.zero_()
    return losses.detach(), reached, gradients.rounding


class _Functional:
    """A model that is called with other values of its parameters."""

    def __init__(self, model: nn.Module, values: Mapping[str, Tensor]) -> None:
        self._model, self._values = model, values

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, self._values, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _by_vmap(
    G: Any, model: nn.Module, draws: Sequence[Draw], batch: Any, outputs: Any
) -> tuple[Tensor, set[int], float]:
    """Compute rows by the vectorised gradient of torch, which knows most operations."""
    t, n = len(draws), len(draws[0].at)
    if isinstance(outputs, PerExample) or any(leaf.shape[:1] != (t * n,) for leaf in _tensors(batch)):
        raise RowByRow("the first dimension of a batch does not count examples")
    names = {id(p): name for name, p in model.named_parameters()}
    values = {names[id(p)]: p.detach() for p in G.vector.parameters}
    batch, outputs = tree_map(lambda a: a.view(t, n, *a.shape[1:]), (batch, outputs))

    def one(values: Mapping[str, Tensor], batch: Any, outputs: Any) -> Tensor:
        loss = call_loss(draws[0].loss, _Functional(model, values), batch, n, outputs)
        return loss.mean() * G._scale

    found, losses = vmap(grad_and_value(one), (None, 0, None if outputs is None else 0))(
        values, batch, outputs
    )
    for p, part in zip(G.vector.parameters, G.parts(draws[0].k, t), strict=True):
        gradient = _weighted(found[names[id(p)]].reshape(t, -1).T, draws).T
        part.copy_(gradient.reshape(part.shape))
    eps = max(_rounding(p) for p in G.vector.parameters)
    return _weighted(losses.detach() / G._scale, draws), set(range(len(values))), eps


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


def _entries(batch: Any) -> int:
    return sum(leaf.numel() for leaf in _tensors(batch))


def _budget(device: torch.device) -> tuple[int, int]:
    """Return the maximum bytes of activations, for a pass and for one row."""
    if device.type == "cuda":  # a quarter of the free memory: large passes are faster on GPUs (docs/gpu.md)
        free = torch.cuda.mem_get_info(device)[0] // 4
        return free, free // 2
    threads = torch.get_num_threads()
    return threads * _CPU_PASS, threads * _CPU_ROW


@contextmanager
def _counted_activations(model: nn.Module) -> Iterator[list[int]]:
    """Count the bytes of all tensors except parameters that are saved for backward passes."""
    seen, found = set[int](), [0]

    def keep(tensor: Tensor) -> Tensor:
        with suppress(RuntimeError):  # sparse and quantised tensors may have no storage
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                found[0] += storage.nbytes()
        return tensor

    for p in model.parameters():
        keep(p)
    found[0] = 0
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


class RowByRow(Exception):
    """Raised if rows cannot share a pass; the message is the reason."""


class RowGradients:
    """Computes the gradients of all rows in one backward pass through the sum of the losses.

    In the forward pass of its own layer, a parameter is a constant. The output of the layer passes through an
    identity function, whose backward pass receives the input x of the layer and the gradient e of the output.
    The gradient of a row follows from x and e of its examples: for the weight of a linear layer, it is
    ``e' x``. A parameter that is used outside its layer gets a gradient, which `differentiate` detects.

    Parameters
    ----------
    modules : iterable of torch.nn.Module
        All modules of the model.
    into : dict of Tensor, shape (t, *shape)
        The part of G of each parameter, keyed by parameter id.

    Attributes
    ----------
    reached : set of int
        Ids of the parameters that the losses depend on.
    rounding : float
        The machine epsilon of the least precise gradient.
    """

    def __init__(self, modules: Iterable[nn.Module], into: Mapping[int, Tensor]) -> None:
        self._into = into
        self._layers: list[tuple[Any, Mapping[str, Tensor], Rule]] = []
        self.reached: set[int] = set()
        self.rounding = max(map(_rounding, into.values()))
        self._differentiated = False
        for layer in modules:
            if "_orig_mod" in layer._modules or layer._compiled_call_impl is not None:
                raise RowByRow("a part of the model is compiled")
            own = {k: p for k, p in layer._parameters.items() if p is not None and id(p) in into}
            if not own:
                continue
            rule = _rule(layer)
            if rule is None or "forward" in layer.__dict__:
                raise RowByRow(f"{type(layer).__name__} is none of the layers whose gradients are known")
            self._layers.append((layer, own, rule))

    @contextmanager
    def recorded(self, examples: int) -> Iterator[None]:
        """Record the inputs of all layers in a forward pass of `examples` examples."""
        device = next(iter(self._into.values())).device
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        with ExitStack() as restored:
            for layer, own, rule in self._layers:
                # Written to the dict of the layer, because `Module.__setattr__` takes much longer.
                layer.__dict__["forward"] = self._recording(layer, own, rule, examples)
                restored.callback(layer.__dict__.pop, "forward")
            yield

    def differentiate(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        """Add the gradient of the loss to each row; raise if a parameter is used outside its layer."""
        self._differentiated = True
        _, *elsewhere = torch.autograd.grad(loss, [self._anchor, *parameters], allow_unused=True)
        if any(gradient is not None for gradient in elsewhere):
            raise RowByRow("a parameter is used outside of the layer that owns it")

    def _recording(
        self, layer: Any, own: Mapping[str, Tensor], rule: Rule, examples: int
    ) -> Callable[..., Tensor]:
        forward, thread = layer.forward, get_ident()
        # The layer itself is not changed, because other threads may compute with it.
        constant = _with(layer, {name: p.detach() for name, p in own.items()})

        def add(x: Tensor, gradient: Tensor) -> None:
            if not self._differentiated:
                raise RowByRow("the loss has a backward pass of its own")
            self.rounding = max(self.rounding, _rounding(gradient))
            for name, p in own.items():
                rule(layer, name, x, gradient, self._into[id(p)], id(p) not in self.reached)
                self.reached.add(id(p))

        def recording(*args: Any, **kwargs: Any) -> Tensor:
            # Other threads compute as usual, except threads of autograd, which recompute checkpoints.
            if get_ident() != thread and torch._C._current_graph_task_id() < 0:
                return forward(*args, **kwargs)
            x = args[0] if args else None
            if rule is _embedding and isinstance(x, Tensor) and len(x) == 1:  # position ids for all examples
                x = x.expand(examples, *x.shape[1:])
            if not isinstance(x, Tensor) or x.ndim < 1 or len(x) != examples:
                raise RowByRow(f"the inputs of a {type(layer).__name__} do not count examples in dimension 0")
            out = type(layer).forward(constant, x, *args[1:], **kwargs)
            return _Recorded.apply(out, self._anchor, x.detach(), add)  # type: ignore[no-untyped-call]

        return recording


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
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return _transposed
    return _linear if kind is nn.Linear else None


def _linear(layer: Any, name: str, x: Tensor, gradient: Tensor, into: Tensor, fresh: bool) -> None:
    gradient = gradient.reshape(len(into), -1, gradient.shape[-1])
    if name == "bias":
        _add(gradient.sum(1), into, fresh)
        return
    left, right = gradient.mT, x.reshape(len(into), -1, x.shape[-1]).to(gradient.dtype)  # for autocast
    if into.dtype == left.dtype:
        into.baddbmm_(left, right, beta=0.0 if fresh else 1.0)
    else:
        _add(left @ right, into, fresh)


def _transposed(layer: Any, name: str, x: Tensor, gradient: Tensor, into: Tensor, fresh: bool) -> None:
    """Add the gradients of a linear layer that stores its weight transposed."""
    _linear(layer, name, x, gradient, into if name == "bias" else into.mT, fresh)


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
    # Sums over many tokens need the precision of the gradient, even if rows are stored with less.
    sums = into if into.dtype == gradient.dtype else torch.zeros_like(into, dtype=gradient.dtype)
    if fresh and sums is into:
        into.zero_()
    rows = torch.arange(len(into), device=x.device)[:, None]
    values = gradient.reshape(len(into), -1, gradient.shape[-1])
    sums.index_put_((rows, x.reshape(len(into), -1)), values, accumulate=True)
    if sums is not into:
        _add(sums, into, fresh)


def _rounding(gradient: Tensor) -> float:
    """Return the relative rounding error of the products from which a gradient is computed."""
    if (
        gradient.is_cuda
        and gradient.dtype == torch.float32
        and torch.backends.cuda.matmul.fp32_precision == "tf32"
    ):
        return 2.0**-10
    return torch.finfo(gradient.dtype).eps


def _add(values: Tensor, into: Tensor, fresh: bool) -> None:
    (into.copy_ if fresh else into.add_)(values)


def _with(layer: nn.Module, values: Mapping[str, Tensor | None]) -> Any:
    """Return a shallow copy of a layer with new values for some of its parameters."""
    other = object.__new__(type(layer))
    other.__dict__.update(layer.__dict__, _parameters={**layer._parameters, **values})
    return other
