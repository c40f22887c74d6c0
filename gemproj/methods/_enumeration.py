"""Exact solution of small problems: solve on every active set, and return the best solution."""

from __future__ import annotations

from gemproj._arrays import Array, device_of, namespace
from gemproj._tspace import clip, dependent_below, matvec, natural_residual, sweep

AT_LOWER, FREE, AT_UPPER = 0, 1, 2


def enumerate_active_sets(K: Array, b: Array, lower: Array | None, upper: Array | None) -> Array:
    """Return the solution of ``min 1/2 lam'K lam + b'lam, lower <= lam <= upper`` for rows of norm one.

    For each row, every tableau [K | b] is copied, and the copy is swept on the row. After row k there is one
    tableau per active set of rows 0 .. k. The final 2^t tableaux (3^t with upper bounds) hold the solutions
    on all sets. No operation depends on a value, so there are no branches and a device is not synchronised.
    An equality row that is not free has the multiplier 0. Its natural residual rejects the set, unless the
    row depends on free rows. The set with the smallest natural residual is chosen.
    """
    xp = namespace(b)
    t = b.shape[-1]
    device = device_of(b)
    if upper is not None:  # no multiplier is held at an infinite bound
        bound = xp.where(xp.isfinite(upper), upper, xp.zeros_like(upper))
    K = xp.broadcast_to(K, (*b.shape, t))
    tableau = xp.concat([K, b[..., None]], axis=-1)[..., None, :, :]
    # Sets with a dependent row are excluded: their tableau skips this row, and a set of independent rows
    # gives the same solution more accurately.
    dependent = xp.zeros(tableau.shape[:-2], dtype=xp.bool, device=device)
    for k in range(t):
        pivot = tableau[..., k, k]
        branches = [tableau, sweep(tableau, k)]
        flags = [dependent, dependent | ~(pivot > dependent_below(tableau))]
        if upper is not None:
            moved = (tableau[..., k] * bound[..., k][..., None, None])[..., None]
            branches.append(xp.concat([tableau[..., :t], tableau[..., t:] + moved], axis=-1))
            flags.append(dependent | ~xp.isfinite(upper[..., k])[..., None])
        tableau = xp.concat(branches, axis=-3)
        dependent = xp.concat(flags, axis=-1)

    # In base `choices`, digit k of the index of a set is the state of row k. The states are computed on the
    # device, because a copy from the host would synchronise.
    choices = 2 if upper is None else 3
    sets, rows = xp.arange(choices**t, device=device), xp.arange(t, device=device)
    states = sets[:, None] // choices**rows % choices
    free = xp.astype(states == FREE, b.dtype)
    lam = -tableau[..., t] * free
    if upper is not None:
        lam = lam + xp.astype(states == AT_UPPER, b.dtype) * bound[..., None, :]
    K, b = K[..., None, :, :], b[..., None, :]
    lower, upper = (None if a is None else a[..., None, :] for a in (lower, upper))
    lam = clip(lam, lower, upper)
    residual = natural_residual(lam, matvec(K, lam) + b, lower, upper)
    residual = xp.where(dependent | ~xp.isfinite(residual), xp.full_like(residual, xp.inf), residual)
    # Ties go to the first set: if no constraint is violated this is the empty set, and x is g.
    best = xp.argmin(residual, axis=-1, keepdims=True)
    chosen = best == xp.arange(residual.shape[-1], device=device)
    return xp.sum(xp.where(chosen[..., None], lam, xp.zeros_like(lam)), axis=-2)


def factorise_active_sets(K: Array, b: Array, lower: Array | None, upper: None = None) -> Array:
    """Return the solution of ``min 1/2 lam'K lam + b'lam, lower <= lam`` for torch tensors, rows of any norm.

    All 2^t submatrices of the normalised K are factorised in one batch by Cholesky, with the identity for the
    rows outside of a set. The factors give the solution on every set. This design launches few operations,
    because on a device a launch takes longer than the arithmetic.
    """
    xp, t, device = namespace(b), b.shape[-1], b.device
    K = K.expand(*b.shape, t)
    per_norm = xp.linalg.diagonal(K).rsqrt().nan_to_num(nan=0.0, posinf=0.0)
    # Row i is free in set n if bit i of n is one: no row in the first set, all rows in the last set. The bits
    # are not cached, because the next call may run in another CUDA stream or graph.
    sets, rows = xp.arange(2**t, device=device), xp.arange(t, device=device)
    scale = (sets[:, None] >> rows & 1) * per_norm[..., None, :]
    submatrices = K[..., None, :, :] * scale[..., :, None] * scale[..., None, :]
    xp.linalg.diagonal(submatrices).masked_fill_(scale == 0, 1.0)
    linear = b[..., None, :] * scale
    factor, failed = xp.linalg.cholesky_ex(submatrices)
    # `solve_triangular` calls cuBLAS; `cholesky_solve` calls MAGMA for a batch in most versions of torch.
    half = xp.linalg.solve_triangular(factor, linear[..., None], upper=False)
    lam = -xp.linalg.solve_triangular(factor.mT, half, upper=True)[..., 0]
    s = xp.matmul(lam, submatrices[..., -1, :, :]) + linear[..., -1:, :]
    # The natural residual, |lam - clip(lam - s)|.
    residual = xp.minimum(s, lam if lower is None else lam - lower[..., None, :]).abs().amax(-1)
    # The root of the smallest pivot; negative if the factorisation has failed.
    root = xp.linalg.diagonal(factor).amin(-1) - failed
    residual = residual.where(root > dependent_below(b) ** 0.5, xp.inf)
    # Ties go to the first set, as in `enumerate_active_sets`.
    best = xp.argmin(residual, axis=-1, keepdims=True)[..., None]
    lam = lam.gather(-2, best.expand(*b.shape[:-1], 1, t))[..., 0, :] * per_norm
    return clip(lam, lower, None)
