"""Optimality conditions, scaling and resolution of one problem, as in `gemproj._tspace`."""

from __future__ import annotations

import numpy as np

from gemproj._constants import CLOSE, NEAR_ZERO
from gemproj.backends.numba.jit import strict


@strict
def norm1(lam):
    """Return the sum of absolute values."""
    total = 0.0
    for i in range(lam.size):
        total += abs(lam[i])
    return total


@strict
def slope(K, b, lam, s):
    """Write ``K lam + b`` to s."""
    for i in range(b.size):
        total = 0.0
        for j in range(b.size):
            total += K[i, j] * lam[j]
        s[i] = total + b[i]


@strict
def residual(lam, s, lower, upper):
    """Return the natural residual; infinite, if anything is NaN, which min and max would lose."""
    worst = 0.0
    for i in range(lam.size):
        if lam[i] != lam[i] or s[i] != s[i]:
            return np.inf
        off = abs(lam[i] - min(max(lam[i] - s[i], lower[i]), upper[i]))
        if not off <= worst:
            worst = off
    return worst


@strict
def slackness(lam, s, upper):
    """Return the largest product of a multiplier and a slack of which one should be zero."""
    worst = 0.0
    for i in range(lam.size):
        off = abs(lam[i]) * (max(s[i], 0.0) if lam[i] >= upper[i] else abs(s[i]))
        if not off <= worst:
            worst = off
    return worst


@strict
def normalise(given_K, given_b, unit_K, unit_b, per_norm):
    """Scale rows to norm one and b to maximum one; return that maximum. Rows of norm zero are decoupled."""
    t, size = unit_b.size, 0.0
    for i in range(t):
        per_norm[i] = 1.0 / np.sqrt(given_K[i, i]) if given_K[i, i] > 0.0 else 0.0
        unit_b[i] = given_b[i] * per_norm[i]
        size = max(size, abs(unit_b[i]))
    size = size if size > 0.0 else 1.0
    for i in range(t):
        unit_b[i] /= size
        for j in range(t):
            unit_K[i, j] = given_K[i, j] * per_norm[i] * per_norm[j]
        if per_norm[i] == 0.0:
            unit_K[i, i] = 1.0
    return size


@strict
def find_near(lam, s, lower, indices):
    """List the active and nearly active rows, as in `gemproj.methods.exact`; return their number."""
    near, count = NEAR_ZERO * (1.0 + norm1(lam)), 0
    for i in range(lam.size):
        if lam[i] > lower[i] or s[i] <= near:
            indices[count] = i
            count += 1
    return count


@strict
def resolution(K, rows, L):
    """Return a lower bound of the smallest eigenvalue of K on some rows, good unless below CLOSE.

    Gershgorin's, or CLOSE, if K less that on its diagonal has a Cholesky factor.
    """
    result = 1.0
    for i in rows:
        across = 0.0
        for j in rows:
            across += abs(K[i, j])
        result = min(result, 1.0 - (across - abs(K[i, i])))
    if result >= CLOSE:
        return result
    for a in range(rows.size):
        for b in range(a + 1):
            left = K[rows[a], rows[b]]
            for k in range(b):
                left -= L[a, k] * L[b, k]
            if a > b:
                L[a, b] = left / L[b, b]
            elif left <= CLOSE + 1e-12:
                return result
            else:
                L[a, a] = np.sqrt(left - CLOSE)
    return CLOSE
