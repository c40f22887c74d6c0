"""Exact solution of small problems: try every active set, keep the one that meets the KKT conditions."""

from __future__ import annotations

from gemproj._arrays import Array, device_of, namespace
from gemproj._tspace import clip, dependent_below, matvec, natural_residual, sweep

AT_LOWER, FREE, AT_UPPER = 0, 1, 2


def enumerate_active_sets(K: Array, b: Array, lower: Array | None, upper: Array | None) -> Array:
    """Solve ``min 1/2 lam'K lam + b'lam, lower <= lam <= upper`` for rows of norm one.

    The tableau [K | b] is swept row by row with and without each row: after row k there is one copy
    per choice for rows 0 .. k, and in the end 2^t of them (3^t with an upper bound), each with its
    solution. No step depends on a value, so a batch costs no branches and a device is never waited
    for. A row without a lower bound that is not free has the multiplier 0: its natural residual
    rejects the set, unless the row depends on free ones. The set with the smallest natural residual wins.
    """
    xp = namespace(b)
    t = b.shape[-1]
    device = device_of(b)
    K = xp.broadcast_to(K, (*b.shape, t))
    tableau = xp.concat([K, b[..., None]], axis=-1)[..., None, :, :]
    dependent = xp.zeros(tableau.shape[:-2], dtype=xp.bool, device=device)
    for k in range(t):
        pivot = tableau[..., k, k]
        branches = [tableau, sweep(tableau, k)]
        flags = [dependent, dependent | ~(pivot > dependent_below(tableau))]
        if upper is not None:
            held = xp.concat([tableau[..., :t], _at_upper(tableau, upper, k)], axis=-1)
            branches.append(held)
            flags.append(dependent | ~xp.isfinite(upper[..., k])[..., None])
        tableau = xp.concat(branches, axis=-3)
        dependent = xp.concat(flags, axis=-1)

    # The states of the rows in a set are the digits of its number, row 0 first. Made on the device: a copy
    # from the host would wait for it.
    choices = 2 if upper is None else 3
    sets, rows = xp.arange(choices**t, device=device), xp.arange(t, device=device)
    states = sets[:, None] // choices**rows % choices
    free = xp.astype(states == FREE, b.dtype)
    lam = -tableau[..., t] * free
    if upper is not None:
        lam = lam + xp.astype(states == AT_UPPER, b.dtype) * _finite(upper)[..., None, :]
    K, b = K[..., None, :, :], b[..., None, :]
    lower, upper = (None if a is None else a[..., None, :] for a in (lower, upper))
    lam = clip(lam, lower, upper)
    residual = natural_residual(lam, matvec(K, lam) + b, lower, upper)
    residual = xp.where(dependent | ~xp.isfinite(residual), xp.full_like(residual, xp.inf), residual)
    # Ties go to the first set: where no constraint is violated that is the empty one, and x is g.
    best = xp.argmin(residual, axis=-1, keepdims=True)
    chosen = best == xp.arange(residual.shape[-1], device=device)
    return xp.sum(xp.where(chosen[..., None], lam, xp.zeros_like(lam)), axis=-2)


def factorise_active_sets(K: Array, b: Array, lower: Array | None, upper: None = None) -> Array:
    """Do the same for torch tensors without upper bounds, whatever the norms of the rows, in few operations.

    Cholesky factors of all 2^t submatrices of the normalised K, with the identity for the rows outside of a
    set, give the solution on every set. On a device to start an operation takes longer than its arithmetic.
    """
    xp, t, device = namespace(b), b.shape[-1], b.device
    per_norm = xp.linalg.diagonal(K).rsqrt().nan_to_num(nan=0.0, posinf=0.0)
    # Row i is free in set n if bit i of n is one: no row in the first set, all rows in the last one. The bits
    # are not kept for the next call, which may run in another stream or in a graph.
    sets, rows = xp.arange(2**t, device=device), xp.arange(t, device=device)
    scale = (sets[:, None] >> rows & 1) * per_norm[..., None, :]
    submatrices = K[..., None, :, :] * scale[..., :, None] * scale[..., None, :]
    xp.linalg.diagonal(submatrices).masked_fill_(scale == 0, 1.0)
    linear = b[..., None, :] * scale
    factor, failed = xp.linalg.cholesky_ex(submatrices)
    # Not `cholesky_solve`, which most versions of torch leave to MAGMA for a batch; this is cuBLAS.
    half = xp.linalg.solve_triangular(factor, linear[..., None], upper=False)
    lam = -xp.linalg.solve_triangular(factor.mT, half, upper=True)[..., 0]
    s = xp.matmul(lam, submatrices[..., -1, :, :]) + linear[..., -1:, :]
    # The natural residual, |lam - clip(lam - s)|.
    residual = xp.minimum(s, lam if lower is None else lam - lower[..., None, :]).abs().amax(-1)
    root = xp.linalg.diagonal(factor).amin(-1) - failed  # of the smallest pivot; negative without a factor
    residual = residual.where(root > dependent_below(b) ** 0.5, xp.inf)
    # Ties go to the first set, as above.
    best = xp.argmin(residual, axis=-1, keepdims=True)[..., None]
    lam = lam.gather(-2, best.expand(*b.shape[:-1], 1, t))[..., 0, :] * per_norm
    return clip(lam, lower, None)


def _at_upper(tableau: Array, upper: Array, k: int) -> Array:
    """Return the last column of the tableau with multiplier k held at its upper bound."""
    return tableau[..., -1:] + (tableau[..., k] * _finite(upper)[..., k][..., None, None])[..., None]


def _finite(upper: Array) -> Array:
    """Return upper bounds with zero for those that are infinite, whose sets are not taken."""
    xp = namespace(upper)
    return xp.where(xp.isfinite(upper), upper, xp.zeros_like(upper))
