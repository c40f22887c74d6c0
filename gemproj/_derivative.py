"""The derivative of the projection: implicit differentiation on the active set."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from gemproj._array import Array, Problem
from gemproj._solution import DualSolution
from gemproj.methods import Exact


def pull_back(
    problem: Problem, sol: DualSolution, x: list[Array], upstream: list[Array]
) -> tuple[list[Array], list[Array], list[Array]]:
    """Return the gradients of a scalar with respect to G, g and the metric, from that with respect to x.

    With P the rows whose multiplier is between its bounds, ``G_P x = 0`` holds around the solution.
    For an upstream gradient v, and W the metric,

        z_P = K_PP^-1 G_P W^-1 v,    p = v - G_P' z_P,
        dg = p,    dG_i = lam_i W^-1 p - z_i x,    dW = -(x - g) W^-1 p.

    Where the active set changes (a multiplier and its s are both zero) this is one of several
    one-sided derivatives.
    """
    xp, batch = problem.xp, problem.batch
    weight = problem.weight or [xp.ones_like(v) for v in problem.vector]

    def flat(a: Array, *lead: int) -> Array:
        size = math.prod(a.shape[len(batch) + len(lead) :])
        return xp.astype(xp.reshape(a, (*batch, *lead, size)), problem.wide)

    # Only free rows count, and one that was left out may hold what is not finite.
    used = sol.free()[..., None]
    rows = [xp.where(used, flat(a, problem.t), xp.zeros_like(used * 1.0)) for a in problem.rows]
    weights = [flat(w) for w in weight]
    units = 1.0 if sol.units is None else sol.units[..., :-1]
    p, z = [flat(v) for v in upstream], 0.0 * sol.multipliers
    # Where rows nearly cancel, what rounding leaves of z along them is taken out once more.
    for _ in range(1 if sol.factor is None else 2):
        u = sum(xp.matmul(a, (v / w)[..., None])[..., 0] for a, v, w in zip(rows, p, weights, strict=True))
        step = sol.solve_free(u * units) * units
        z = z + step
        p = [v - xp.matmul(step[..., None, :], a)[..., 0, :] for a, v in zip(rows, p, strict=True)]

    grads: tuple[list[Array], list[Array], list[Array]] = ([], [], [])
    lam = sol.multipliers[..., None]
    for k, (v, w, y) in enumerate(zip(p, weights, map(flat, x), strict=True)):
        scaled = v / w
        by_row = lam * scaled[..., None, :] - z[..., None] * y[..., None, :]
        by_weight = -(y - flat(problem.vector[k])) * scaled
        likes = (problem.rows[k], problem.vector[k], weight[k])
        for to, value, like in zip(grads, (by_row, v, by_weight), likes, strict=True):
            to.append(xp.astype(xp.reshape(value, like.shape), like.dtype))
    return grads


def record(problem: Problem, sol: DualSolution, x: Any, method: Any) -> Any:
    """Return x as autograd sees it: with the derivative of the projection."""
    if not isinstance(method, Exact):
        raise ValueError(
            f"Gradients flow through method 'exact' only; method is {method!r}, but G, g or metric "
            "requires a gradient. Detach them, or use method='exact'."
        )
    blocks = problem.unpack(x)
    return problem.pack(list(_function().apply(problem, sol, blocks, *(problem.traced or []))))


@lru_cache(maxsize=1)
def _function() -> Any:
    import torch

    class Projection(torch.autograd.Function):
        """x, already computed, as a function of the arrays that it was computed from."""

        @staticmethod
        def forward(ctx, problem, sol, x, *traced):
            x = [a.clone() if any(a is v for v in problem.vector) else a for a in x]
            ctx.problem, ctx.sol = problem, sol
            ctx.save_for_backward(*traced, *x)
            return tuple(x)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, *upstream):
            n = len(upstream)
            saved = ctx.saved_tensors  # raises if G or g was changed in the meantime
            grads = pull_back(ctx.problem, ctx.sol, list(saved[-n:]), list(upstream))
            return None, None, None, *grads[0], *grads[1], *(grads[2] if ctx.problem.weight else [])

    return Projection
