"""The gradients of many rows of G from one backward pass, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn


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
