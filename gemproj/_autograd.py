"""The derivative of `gemproj.project`, and its operator for `torch.compile` and `torch.func`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from gemproj._arrays import Blocks, wide_dtype
from gemproj._bounds import Options, real_numbers
from gemproj._checks import check_metadata_of_multipliers
from gemproj._combine import combined, warn_if_missed
from gemproj._dual import measured_for, solve
from gemproj._problem import blocks_of, check_out, check_problem
from gemproj.methods import Exact


def _newton(
    x: Tensor, solution: Sequence[Tensor], G: Tensor, g: Tensor, metric: Tensor | None, h: Tensor | None,
    margin: Tensor | None, penalty: Tensor | None, equality: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return x as a function of all arguments but the first two, to be differentiated up to twice.

    The values of x and of the solution are given. The function is two Newton steps on the active set,

        x <- x - W^-1 G_P' F'F (G_P x - h_P),  F'F = K_PP^-1 constant,  from  x = g + W^-1 G' lam,

    where multipliers at a bound change with this bound, and all others are constants. The slack
    ``G_P x - h_P`` is zero at the solution, so the first derivative of one step is exact although F is
    constant. The second step makes second derivatives exact, and removes rounding that is large if rows
    nearly cancel. Its factor W^-1 G_P' is constant, too: it multiplies a slack of second order.
    """
    x, lam, free, F = (a.detach() for a in (x, *solution))
    h, margin, penalty = (None if a is None else a.to(lam.dtype) for a in (h, margin, penalty))
    if h is not None:  # no option of a row that is switched off changes x
        off = h == -torch.inf
        h, free = torch.where(off, 0.0, h), free | off
    bound = lam if margin is None else margin
    if penalty is not None:  # the lower bound of an equality is minus the penalty
        bound = bound if equality is None else torch.where(equality, -penalty, bound)
        bound = torch.where(lam >= penalty, penalty, bound)
    held = lam + torch.where(free, 0.0, _change(bound))
    G, g, x = (a.to(lam.dtype) for a in (G, g, x))
    w = None if metric is None else metric.to(lam.dtype)
    s = (held.unsqueeze(-2) @ G).squeeze(-2)
    if w is not None:  # in float64, w (x - g) has less rounding than its sum G'lam
        s = (((x - g) * w).detach() + _change(s)) / w
    y = x + _change(g + s)
    for rows in (G, G.detach()):
        slack = (G @ y.unsqueeze(-1)).squeeze(-1)
        step = _change(slack if h is None else slack - h).unsqueeze(-1)
        s = ((F.mT @ (F @ step)).mT @ rows).squeeze(-2)
        y = y - (s if w is None else s / w)
    return y


def _change(a: Tensor) -> Tensor:
    """Return zero, with the derivative of `a`."""
    return a - a.detach()


def _tensors(G: Blocks, g: Blocks, metric: Blocks | None, *options: Any) -> list[Any]:
    """Return G, g and metric as one array each, and the options as tensors or None."""
    lists = [_blocks(a, g, name) for name, a in (("G", G), ("g", g), ("metric", metric))]
    # Blocks of g may have leading dimensions, for many gradients.
    skips = 1, lists[1][0].ndim - lists[0][0].ndim + 1, 0
    shapes = [[tuple(a.shape[skip:]) for a in blocks] for blocks, skip in zip(lists, skips, strict=True)]
    if not isinstance(g, Tensor) and any(found not in ([], shapes[1]) for found in shapes):
        raise ValueError(
            f"Blocks must have the shapes (t, *shape) in G and (*shape) in g and metric; found {shapes}."
        )
    found = [_flat(a, g, skip) for a, skip in zip(lists, skips, strict=True)]
    device = found[1].device
    names = "h", "margin", "penalty", "equality"
    given = Options(Exact(), *options).given
    for a, name in zip(options, names, strict=True):
        if name not in given:
            a = None
        elif not isinstance(a, Tensor):
            # The operator refuses a boolean in the place of a number. torch rounds lists to float32.
            mask = name == "equality" or isinstance(a, bool)
            a = a if torch.compiler.is_compiling() else real_numbers(a, name)
            a = torch.as_tensor(a, dtype=None if mask else wide_dtype(torch, device), device=device)
        found.append(a)
    return found


def _blocks(a: Any, like: Any, name: str) -> list[Tensor]:
    if a is None:
        return []
    if isinstance(a, (Mapping, list, tuple)) != isinstance(like, (Mapping, list, tuple)):
        raise TypeError(f"{name} and g must both be one array, or both have blocks.")
    if not isinstance(like, Mapping):
        return list(blocks_of(a))
    if not isinstance(a, Mapping) or set(a) != set(like):
        raise ValueError(f"{name} and g must have the same keys.")
    return [a[k] for k in like]


def _flat(blocks: Sequence[Tensor], g: Blocks, skip: int = 0) -> Any:
    """Return blocks side by side as one array; None if there are none, and the array if g is an array."""
    blocks = blocks if isinstance(g, Tensor) else [a[..., None].flatten(skip) for a in blocks]
    return torch.cat(list(blocks), dim=-1) if len(blocks) > 1 else next(iter(blocks), None)


def _split(flat: Tensor, like: Sequence[Tensor], g: Blocks) -> list[Tensor]:
    """Return an array as blocks with the shapes and dtypes of `like`, unless g is an array."""
    if isinstance(g, Tensor):
        return [flat.to(like[0].dtype)]
    parts = flat.split([a.shape[flat.ndim - 1 :].numel() for a in like], dim=-1)
    return [p.reshape(a.shape).to(a.dtype, copy=True) for p, a in zip(parts, like, strict=True)]


@torch.library.custom_op(
    "gemproj::project",
    mutates_args=(),
    schema="(Tensor G, Tensor g, Tensor? metric, Tensor? h, Tensor? margin, Tensor? penalty, "
    "Tensor? equality, Tensor? warm_start) -> (Tensor, Tensor, Tensor, Tensor)",
)
def operator(G: Tensor, g: Tensor, metric: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    """Return x, the multipliers, the mask of the free rows P, and F with ``F'F = K_PP^-1``, for arrays."""
    h, margin, penalty, equality, warm_start = options
    bounds = h, 0.0 if margin is None else margin, penalty, False if equality is None else equality
    problem, asked = measured_for(Exact(), (G, g, metric, *bounds, warm_start))
    sol = solve(*asked)
    warn_if_missed(sol)
    return combined(problem, sol), *map(problem.to_caller, (sol.multipliers, sol.free, sol.dual_basis()))


@operator.register_fake
def _(G: Tensor, g: Tensor, metric: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    arrays, t = [a for a in (g, metric) if a is not None], G.shape[-2]
    batch = torch.broadcast_shapes(G.shape[:-2], *(a.shape[:-1] for a in arrays))
    lam = g.new_empty((*batch, t), dtype=wide_dtype(torch, g.device))
    free, inverse = lam.new_empty(lam.shape, dtype=torch.bool), lam.new_empty((*batch, t, t))
    return g.new_empty((*batch, g.shape[-1])), lam, free, inverse


@operator.register_vmap
def _(info: Any, dims: Any, *args: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    tensors = list(args)
    given = list(zip(tensors, dims, (2, *[1] * 7), strict=False))  # with the dimensions of one problem
    rank = max(a.ndim - (d is not None) - k for a, d, k in given[:3] if a is not None)
    for i, (a, d, k) in enumerate(given):
        # g and the warm start get the mapped dimension even if they are not mapped.
        if a is not None and (d is not None or i in (1, 7)):
            a = a.expand(info.batch_size, *a.shape) if d is None else a.movedim(d, 0)
            tensors[i] = a.reshape(len(a), *[1] * (rank + 1 + k - a.ndim), *a.shape[1:])
    return operator(*tensors), (0, 0, 0, 0)


@torch.compiler.disable
def _uncompiled(function: Any, *args: Any, **options: Any) -> Any:
    return function(*args, **options)


def project_tensors(route: str, project: Any, method: Any, out: Any, arrays: tuple[Any, ...]) -> Any:
    """Return x for the arguments of `project`: "uncompiled", or by the operator and with its derivative."""
    G, g, metric, h, margin, penalty, equality, warm_start = arrays
    given = {"h": h, "margin": margin, "penalty": penalty, "equality": equality}
    if route == "uncompiled":
        rest = {"metric": metric, "warm_start": warm_start, "out": out}
        return _uncompiled(project, G, g, method=method, **given, **rest)
    if route != "traced":  # tracing cannot follow the checks of arrays: the operator performs them
        method = Options(method, **given).method
        if type(method) is not Exact:  # a class derived from it need not be exact
            raise ValueError(
                f"Only method 'exact' supports gradients, torch.func and traces; method is {method!r}. "
                "Detach the arguments, or use method='exact'."
            )
        problem = check_problem(G, g, metric, values=False)
        if warm_start is not None:
            check_metadata_of_multipliers(warm_start, "warm_start", *problem.like[:2])
        if out is not None:
            check_out(out, G, problem)
    tensors = _tensors(*arrays[:-1])
    smooth = [a for a in tensors if a is not None]
    constants = [*tensors, None if warm_start is None else warm_start.detach()]
    if route == "traced":  # in compiled `torch.func.grad` only results show that they require a gradient
        smooth = [a.view_as(a) for a in smooth]
    derived = route == "transformed" or (torch.is_grad_enabled() and any(a.requires_grad for a in smooth))
    derived = derived or any(unpack_dual(a).tangent is not None for a in smooth)
    if derived:
        if out is not None:
            raise ValueError(
                "out cannot be written under torch.func, or while an argument requires a gradient; detach it."
            )
        constants = [a if a is None else a.detach() for a in constants]
    x, *solution = operator(*constants)
    blocks = _split(_newton(x, solution, *tensors) if derived else x, _blocks(g, g, "g"), g)
    if out is not None:
        for to, value in zip(_blocks(out, g, "out"), blocks, strict=True):
            if to.shape != value.shape or to.dtype != value.dtype:
                raise ValueError("out must have the shape and dtype of g.")
            to.copy_(value)
        return out
    if isinstance(g, Mapping):
        return dict(zip(g, blocks, strict=True))
    return blocks[0] if isinstance(g, Tensor) else tuple(blocks) if isinstance(g, tuple) else blocks
