"""The derivative of the projection: implicit differentiation on the active set."""

from __future__ import annotations

import math
from typing import NamedTuple

from gemproj._arrays import Array
from gemproj._bounds import Bounds
from gemproj._problem import Problem
from gemproj._tspace import matvec


class Gradients(NamedTuple):
    """Gradients of a scalar with respect to the arguments of a projection, each shaped like its argument.

    The gradients for h, margin and penalty have shape (..., t).
    """

    G: list[Array]
    g: list[Array]
    metric: list[Array]
    h: Array
    margin: Array
    penalty: Array


def pull_back(
    problem: Problem, bounds: Bounds, lam: Array, inverse: Array, x: list[Array], upstream: list[Array]
) -> Gradients:
    """Return the gradients of a scalar for all arguments; `upstream` is the gradient of the scalar for x.

    `lam` holds the multipliers and `inverse` is ``K_PP^-1`` as two factors (..., 2, t, t).

    The free rows P have multipliers strictly between their bounds, and ``G_P x = h_P`` holds near the
    solution. For the upstream gradient v and the metric W,

        z_P = K_PP^-1 G_P W^-1 v,    p = v - G_P' z_P,
        dg = p,    dG_i = lam_i W^-1 p - z_i x,    dW = -(x - g) W^-1 p,    dh = z,

    and the gradient with respect to a bound is ``G_i W^-1 p`` if multiplier i is at this bound. The sign is
    reversed for the penalty of an equality at its lower bound, which is minus the penalty. If a multiplier is
    at a bound with zero slack, the active set changes: the result is one of several one-sided derivatives.
    """
    xp, batch, t = problem.xp, problem.batch, problem.t
    lead = () if problem.shared else batch
    weight = problem.weight
    if weight is None:
        skip = len(batch) - len(lead)
        weight = [xp.ones(v.shape[skip:], dtype=v.dtype, device=problem.device) for v in problem.vector]

    def flat(a: Array, *lead: int) -> Array:
        return xp.astype(xp.reshape(a, (*lead, math.prod(a.shape[len(lead) :]))), problem.wide)

    rows = [flat(a, *lead, t) for a in problem.rows]
    if not problem.host:  # rows that are not finite were left out on a device
        finite = xp.all(xp.stack([xp.all(xp.isfinite(a), axis=-1) for a in rows]), axis=0)
        rows = [xp.where(finite[..., None], a, 0.0) for a in rows]
    weights = [flat(w, *lead) for w in weight]
    zero = xp.zeros_like(lam)
    least = zero if bounds.base is None else bounds.base
    if bounds.unbounded is not None:
        least = xp.where(bounds.unbounded, -math.inf, least)
    at_upper = xp.zeros_like(lam, dtype=xp.bool) if bounds.upper is None else lam >= bounds.upper
    free = (lam > least) & ~at_upper
    p, z = [flat(v, *batch) for v in upstream], zero

    def along(vectors: list[Array]) -> Array:
        """Return G W^-1 v, (..., t)."""
        products = [
            xp.matmul(a, (v / w)[..., None])[..., 0] for a, v, w in zip(rows, vectors, weights, strict=True)
        ]
        return sum(products[1:], products[0])

    for _ in range(2):  # the second pass removes the rounding of z, large if rows nearly cancel
        step = matvec(inverse[..., 0, :, :], matvec(inverse[..., 1, :, :], xp.where(free, along(p), zero)))
        z = z + step
        p = [v - xp.matmul(step[..., None, :], a)[..., 0, :] for a, v in zip(rows, p, strict=True)]
    to_bound = along(p)
    held = xp.where(free, zero, to_bound)
    # The lower bound of an equality with a penalty is minus that penalty.
    signed = xp.zeros_like(free) if bounds.equality is None else bounds.equality
    grads: tuple[list[Array], list[Array], list[Array]] = ([], [], [])
    for k, (v, w, y) in enumerate(zip(p, weights, x, strict=True)):
        y, scaled = flat(y, *batch), v / w
        if problem.shared:
            lam_t, z_t = (xp.matrix_transpose(xp.reshape(a, (-1, t))) for a in (lam, z))
            n = y.shape[-1]
            by_row = xp.matmul(lam_t, xp.reshape(scaled, (-1, n))) - xp.matmul(z_t, xp.reshape(y, (-1, n)))
        else:
            by_row = lam[..., None] * scaled[..., None, :] - z[..., None] * y[..., None, :]
        by_weight = -(y - flat(problem.vector[k], *batch)) * scaled
        likes = (problem.rows[k], problem.vector[k], weight[k])
        for to, value, like in zip(grads, (by_row, v, by_weight), likes, strict=True):
            if math.prod(value.shape) != math.prod(like.shape):  # a metric that all gradients share
                value = xp.sum(xp.reshape(value, (-1, math.prod(like.shape))), axis=0)
            to.append(xp.astype(xp.reshape(value, like.shape), like.dtype))
    margin = xp.where(at_upper | signed, zero, held)
    return Gradients(*grads, z, margin, xp.where(at_upper, held, xp.where(signed, -held, zero)))
