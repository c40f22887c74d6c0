"""`gemproj.project` as one torch operator: for autograd, `torch.compile` and `torch.func`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gemproj._arrays import Blocks
from gemproj._blocks import blocks_of
from gemproj._bounds import check_scalar, is_number, real_numbers
from gemproj._combine import combine_into
from gemproj._derivative import pull_back
from gemproj._dual import solve_problem
from gemproj._feasibility import warn_if_missed
from gemproj._method_names import method_named, name_of
from gemproj._options import check_look_of_multipliers, check_options
from gemproj._problem import Problem, check_out, check_problem
from gemproj._solution import DualSolution
from gemproj._vmap import mapped, refuse_blocks
from gemproj.methods import Exact, as_method
from gemproj.methods._method import check_count


class _Form(NamedTuple):
    """Which arguments the flat list of tensors holds, and the options that are not tensors."""

    blocks: tuple[int, ...]  # how many of G, g and the metric
    given: tuple[bool, ...]  # h, margin, penalty, equality, warm_start
    alone: bool  # whether G and g are arrays, not blocks
    method: Any
    refine: int

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[list[list[Tensor]], list[Tensor | None]]:
        """Return the blocks of G, g and the metric, and the five tensors that may be None."""
        left = iter(tensors)
        return [list(islice(left, n)) for n in self.blocks], [next(left) if g else None for g in self.given]


def project_operator(
    G: Blocks, g: Blocks, method: Any, h: Any, margin: Any, penalty: Any, equality: Any,
    metric: Blocks | None, warm_start: Tensor | None, out: Any, refine: int,
) -> Any:  # fmt: skip
    """Call the operator with the arguments of `project`."""
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if tracing:  # which cannot follow all checks: those of arrays run where the operator does
        for name, value in (("margin", margin), ("penalty", 0.0 if penalty is None else penalty)):
            if not isinstance(value, (Tensor, np.ndarray, list, tuple)):
                check_scalar(value, name)
        if not isinstance(equality, (bool, Tensor, np.ndarray)):
            raise TypeError(
                "equality must be True, False or a boolean array of one per constraint; "
                f"found {type(equality).__name__}."
            )
        check_count(refine, "refine", 0)
    else:
        problem = check_problem(G, g, metric, values=False)
        check_options(method, h=h, margin=margin, penalty=penalty, equality=equality, refine=refine)
        if warm_start is not None:
            expected = (*problem.batch, problem.t)
            check_look_of_multipliers(warm_start, "warm_start", expected, problem.xp)
        if out is not None:
            check_out(out, problem)
    margin = 0 if is_number(margin) and not margin else margin
    arrays = [_blocks(G, g, "G"), _blocks(g, g, "g"), [] if metric is None else _blocks(metric, g, "metric")]
    like = arrays[1][0]
    defaults = {"h": None, "margin": 0, "penalty": None, "equality": False}
    given = zip(defaults.items(), (h, margin, penalty, equality), strict=True)
    options = [None if value is default else _tensor(value, name, like) for (name, default), value in given]
    options.append(warm_start)
    if tracing:
        x = _project(*arrays, *options, isinstance(g, Tensor), name_of(method), refine)
    else:
        form = _Form(
            (len(arrays[0]), len(arrays[1]), len(arrays[2])), tuple(a is not None for a in options),
            isinstance(g, Tensor), as_method(method), refine,
        )  # fmt: skip
        tensors = [a for blocks in arrays for a in blocks] + [a for a in options if a is not None]
        recorded = torch.is_grad_enabled() and any(a.requires_grad for a in tensors)
        if recorded and not isinstance(form.method, Exact):
            raise ValueError(
                f"Gradients flow through method 'exact' only; method is {method!r}, but an argument "
                "requires a gradient. Detach it, or use method='exact'."
            )
        if recorded and out is not None:
            raise ValueError("out cannot be written while an argument requires a gradient; detach it.")
        x = list(_Projection.apply(form, *tensors))
    if out is not None:
        for to, value in zip(_blocks(out, g, "out"), x, strict=True):
            if to.shape != value.shape or to.dtype != value.dtype:
                raise ValueError("out must have the shape and dtype of g.")
            to.copy_(value)
        return out
    if isinstance(g, Mapping):
        return dict(zip(g, x, strict=True))
    return (tuple(x) if isinstance(g, tuple) else x) if isinstance(g, (list, tuple)) else x[0]


class _Projection(torch.autograd.Function):
    """The operator as autograd and `torch.func` see it."""

    @staticmethod
    def forward(form: _Form, *tensors: Tensor) -> tuple[Tensor, ...]:
        arrays, options = form.arguments(tensors)
        return tuple(_forward(*arrays, *options, *form[2:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        form, *tensors = inputs
        ctx.form, ctx.count = form, len(tensors)
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        tensors, x = ctx.saved_tensors[: ctx.count], list(ctx.saved_tensors[ctx.count :])
        arrays, options = ctx.form.arguments(tensors)
        into = [torch.zeros_like(v) if u is None else u for u, v in zip(upstream, x, strict=True)]
        if isinstance(ctx.form.method, str):  # of the operator itself
            found = _project_backward(*arrays, *options[:4], x, into, *ctx.form[2:])
        else:
            found = _Derivative.apply(ctx.form, *tensors, *x, *into)
        return None, *found, *(None for given in ctx.form.given[3:] if given)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            "The projection has no forward-mode derivative. Use reverse mode: torch.func.vjp or jacrev."
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, form: _Form, *tensors: Tensor) -> Any:
        refuse_blocks(form.alone)
        front, _ = mapped(info.batch_size, in_dims[1:], tensors, form)
        x = _Projection.apply(form, *front)
        return x, (0,) * len(x)


class _Derivative(torch.autograd.Function):
    """The backward pass, which has no derivative of its own."""

    @staticmethod
    def forward(form: _Form, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = form.blocks[1]
        arrays, options = form.arguments(tensors)
        x, upstream = list(tensors[-2 * count : -count]), list(tensors[-count:])
        return tuple(_derivative(*arrays, *options[:4], x, upstream, *form[2:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        raise NotImplementedError("The projection has one derivative, not a second one.")

    @staticmethod
    def vmap(info: Any, in_dims: Any, form: _Form, *tensors: Tensor) -> Any:
        refuse_blocks(form.alone)
        front, shapes = mapped(info.batch_size, in_dims[1:], tensors, form, all_of_them=True)
        found = _Derivative.apply(form, *front)
        return tuple(v.reshape(n) for v, n in zip(found, shapes, strict=False)), (0,) * len(found)


def _tensor(value: Any, name: str, like: Tensor) -> Tensor:
    """Return an option as a tensor."""
    if isinstance(value, Tensor):
        return value
    number = is_number(value)
    if not (number or torch.compiler.is_compiling()):
        value = real_numbers(value, name)
    return torch.as_tensor(value, dtype=torch.float64 if number else None, device=like.device)


def _blocks(a: Any, like: Any, name: str) -> list[Tensor]:
    if isinstance(a, (Mapping, list, tuple)) != isinstance(like, (Mapping, list, tuple)):
        raise TypeError(f"{name} and g must both be one array, or both have blocks.")
    if isinstance(like, Mapping):
        if not isinstance(a, Mapping) or set(a) != set(like):
            raise ValueError(f"{name} and g must have the same keys.")
        return [a[k] for k in like]
    return list(blocks_of(a))


def _solved(
    G: Any, g: Any, metric: Any, h: Any, margin: Any, penalty: Any, equality: Any, warm_start: Any,
    alone: bool, method: Any, refine: int,
) -> tuple[Problem, DualSolution]:  # fmt: skip
    problem = check_problem(*((a[0] if alone else a) if a else None for a in (G, g, metric)))
    options = check_options(
        method, h=h, margin=0.0 if margin is None else margin, penalty=penalty,
        equality=False if equality is None else equality, refine=refine,
    )  # fmt: skip
    return problem, solve_problem(problem, options, warm_start)


def _forward(*arguments: Any) -> list[Tensor]:
    problem, sol = _solved(*arguments)
    warn_if_missed(sol)
    x = problem.empty()
    combine_into(problem, sol, x)
    return x


def _derivative(*arguments: Any) -> list[Tensor]:
    G, g, metric, h, margin, penalty, equality, x, upstream, alone, method, refine = arguments
    if not isinstance(method, Exact):
        raise ValueError(f"Gradients flow through method 'exact' only; method is {method!r}.")
    problem, sol = _solved(G, g, metric, h, margin, penalty, equality, None, alone, method, refine)
    grads = pull_back(problem, sol.to(problem.xp, problem.device), x, upstream)
    arrays = [grads.G, grads.g, grads.metric if metric else []]
    likes = [G, g, metric]
    result = [
        _sum_to(v, a)
        for values, given in zip(arrays, likes, strict=True)
        for v, a in zip(values, given, strict=True)
    ]
    bounds = zip((grads.h, grads.margin, grads.penalty), (h, margin, penalty), strict=True)
    return result + [_sum_to(v, a) for v, a in bounds if a is not None]


def _sum_to(value: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over the dimensions that its argument was broadcast along."""
    return value.sum_to_size(like.shape).to(like.dtype).contiguous()


# For torch.compile and torch.export, which see the operators themselves. Results are contiguous, whatever the
# strides of the arguments. The schemas are written out: torch before 2.7 infers none from `list[Tensor]`.
_ARRAYS = (
    "Tensor[] G, Tensor[] g, Tensor[] metric, Tensor? h, Tensor? margin, Tensor? penalty, Tensor? equality, "
)
_OTHERS = "bool alone, str method, SymInt refine) -> Tensor[]"


@torch.library.custom_op(
    "gemproj::project", mutates_args=(), schema=f"({_ARRAYS}Tensor? warm_start, {_OTHERS}"
)
def _project(*arguments):
    return _forward(*arguments[:-2], as_method(method_named(arguments[-2])), arguments[-1])


@_project.register_fake
def _(G, g, metric, h, margin, penalty, equality, warm_start, alone, method, refine):
    if alone:
        lead = [a.shape[:-1] for a in (*g, *metric)]
        batch = torch.broadcast_shapes(G[0].shape[:-2], *lead)
        return [g[0].new_empty((*batch, g[0].shape[-1]))]
    return [v.new_empty(v.shape) for v in g]


@torch.library.custom_op(
    "gemproj::project_backward", mutates_args=(), schema=f"({_ARRAYS}Tensor[] x, Tensor[] upstream, {_OTHERS}"
)
def _project_backward(*arguments):
    return _derivative(*arguments[:-2], as_method(method_named(arguments[-2])), arguments[-1])


@_project_backward.register_fake
def _(G, g, metric, h, margin, penalty, equality, x, upstream, alone, method, refine):
    bounds = [a for a in (h, margin, penalty) if a is not None]
    return [a.new_empty(a.shape) for a in (*G, *g, *metric, *bounds)]


def _keep(ctx, inputs, output):
    *arrays, h, margin, penalty, equality, _, alone, method, refine = inputs
    given = [h, margin, penalty, equality]
    ctx.form = _Form(tuple(map(len, arrays)), (*(a is not None for a in given), False), alone, method, refine)
    tensors = [a for blocks in arrays for a in blocks] + [a for a in given if a is not None]
    ctx.count = len(tensors)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, upstream):
    _, *found = _Projection.backward(ctx, *upstream)
    grads, options = ctx.form._replace(given=(*ctx.form.given[:3], False, False)).arguments(found)
    return *grads, *options[:3], None, None, None, None, None


_project.register_autograd(_backward, setup_context=_keep)
