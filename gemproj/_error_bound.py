"""An upper bound on the distance of given multipliers' x from the exact projection, in coordinates."""

from __future__ import annotations

import math

import numpy as np

from gemproj._coordinates import dual_basis
from gemproj._search import NEAR_ZERO, ROUNDING
from gemproj._tspace import Dual
from gemproj.backends import search


def error_bound(
    V: np.ndarray, a: np.ndarray, h: np.ndarray, lam: np.ndarray, lower: np.ndarray, upper: np.ndarray,
    asked: float, rounding: float, resolves: float,
) -> float:  # fmt: skip
    """Return an upper bound on ``|x - x*|`` for one problem in coordinates V (t, m) and a (m,).

    x* is the exact projection for rows and a gradient perturbed by rounding (a backward error, as in
    LAPACK). For multipliers mu that solve the problem, ``|x - x*| <= |V'(lam - mu)| + |x(mu) - x*|``.
    x(mu) is the exact projection for the right-hand side ``h + e``, where e holds the slacks of the active
    and nearly active rows. So the second term is at most ``|e| / sigma``, where sigma is the smallest
    singular value of a basis of these rows, in which active rows are chosen first. The other rows depend on
    the basis, to rounding. If a perturbation makes them exactly dependent, their constraints follow from
    those of the basis, unless the entries of h contradict each other; then only weak duality gives a bound.

    `resolves` is the smallest angle that the coordinates resolve. Coordinates from K cannot distinguish
    dependent rows from independent rows at smaller angles. Then only weak duality bounds the error, by
    ``|x|``, if x = 0 is feasible. With coordinates from K, rounding perturbs all slacks.
    """
    n = np.linalg.norm(V, axis=1)
    margin = np.where(np.isfinite(lower), np.maximum(lower, 0.0), 0.0)
    size = max(float(np.linalg.norm(a + margin @ V)), asked)
    used = (n > 0) & (lower < upper)
    # Where bounds leave one multiplier, x is off by what another one adds.
    fixed = float(np.linalg.norm(np.where(used, 0.0, np.clip(lam, lower, upper) - lam) @ V))
    # ``g + G'margin`` may cancel digits: rounding is then relative to the sum of the norms.
    whole = float(np.linalg.norm(a) + margin @ n)
    if size == 0.0 or not used.any():
        return fixed + (rounding * whole if margin.any() else 0.0)
    rounding = rounding * max(1.0, whole / size)
    # Rows of norm one, a problem of size one, and the held margins in a.
    n = n[used]
    A, stretch, a = V[used].T / n, n / size, (a + margin @ V) / size
    lower, upper, lam = ((v - margin)[used] * stretch for v in (lower, upper, lam))
    h = h[used] / n / size
    mu = inside = np.clip(lam, lower, upper)
    error = _conditions(A.T @ (a + A @ mu) - h, mu, lower, upper)[2]
    if error.max() > ROUNDING * (1.0 + float(np.abs(mu).sum())):
        given = (v[None] for v in (np.ascontiguousarray(A.T), a, h, lower, upper, mu))
        mu = search(Dual(0.0, 0.0, *given))[0][0]
    # Move x to ``A_P'x = h_P`` for the free rows P. The distance is the rounding error of x: the new x is the
    # exact projection of a gradient with such an error, and a projection does not increase it.
    F, x = dual_basis(A.T, (mu > lower) & (mu < upper)), a + A @ mu
    step = A @ F.T @ (F @ (A.T @ x - h))
    x, moved = x - step, float(np.linalg.norm(step))
    x = x - A @ F.T @ (F @ (A.T @ x - h))
    free, s, error = _conditions(A.T @ x - h, mu, lower, upper)
    fuzz = rounding * (1.0 + float(np.abs(mu).sum()))
    of_rows = resolves < 1e-10
    near = free | ((s <= (NEAR_ZERO if of_rows else max(NEAR_ZERO, fuzz))) & (upper > lower))
    basis, weights = _basis(A, free, near, resolves)
    bound = math.inf
    if of_rows or len(basis) == np.count_nonzero(near):
        known = rounding * (1.0 + float(np.abs(mu[~free]).sum())) if of_rows else fuzz
        sigma = float(np.linalg.svd(A[:, basis], compute_uv=False)[-1]) if basis else 1.0
        if not of_rows:
            sigma = math.sqrt(max(0.0, sigma**2 - len(mu) * rounding))
        missed = _missed(error, basis, weights, known, fuzz)
        bound = missed / sigma + moved + 2.0 * fuzz if sigma else math.inf
    apart = lam - mu
    step, much = float(np.linalg.norm(A @ apart)), float(np.abs(apart).sum())
    step = step + rounding * much if of_rows else math.hypot(step, math.sqrt(rounding) * much)
    bound += step
    if np.all(np.where(lower < 0, h == 0.0, h <= 0.0)):  # x = 0 is feasible
        x, much = a + A @ inside, 1.0 + float(np.abs(inside).sum())
        lost = 0.0 if of_rows else rounding * much * much
        square = max(0.0, float(x @ x) - 2.0 * float(h @ inside)) + lost
        length = math.sqrt(square) + float(np.linalg.norm(A @ (lam - inside))) + rounding * much
        bound = min(bound, length)
    return size * bound + fixed


def _conditions(
    s: np.ndarray, lam: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mask of free rows, the slacks, and the violation of each row's optimality condition.

    The slack of a row at its upper bound is negated, so that a negative slack is a violation at either bound.
    """
    free, held = (lam > lower) & (lam < upper), (lam >= upper) & (upper > 0)
    s = np.where(held, -s, s)
    return free, s, np.where(free, np.abs(s), np.maximum(-s, 0.0))


def _missed(error: np.ndarray, basis: list[int], weights: np.ndarray, known: float, fuzz: float) -> float:
    """Return an upper bound on ``|e|``, where e holds the violations of the basis rows; see `error_bound`.

    A dependent row with weights w could replace row i of the basis. Its violation v beyond rounding therefore
    counts as a violation ``v / |w_i|`` of row i. The bound is infinite if the violation of a dependent row is
    far above rounding.
    """
    w, worst = np.abs(weights), error[basis]
    size = 1.0 + w.sum(axis=0)
    if (error + known > 4.0 * fuzz * size)[w.any(axis=0)].any():
        return math.inf
    more = np.where(error > ROUNDING * size + worst @ w, error + worst @ w, 0.0)
    swapped = np.where(w > NEAR_ZERO, more, 0.0) / np.where(w > NEAR_ZERO, w, 1.0)
    return float(np.linalg.norm(worst + known + swapped.max(axis=1, initial=0.0)))


def _basis(
    A: np.ndarray, free: np.ndarray, near: np.ndarray, resolves: float
) -> tuple[list[int], np.ndarray]:
    """Return the indices of a basis of the nearly active rows, and the weights of other rows in this basis.

    Free rows are chosen first, then nearly active rows. Each step chooses the row farthest from the span of
    the chosen rows. The distance of a row is divided by one plus the sum of its absolute weights, because
    large weights increase the rounding error of the distance.
    """
    basis: list[int] = []
    rest, Q, weights = A.copy(), np.zeros((len(A), 0)), np.zeros((0, len(near)))
    for group in (np.flatnonzero(free), np.flatnonzero(near & ~free)):
        for _ in group:
            lengths = np.linalg.norm(rest[:, group], axis=0)
            apart = lengths / (1.0 + np.abs(weights[:, group]).sum(axis=0))
            if apart.max() <= resolves:
                break
            k = int(np.argmax(apart))
            q, j = rest[:, group[k]] / lengths[k], int(group[k])
            q -= Q @ (Q.T @ q)
            q /= np.linalg.norm(q)
            along = q @ rest
            Q, basis = np.concatenate([Q, q[:, None]], axis=1), [*basis, j]
            rest -= np.outer(q, along)
            along /= lengths[k]
            weights = np.concatenate([weights - np.outer(weights[:, j], along), along[None]])
    weights[:, basis] = 0.0
    weights[:, ~near] = 0.0
    return basis, weights
