"""`gemproj.project` as one opaque operation, for `torch.compile` and `torch.export`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gemproj._array import read_problem
from gemproj._derivative import pull_back
from gemproj._dual import read_options, solve_problem
from gemproj.methods import NAMES, Exact, Method, find

# The options of an operation are numbers and strings; this is what the strings stand for.
_methods: dict[str, Any] = {}


@torch.compiler.assume_constant_result
def _name(method: Any) -> str:
    # The methods of this package say all that they are in their repr; others may not.
    name = repr(method) if type(method) in _FAITHFUL else f"{type(method).__name__} at {id(method)}"
    _methods[name] = method
    return name


_FAITHFUL = {str, *(type(method) for method in NAMES.values())}


def record_projection(
    G: Any, g: Any, method: Any, warm_start: Tensor | None, margin: float, penalty: float | None,
    metric: Any, out: Any, check: bool | None, refine: int | None,
) -> Any:  # fmt: skip
    """Put a projection into the graph that is being compiled."""
    x = _project(
        _blocks(G, g, "G"), _blocks(g, g, "g"), [] if metric is None else _blocks(metric, g, "metric"),
        isinstance(g, Tensor), _name(method), warm_start, float(margin),
        None if penalty is None else float(penalty), check, refine,
    )  # fmt: skip
    if out is not None:
        for to, value in zip(_blocks(out, g, "out"), x, strict=True):
            if to.shape != value.shape or to.dtype != value.dtype:
                raise ValueError("out must have the shape and dtype of g.")
            to.copy_(value)
        return out
    if isinstance(g, Mapping):
        return dict(zip(g, x, strict=True))
    return (tuple(x) if isinstance(g, tuple) else x) if isinstance(g, (list, tuple)) else x[0]


def _blocks(a: Any, like: Any, name: str) -> list[Tensor]:
    if isinstance(like, Mapping):
        if set(a) != set(like):
            raise ValueError(f"{name} and g must have the same keys.")
        return [a[k] for k in like]
    return list(a) if isinstance(like, (list, tuple)) else [a]


def _given(blocks: list[Tensor], alone: bool) -> Any:
    """Return blocks as they were given: one array, a list, or nothing."""
    return (blocks[0] if alone else blocks) if blocks else None


@torch.library.custom_op("gemproj::project", mutates_args=())
def _project(
    G: list[Tensor], g: list[Tensor], metric: list[Tensor], alone: bool, method: str,
    warm_start: Tensor | None, margin: float, penalty: float | None, check: bool | None, refine: int | None,
) -> list[Tensor]:  # fmt: skip
    from gemproj._project import project

    found = find(_methods[method])
    if isinstance(found, Method) and not found.repeatable:
        raise ValueError(
            f"method {found!r} cannot be part of a compiled graph: its answer changes from call to call. "
            "Call `project` in a function under torch.compiler.disable, as GradientProjector.project_ is."
        )
    # An operation must not return what it was given, as `project` does where no constraint is active.
    x = [torch.empty_like(v) for v in g]
    rows, vector, weight, out = (_given(a, alone) for a in (G, g, metric, x))
    project(
        rows, vector, method=_methods[method], warm_start=warm_start, margin=margin, penalty=penalty,
        metric=weight, out=out, check=check, refine=refine,
    )  # fmt: skip
    return x


@_project.register_fake
def _(G, g, metric, alone, method, warm_start, margin, penalty, check, refine):
    return [torch.empty_like(v) for v in g]


@torch.library.custom_op("gemproj::project_backward", mutates_args=())
def _project_backward(
    G: list[Tensor], g: list[Tensor], metric: list[Tensor], x: list[Tensor], upstream: list[Tensor],
    alone: bool, method: str, margin: float, penalty: float | None, check: bool | None, refine: int | None,
) -> list[Tensor]:  # fmt: skip
    if not isinstance(_methods[method], Exact) and _methods[method] != "exact":
        raise ValueError(f"Gradients flow through method 'exact' only; method is {_methods[method]!r}.")
    problem = read_problem(*(_given(a, alone) for a in (G, g, metric)))
    sol = solve_problem(problem, read_options(_methods[method], margin, penalty, check, refine))
    by_rows, by_vector, by_weight = pull_back(problem, sol.to(problem.xp, problem.device), x, upstream)
    return [*by_rows, *by_vector, *(by_weight if metric else [])]


@_project_backward.register_fake
def _(G, g, metric, x, upstream, alone, method, margin, penalty, check, refine):
    return [torch.empty_like(a) for a in (*G, *g, *metric)]


def _keep(ctx, inputs, output):
    G, g, metric, alone, method, _, *numbers = inputs
    ctx.counts, ctx.options = (len(G), len(g), len(metric)), (alone, method, *numbers)
    ctx.save_for_backward(*G, *g, *metric, *output)


def _backward(ctx, upstream):
    saved = list(ctx.saved_tensors)
    parts = []
    for count in (*ctx.counts, ctx.counts[1]):
        parts.append(saved[:count])
        saved = saved[count:]
    x = parts[3]
    upstream = [torch.zeros_like(v) if u is None else u for u, v in zip(upstream, x, strict=True)]
    grads = _project_backward(*parts, upstream, *ctx.options)
    n, m, _ = ctx.counts
    return grads[:n], grads[n : n + m], grads[n + m :], *(None,) * 7


_project.register_autograd(_backward, setup_context=_keep)
