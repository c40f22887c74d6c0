"""The compiled twin of `gemproj.methods._faces.Tableau`: [K | b], swept on the set of free multipliers.

Scalar loops instead of array expressions, and small functions instead of large ones: most of the time of
the first call goes into numba's type inference, which takes milliseconds for each operation.
"""

from __future__ import annotations

import numpy as np

from gemproj import _constants
from gemproj.backends.numba.jit import strict

DEPENDENT = _constants.DEPENDENT * _constants.EPS


@strict
def set_free(T, K, b, lower, wanted, free, lam):
    """Sweep a fresh tableau on the rows `wanted`, equalities first; dependent rows are dropped with lam = 0.

    Each time the row farthest from the span of the free rows is next. Among dependent rows this selects rows
    at large angles, which keeps the multipliers small.
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
