"""The projection to a hundred digits, independent of all solvers, which are judged by it."""

from typing import Any

import mpmath
import numpy as np
from scipy.optimize import nnls

DIGITS = 100
# A number of size one below this is a rounded zero: differences between floats are far larger.
_ZERO = mpmath.mpf(10) ** -50


def project_precisely(G: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the projection of g onto ``{x : G @ x >= 0}``, rounded once, to the dtype of g.

    Floats are rationals, so K and b are computed exactly, as integers. Then an active-set method pivots in
    arithmetic of 100 digits until the optimality conditions hold. It starts from non-negative least squares
    in float64, which saves pivots but does not change the result. Finally the conditions are recomputed from
    the multipliers; if they do not hold to 50 digits, an error is raised.
    """
    G = G[np.any(G != 0, axis=1)]
    if not np.any(g) or not len(G):
        return g.copy()
    (rows, _), (vector, exponent) = _integers(G), _integers(g)
    with mpmath.workdps(DIGITS):
        norms, norm = _sqrt((rows * rows).sum(axis=1)), mpmath.sqrt(int(vector @ vector))
        units, unit = _real(rows) / norms[:, None], _real(vector) / norm
        K = _real(rows @ rows.T) / norms[:, None] / norms
        b = _real(rows @ vector) / norms / norm
        lam = _active_set(K, b, _suggest(units.astype(float), unit.astype(float)))
        s = K @ lam + b
        worst = max(max(-lam), max(-s), max(abs(lam * s)))
        if worst > _ZERO:
            raise ArithmeticError(f"the judge misses the optimality conditions by {mpmath.nstr(worst, 3)}.")
        x = unit + units.T @ lam
        x = np.where(abs(x) > _ZERO, x * norm, mpmath.mpf(0))
        return np.array([mpmath.ldexp(v, int(exponent)) for v in x], dtype=g.dtype)


def _integers(v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return v as integers and exponents of two, one exponent for each vector along the last axis."""
    mantissa, exponent = np.frexp(v.astype(np.float64))
    lowest = np.where(v != 0, exponent, exponent.max()).min(axis=-1, keepdims=True)
    digits = np.ldexp(mantissa, 53).astype(np.int64).astype(object)
    up = np.where(v != 0, exponent - lowest, 0).astype(object)
    return np.left_shift(digits, up), lowest[..., 0] - 53


def _suggest(G: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return multipliers in float64, of any quality."""
    try:
        return nnls(G.T, -g)[0]
    except RuntimeError:  # nnls reached its limit of iterations
        return np.zeros(len(G))


def _active_set(K: np.ndarray, b: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Minimise ``1/2 lam'K lam + b'lam`` over lam >= 0: Lawson and Hanson's method on a swept tableau.

    After sweeps on some rows, the last column of the tableau [K | b] holds -lam there and s elsewhere.
    """
    tableau = np.concatenate([K, b[:, None]], axis=1)
    active = np.zeros(len(b), dtype=bool)

    def pivot(j: Any) -> None:
        inverse, column = 1 / tableau[j, j], tableau[:, j].copy()
        row = tableau[j] * inverse
        tableau[:] -= column[:, None] * row
        tableau[:, j] = -column * inverse
        tableau[j], tableau[j, j] = row, inverse
        active[j] = not active[j]

    for j in np.flatnonzero(start):
        if tableau[j, j] > _ZERO:  # not a combination of the rows before it
            pivot(j)
    lam = np.where(active, _real(start), mpmath.mpf(0))
    while True:
        while True:
            trial = np.where(active, -tableau[:, -1], mpmath.mpf(0))
            blocking = np.flatnonzero(active & (trial <= 0))
            if not len(blocking):
                break
            steps = lam[blocking] / (lam[blocking] - trial[blocking])
            lam = lam + steps.min() * (trial - lam)
            for j in blocking[steps == steps.min()]:
                pivot(j)
                lam[j] = mpmath.mpf(0)
        lam, s = trial, np.where(active, mpmath.mpf(0), tableau[:, -1])
        if s.min() >= -_ZERO:
            return lam
        pivot(s.argmin())


_real = np.frompyfunc(mpmath.mpf, 1, 1)
_sqrt = np.frompyfunc(mpmath.sqrt, 1, 1)
