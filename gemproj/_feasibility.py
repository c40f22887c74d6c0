"""Detection of an infeasible h, by Farkas' lemma."""

from __future__ import annotations

import numpy as np

from gemproj._arrays import Array, namespace
from gemproj._constants import (
    EPS,
    FAR,
    FAR_BY_GRAM,
    LARGE_PENALTY,
    LOOSE_ROWS,
    MISSED,
    NARROW_RIDGE,
    OPTIMAL_WITHIN,
    RIDGE,
    ROWS_RESOLVE,
)
from gemproj._coordinates import from_gram, settle, solve_in_coordinates
from gemproj._solution import DualSolution
from gemproj._tspace import Gram, identity_like, inverse, matvec, submatrix
from gemproj.methods import Exact, Status

# Maximum number of rows that a message names.
_NAMED = 12


def refuse_infeasible(sol: DualSolution, h: Array) -> None:
    """On the CPU, raise for an infeasible h; only stalled problems and zero rows with h > 0 are tested."""
    suspect = ((sol.status & int(Status.STALLED)) != 0) | np.any(_unsatisfiable(sol, h), axis=-1)
    for i in map(tuple, np.argwhere(suspect).tolist()):
        rows = _contradiction(sol, h, i)
        if len(rows):
            where = f" of problem {i if len(i) > 1 else i[0]}" if i else ""
            named = ", ".join(map(str, rows[:_NAMED]))
            if len(rows) > _NAMED:
                named += f" and {len(rows) - _NAMED} more"
            found = f"row {named}{where}" if len(rows) == 1 else f"rows {named}{where} at once"
            raise ValueError(
                f"h is infeasible: no x satisfies G @ x >= h in {found}. "
                "Lower h there, or set a penalty to allow violations."
            )


def cancelled_by_penalty(sol: DualSolution) -> np.ndarray:
    """Return the mask (...) of problems that lost digits to a large penalty of an equality; on the CPU."""
    upper = sol.upper
    pull = np.where(np.isinf(upper), 0.0, upper) * np.sqrt(np.diagonal(sol.gram.K, 0, -2, -1))
    if not (pull > LARGE_PENALTY * sol._size()[..., None]).any():  # most penalties are small
        return np.zeros(sol.gram.gg.shape, dtype=bool)
    return sol.kkt_residual() > OPTIMAL_WITHIN * EPS


def _unsatisfiable(sol: DualSolution, h: Array) -> Array:
    """Return the mask (..., t) of unsatisfiable rows: norm zero, no penalty, h > 0 (equalities: h != 0)."""
    xp = namespace(h)
    asks = xp.where(xp.isinf(sol.lower), h != 0, h > 0)
    return xp.isinf(sol.upper) & (xp.linalg.diagonal(sol.gram.K) == 0) & asks


def _contradiction(sol: DualSolution, h: np.ndarray, i: tuple[int, ...]) -> np.ndarray:
    """Return the indices of contradictory rows of problem i; empty unless the contradiction is certain."""
    void = _unsatisfiable(sol, h)[i]
    if void.any():
        return np.flatnonzero(void)
    t = void.size
    if sol._coordinates is not None and sol._coordinates[i].any():
        F, resolves, far = sol._coordinates[i], ROWS_RESOLVE, FAR
    else:
        K = np.broadcast_to(sol.gram.K, (*h.shape, t))
        F = from_gram(Gram(K[i], sol.gram.b[i], sol.gram.gg[i]))
        resolves, far = float(np.sqrt(sol._rounding)), FAR_BY_GRAM
    n, free = np.linalg.norm(F[:, :t], axis=0), np.isinf(sol.lower[i])
    hard = np.isinf(sol.upper[i]) & (n > 0)
    unit_h = h[i] * inverse(n)
    demand = float(np.max(np.where(free, np.abs(unit_h), unit_h), where=hard, initial=0.0))
    size = max(demand, float(np.linalg.norm(F[:, t])))
    for loose in LOOSE_ROWS if demand else ():
        rows = np.flatnonzero(hard & (free | (unit_h >= -loose * demand)))
        A, u = F[:, rows] / n[rows], unit_h[rows] / demand
        d = _farkas(A, u, free[rows], resolves)
        length = max(float(np.linalg.norm(A @ d)), resolves * float(np.abs(d).sum()))
        if demand * float(u @ d) > far * size * length:
            return rows[np.abs(d) > 1e-10 * np.abs(d).max()]
    return np.empty(0, dtype=np.int64)


def _farkas(A: np.ndarray, h: np.ndarray, free: np.ndarray, cutoff: float) -> np.ndarray:
    """Return the Farkas direction d, ``max h'd / |d|`` subject to ``A d = 0``, d >= 0 outside of `free`.

    d is proportional to the residual at the minimum of ``|max(0, h - A'x)|``. With an orthonormal basis N of
    the null space of A, ``d = N y``, where y is the projection of N'h onto the cone ``{y : N y >= 0}``. This
    projection always exists.
    """
    _, sizes, V = np.linalg.svd(A, full_matrices=False)
    N = V[sizes <= cutoff * np.max(sizes, initial=0.0)].T
    N[np.linalg.norm(N, axis=1) < 100 * cutoff] = 0.0  # rows that depend on no other rows, to rounding
    y = N.T @ h
    if y.size and not free.all():
        # The right-hand side is slightly negative: with zero, rounded opposite rows of N allow only y = 0.
        B, room = N[~free].T, np.full(np.count_nonzero(~free), -0.01 * cutoff)
        none, most = np.zeros(len(room)), np.full(len(room), np.inf)
        start = Exact().solve(B.T @ B, B.T @ y - room).multipliers
        lam = solve_in_coordinates(np.column_stack([B, y]), room, none, most, start)[0]
        y = settle(B, y, lam, lam > 0, room)[0]
    d = N @ y
    return np.where(free, d, np.maximum(d, 0.0))


def infeasible(sol: DualSolution, h: Array, stalled: Array) -> Array:
    """Return the mask (...) of problems on a device with an infeasible h, without synchronisation.

    If h is infeasible, the multipliers of ``min |max(0, h - G x)|^2 + ridge |x|^2`` tend to a Farkas
    direction as the ridge tends to 0.
    """
    void, lower = _unsatisfiable(sol, h), sol.lower
    if not h.shape[-1]:
        return namespace(h).any(void, axis=-1)
    xp = namespace(h)
    n = xp.sqrt(xp.linalg.diagonal(sol.gram.K))
    per_norm, zero, free = inverse(n), xp.zeros_like(h), xp.isinf(lower)
    hard = xp.isinf(sol.upper) & (n > 0)
    unit_h = xp.where(hard, h * per_norm, zero)
    demand = xp.max(xp.where(free, xp.abs(unit_h), unit_h), axis=-1, keepdims=True)
    used = hard & (free | (unit_h >= -LOOSE_ROWS[1] * demand)) & (demand > 0)
    u = xp.where(used, unit_h * inverse(demand), zero)
    cosines = submatrix(sol.gram.K * per_norm[..., :, None] * per_norm[..., None, :], used)
    ridge = RIDGE if sol._rounding < 1e-12 else NARROW_RIDGE
    lower = xp.where(free, lower, zero)
    d = Exact().solve(cosines + ridge * identity_like(cosines), -u, lower).multipliers
    length = xp.sqrt(xp.maximum(xp.sum(d * matvec(cosines, d), axis=-1), zero[..., 0]))
    length = xp.maximum(length, sol._rounding**0.5 * xp.sum(xp.abs(d), axis=-1))
    size = xp.maximum(xp.sqrt(xp.maximum(sol.gram.gg, zero[..., 0])), demand[..., 0])
    certain = demand[..., 0] * xp.sum(u * d, axis=-1) > FAR_BY_GRAM * size * length
    return (certain & stalled & (sol.kkt_residual() > MISSED)) | xp.any(void, axis=-1)
