"""Scaling, optimality conditions and resolution of one problem: the compiled twin of `gemproj._tspace`."""

from __future__ import annotations

import numpy as np

from gemproj._constants import CLOSE, NEAR_ZERO
from gemproj.backends.numba.jit import strict
from gemproj.backends.numba.tableau import rounding


@strict
def normalise(given_K, given_b, K, b, per_norm):
    """Write K and b scaled to rows of norm one and maximum one; return the scale of b.

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

    They are if ``K - CLOSE I`` has a Cholesky factor. `near` (t,) and L (t, t) are scratch arrays.
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
