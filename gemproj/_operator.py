"""`gemproj.project` as one torch operator: for autograd, `torch.compile` and `torch.func`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from gemproj._arrays import Blocks, wide_dtype
from gemproj._bounds import Bounds, Options, check_options, make_bounds
from gemproj._checks import (
    check_metadata_of_multipliers,
    check_multipliers,
    check_scalar,
    is_number,
    real_numbers,
)
from gemproj._combine import blocks_for_x, combine_into, warn_if_missed
from gemproj._derivative import pull_back
from gemproj._dual import solve
from gemproj._gram import measure
from gemproj._problem import Problem, blocks_of, check_out, check_problem
from gemproj._refine import inverse_of_free
from gemproj.methods import Exact

_OPTIONS = ("h", "margin", "penalty", "equality", "warm_start")
_NO_FORWARD = "The projection has no forward-mode derivative. Use reverse mode: torch.func.vjp or jacrev."


class Form(NamedTuple):
    """Number of tensors of each argument, and flags; the operator also takes one flat list of tensors."""

    G: int  # number of blocks
    g: int
    metric: int
    h: int  # 0 or 1, as for the options below
    margin: int
    penalty: int
    equality: int
    warm_start: int
    alone: int  # 1 if G and g are arrays, 0 if they are blocks
    refine: int  # option of `Exact`
    recorded: int  # 1 if a backward pass may follow

    def arrays(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the blocks of G, g and the metric."""
        left = iter(tensors)
        return [list(islice(left, n)) for n in self[:3]]

    def options(self, tensors: Sequence[Tensor]) -> dict[str, Tensor | None]:
        """Return the options by name, as tensors, or None if an option is not given."""
        left = iter(tensors[sum(self[:3]) :])
        return {name: next(left) if getattr(self, name) else None for name in _OPTIONS}

    def problem(self, tensors: Sequence[Tensor]) -> Problem:
        """Return G, g and the metric as a checked `Problem`."""
        return check_problem(*((a[0] if self.alone else a) if a else None for a in self.arrays(tensors)))


@torch.compiler.disable
def outside_of_graphs(function: Any, *args: Any, **options: Any) -> Any:
    """Return ``function(*args, **options)``, called outside of the graph of `torch.compile`."""
    return function(*args, **options)


def project_operator(
    G: Blocks, g: Blocks, method: Any, h: Any, margin: Any, penalty: Any, equality: Any,
    metric: Blocks | None, warm_start: Tensor | None, out: Any,
) -> Any:  # fmt: skip
    """Return x for the arguments of `project`, computed by the torch operator."""
    transformed = False
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        # Tracing cannot follow the checks of arrays, so the operator performs these checks.
        for name, value in (("margin", margin), ("penalty", 0.0 if penalty is None else penalty)):
            if not isinstance(value, (Tensor, np.ndarray, list, tuple)):
                check_scalar(value, name)
        if not isinstance(equality, (bool, Tensor, np.ndarray, list, tuple)):
            raise TypeError(
                "equality must be True, False or an array of one boolean per constraint; "
                f"found {type(equality).__name__}."
            )
    else:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        problem = check_problem(G, g, metric, values=False)
        options = check_options(method, h=h, margin=margin, penalty=penalty, equality=equality)
        if not isinstance(options.method, Exact):
            raise ValueError(
                f"Only method 'exact' supports gradients and torch.func; method is {method!r}. Detach the "
                "arguments, or use method='exact'."
            )
        if warm_start is not None:
            check_metadata_of_multipliers(warm_start, "warm_start", *problem.like[:2])
        if out is not None:
            check_out(out, problem)
    arrays = [_blocks(G, g, "G"), _blocks(g, g, "g"), [] if metric is None else _blocks(metric, g, "metric")]
    given = {"h": h, "margin": margin, "penalty": penalty, "equality": equality}
    tensors = [a for blocks in arrays for a in blocks]
    for name, value in given.items():
        none = value is None or value is False or (name == "margin" and is_number(value) and not value)
        given[name] = None if none else _tensor(value, name, tensors[-1])
    given["warm_start"] = warm_start
    tensors += [a for a in given.values() if a is not None]
    dual = not transformed and forward_ad._current_level >= 0
    if dual and any(forward_ad.unpack_dual(a).tangent is not None for a in tensors):
        raise NotImplementedError(_NO_FORWARD)
    recorded = transformed or (torch.is_grad_enabled() and any(a.requires_grad for a in tensors))
    if recorded and out is not None:
        raise ValueError(
            "out cannot be written under torch.func, or while an argument requires a gradient; detach it."
        )
    flags = [int(a is not None) for a in given.values()]
    flags += [int(isinstance(g, Tensor)), getattr(method, "refine", 0), int(recorded)]
    form = [len(blocks) for blocks in arrays] + flags
    x = (_Transformed.apply(form, *tensors) if transformed else _project(tensors, form))[: len(arrays[1])]
    if out is not None:
        for to, value in zip(_blocks(out, g, "out"), x, strict=True):
            if to.shape != value.shape or to.dtype != value.dtype:
                raise ValueError("out must have the shape and dtype of g.")
            to.copy_(value)
        return out
    if isinstance(g, Mapping):
        return dict(zip(g, x, strict=True))
    return (tuple(x) if isinstance(g, tuple) else list(x)) if isinstance(g, (list, tuple)) else x[0]


def _tensor(value: Any, name: str, like: Tensor) -> Tensor:
    """Return an option as a tensor."""
    if isinstance(value, Tensor):
        return value
    if not (is_number(value) or torch.compiler.is_compiling()):
        value = real_numbers(value, name)
    # Booleans keep their dtype; numbers get the wide dtype, because torch would round them to float32.
    dtype = None if name == "equality" else wide_dtype(torch, like.device)
    return torch.as_tensor(value, dtype=dtype, device=like.device)


def _blocks(a: Any, like: Any, name: str) -> list[Tensor]:
    if isinstance(a, (Mapping, list, tuple)) != isinstance(like, (Mapping, list, tuple)):
        raise TypeError(f"{name} and g must both be one array, or both have blocks.")
    if isinstance(like, Mapping):
        if not isinstance(a, Mapping) or set(a) != set(like):
            raise ValueError(f"{name} and g must have the same keys.")
        return [a[k] for k in like]
    return list(blocks_of(a))


# Results are contiguous for any strides of the arguments. The schemas are written out, because torch
# before 2.7 cannot infer them from `list[Tensor]`.
@torch.library.custom_op(
    "gemproj::project", mutates_args=(), schema="(Tensor[] tensors, SymInt[] form) -> Tensor[]"
)
def _project(tensors: list[Tensor], form: Any) -> list[Tensor]:
    """Return the blocks of x, the multipliers, and `inverse_of_free` if a backward pass may follow."""
    form = Form(*form)
    problem, given = form.problem(tensors), form.options(tensors)
    if (start := given.pop("warm_start")) is not None:
        start = check_multipliers(start, "warm_start", *problem.like)
    given = {name: value for name, value in given.items() if value is not None}
    sol = solve(measure(problem), check_options(Exact(form.refine), **given), start)
    warn_if_missed(sol)
    x = blocks_for_x(problem)
    combine_into(problem, sol, x)
    inverse = problem.to_caller(inverse_of_free(sol)) if form.recorded else x[0].new_empty(0)
    return [*x, problem.to_caller(sol.multipliers), inverse]


@_project.register_fake
def _(tensors: list[Tensor], form: Any) -> list[Tensor]:
    form = Form(*form)
    G, g, metric = form.arrays(tensors)
    if form.alone:
        batch = torch.broadcast_shapes(G[0].shape[:-2], *(a.shape[:-1] for a in (*g, *metric)))
        t, x = G[0].shape[-2], [g[0].new_empty((*batch, g[0].shape[-1]))]
    else:
        batch, t, x = (), G[0].shape[0], [v.new_empty(v.shape) for v in g]
    lam = g[0].new_empty((*batch, t), dtype=wide_dtype(torch, g[0].device))
    return [*x, lam, lam.new_empty((*batch, 2, t, t)) if form.recorded else x[0].new_empty(0)]


@torch.library.custom_op(
    "gemproj::project_backward",
    mutates_args=(),
    schema="(Tensor[] tensors, Tensor[] found, Tensor[] upstream, SymInt[] form) -> Tensor[]",
)
def _project_backward(
    tensors: list[Tensor], found: list[Tensor], upstream: list[Tensor], form: Any
) -> list[Tensor]:
    """Return the gradients for all tensors except the mask of equalities and the warm start."""
    form = Form(*form)
    problem, given, (*x, lam, inverse) = form.problem(tensors), form.options(tensors), found
    margin = 0.0 if given["margin"] is None else given["margin"]
    equality = False if given["equality"] is None else given["equality"]
    options = Options(None, margin=margin, penalty=given["penalty"], equality=equality)
    bounds = make_bounds(options, problem.to_host(lam))
    bounds = Bounds(*map(problem.to_caller, bounds))
    grads = pull_back(problem, bounds, lam, inverse, x, upstream)
    values = [*grads.G, *grads.g, *(grads.metric if form.metric else [])]
    values += [getattr(grads, name) for name in _OPTIONS[:3] if given[name] is not None]
    # Gradients are summed over the dimensions along which an argument was broadcast.
    return [v.sum_to_size(a.shape).to(a.dtype).contiguous() for v, a in zip(values, tensors, strict=False)]


@_project_backward.register_fake
def _(tensors: list[Tensor], found: Any, upstream: Any, form: Any) -> list[Tensor]:
    return [a.new_empty(a.shape) for a in tensors[: sum(form[:6])]]


def _setup_context(ctx: Any, inputs: Any, output: Sequence[Tensor]) -> None:
    tensors, form = inputs
    ctx.form, ctx.count = form, len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, upstream: Any) -> tuple[list[Any], None]:
    saved, form = list(ctx.saved_tensors), ctx.form
    tensors, found = saved[: ctx.count], saved[ctx.count :]
    upstream = [torch.zeros_like(v) if u is None else u for u, v in zip(upstream, found[:-2], strict=False)]
    grads = _project_backward(tensors, found, upstream, form)
    return [*grads, *[None] * (ctx.count - len(grads))], None


_project.register_autograd(_backward, setup_context=_setup_context)


@_project.register_vmap
def _(info: Any, in_dims: Any, tensors: list[Tensor], form: Any) -> tuple[list[Tensor], list[int]]:
    one = Form(*form)
    refuse_blocks(one.alone)
    # g and the warm start get the mapped dimension even if they are not mapped.
    needed = [1, *([len(tensors) - 1] if one.warm_start else [])]
    own = [2] + [1] * (len(tensors) - 1)
    x = _project(mapped(info.batch_size, in_dims[0], tensors, own, needed), form)
    return x, [0] * len(x)


@_project_backward.register_vmap
def _(
    info: Any, in_dims: Any, tensors: list[Tensor], found: list[Tensor], upstream: list[Tensor], form: Any
) -> tuple[list[Tensor], list[int]]:
    refuse_blocks(Form(*form).alone)
    flat, dims = [*tensors, *found, *upstream], [d for some in in_dims[:3] for d in some]
    ends = len(tensors), len(tensors) + len(found)
    own = [1] * len(flat)
    own[0], own[ends[1] - 1] = 2, 3
    front = mapped(info.batch_size, dims, flat, own, range(len(flat)))
    grads = _project_backward(front[: ends[0]], front[ends[0] : ends[1]], front[ends[1] :], form)
    shapes = [a.shape if d is None else a.movedim(d, 0).shape[1:] for a, d in zip(flat, dims, strict=True)]
    grads = [v.reshape(info.batch_size, *n) for v, n in zip(grads, shapes, strict=False)]
    return grads, [0] * len(grads)


def _no_second(ctx: Any, *upstream: Any) -> Any:
    raise NotImplementedError("The projection has no second derivative.")


_project_backward.register_autograd(_no_second)


class _Transformed(torch.autograd.Function):
    """The operator as an autograd function, because `torch.func` does not differentiate custom operators."""

    generate_vmap_rule = True

    @staticmethod
    def forward(form: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_project(list(tensors), form))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        _setup_context(ctx, (inputs[1:], inputs[0]), output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Any, ...]:
        tensors = (*ctx.saved_tensors, *upstream[:-2])
        grads = _TransformedBackward.apply(ctx.form, ctx.count, *tensors)
        return None, *grads, *[None] * (ctx.count - len(grads))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD)


class _TransformedBackward(torch.autograd.Function):
    """The backward pass of `_Transformed`."""

    generate_vmap_rule = True
    backward = staticmethod(_no_second)

    @staticmethod
    def forward(form: list[int], count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        end = count + form[1] + 2
        return tuple(
            _project_backward(list(tensors[:count]), list(tensors[count:end]), list(tensors[end:]), form)
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


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
    expanded if their index is in `needed`, else returned unchanged.
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
