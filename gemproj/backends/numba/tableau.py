"""Compiled linear algebra of the active-set search, for one problem.

`set_free`, `pivot` and `trial` are versions of methods of `gemproj.methods._faces.Tableau`. The other
functions are versions of functions in `gemproj._tspace` and `gemproj.methods.exact`. Small scalar loops
replace array expressions, because the first call spends most of its time in numba's type inference, which
takes milliseconds for each operation.
"""

from __future__ import annotations

import numpy as np

from gemproj import _constants
from gemproj._constants import CLOSE, NEAR_ZERO
from gemproj.backends.numba.jit import fast as strict

DEPENDENT = _constants.DEPENDENT * _constants.EPS


@strict
def normalise(given_K, given_b, K, b, per_norm):
    """Write K scaled to rows of norm one, and b scaled to maximum one; return the scale of b.

    Rows of norm zero are decoupled from the other rows.
    """
    t, size = b.size, 0.0
    for i in range(t):
        per_norm[i] = 1.0 / np.sqrt(given_K[i, i]) if given_K[i, i] > 0.0 else 0.0
        b[i] = given_b[i] * per_norm[i]
        if abs(b[i]) > size:
            size = abs(b[i])
    if size == 0.0:
        size = 1.0
    for i in range(t):
        b[i] /= size
        for j in range(t):
            K[i, j] = given_K[i, j] * per_norm[i] * per_norm[j]
        if per_norm[i] == 0.0:
            K[i, i] = 1.0
    return size


@strict
def clip(value, low, high):
    """Return a number clipped to its bounds."""
    return low if value < low else high if value > high else value


@strict
def set_free(T, K, b, lower, wanted, free, lam):
    """Sweep a fresh tableau on the rows `wanted`, equalities first; dependent rows are dropped with lam = 0.

    Each step frees the row farthest from the span of the free rows. Among dependent rows, this order selects
    rows at large angles, which keeps the multipliers small.
    """
    t, equality = b.size, True
    for i in range(t):
        free[i] = False
        T[i, t] = b[i]
        for j in range(t):
            T[i, j] = K[i, j]
    while True:
        farthest, k = DEPENDENT, t
        for i in range(t):
            if wanted[i] and not free[i] and (lower[i] == -np.inf) == equality and T[i, i] > farthest:
                farthest, k = T[i, i], i
        if k < t:
            pivot(T, free, k)
        elif equality:
            equality = False
        else:
            break
    for i in range(t):
        if wanted[i] and not free[i]:
            lam[i] = 0.0


@strict
def pivot(T, free, k):
    """Add row k to the free rows or remove it: the sweep of the tableau (t, t + 1) is its own inverse."""
    t = T.shape[0]
    divisor = T[k, k] if T[k, k] > DEPENDENT else 1.0
    for j in range(t + 1):
        T[k, j] /= divisor
    for i in range(t):
        factor = T[i, k]
        if i != k and factor != 0.0:
            for j in range(t + 1):
                T[i, j] -= factor * T[k, j]
        T[i, k] = -factor / divisor
    T[k, k] = 1.0 / divisor
    free[k] = not free[k]


@strict
def trial(T, lam, free, s):
    """Write -lam of the free rows and s of the other rows, at the minimum over the free multipliers."""
    t = lam.size
    for i in range(t):
        s[i] = T[i, t]
    for j in range(t):
        if not free[j] and lam[j] != 0.0:
            for i in range(t):
                s[i] += T[i, j] * lam[j]


@strict
def rounding(lam):
    """Return ``1 + |lam|_1``, the unit of the rounding error of slacks."""
    total = 1.0
    for i in range(lam.size):
        total += abs(lam[i])
    return total


@strict
def optimality(K, b, lam, lower, upper, s):
    """Write ``K lam + b`` to s; return the natural residual and the complementarity of lam.

    Both are infinite if a multiplier or slack is NaN.
    """
    residual = complementarity = 0.0
    for i in range(b.size):
        slack = 0.0
        for j in range(b.size):
            slack += K[i, j] * lam[j]
        slack += b[i]
        s[i] = slack
        if slack != slack or lam[i] != lam[i]:
            return np.inf, np.inf
        off = abs(lam[i] - clip(lam[i] - slack, lower[i], upper[i]))
        if off > residual:
            residual = off
        if slack < 0.0 and lam[i] >= upper[i]:  # at the upper bound a negative slack is optimal
            slack = 0.0
        off = abs(lam[i] * slack)
        if off > complementarity:
            complementarity = off
    return residual, complementarity


@strict
def resolution(K, lam, s, lower, near, L):
    """Return CLOSE if all eigenvalues of K on the active and nearly active rows are above CLOSE, else 0.

    This holds if ``K - CLOSE I`` has a Cholesky factor. `near` (t,) and L (t, t) are scratch arrays.
    """
    size, a = NEAR_ZERO * rounding(lam), 0
    for i in range(lam.size):
        near[i] = lam[i] > lower[i] or s[i] <= size
        if not near[i]:
            continue
        b = 0
        for j in range(i + 1):
            if not near[j]:
                continue
            left = K[i, j]
            for k in range(b):
                left -= L[a, k] * L[b, k]
            if j < i:
                L[a, b] = left / L[b, b]
            elif left > CLOSE + 1e-12:
                L[a, b] = np.sqrt(left - CLOSE)
            else:
                return 0.0
            b += 1
        a += 1
    return CLOSE
