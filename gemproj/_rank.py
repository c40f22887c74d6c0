"""Exact linear dependence of rows of floats, which are fractions: by their remainders modulo primes.

Rows that are dependent to rounding may or may not be dependent, and the projection can differ
completely between the two. What rounding cannot tell, arithmetic modulo a prime can: rows that are
independent modulo any prime are independent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gemproj._array import Problem
from gemproj._gram import stacked_tiles

# Mersenne primes 2^n - 1: multiplying by a power of two is a rotation of n bits. Products of two
# remainders, summed over the columns of a slice, are exact in float64.
_BITS, _COLUMNS = (17, 19), 1 << 14
_MORE = 8  # random combinations of columns beyond t: enough not to lose rank by chance


def remainders(problem: Problem) -> np.ndarray:
    """Return random combinations of the columns of G modulo two primes, (2, t, t + 8), for one problem.

    Rows that are independent stay so, but for a chance of about 1e-11. Rows that are not finite count
    as zero. One read of G.
    """
    t = problem.t
    rng = np.random.default_rng(0)
    result = np.zeros((len(_BITS), t, t + _MORE))
    for _, tile in stacked_tiles(replace(problem, weight=None)):
        for start in range(0, tile.shape[-1], _COLUMNS):
            rows = np.where(
                np.isfinite(tile[:t, start : start + _COLUMNS]), tile[:t, start : start + _COLUMNS], 0.0
            )
            fraction, exponent = np.frexp(rows)
            digits = np.ldexp(np.abs(fraction), 53).astype(np.int64)
            for k, bits in enumerate(_BITS):
                prime = (1 << bits) - 1
                shift = (exponent.astype(np.int64) - 53) % bits
                value = digits % prime
                value = ((value << shift) | (value >> (bits - shift))) & prime
                value = np.where(rows < 0, prime - value, value).astype(np.float64)
                mix = rng.integers(0, prime, (rows.shape[-1], t + _MORE)).astype(np.float64)
                result[k] = (result[k] + value @ mix) % prime
    return result.astype(np.int64)


def depends(residues: np.ndarray, row: int, rows: np.ndarray) -> bool:
    """Tell whether one row is a combination of the chosen `rows`, boolean (t,), exactly."""
    return all(
        _rank(values[rows], bits) == _rank(np.concatenate([values[rows], values[[row]]]), bits)
        for values, bits in zip(residues, _BITS, strict=True)
    )


def independent(residues: np.ndarray) -> bool:
    """Tell whether the rows of these residues are independent."""
    return rank(residues) == residues.shape[1]


def rank(residues: np.ndarray) -> int:
    """Return how many of the rows of these residues are independent."""
    return max(_rank(values, bits) for values, bits in zip(residues, _BITS, strict=True))


def _rank(values: np.ndarray, bits: int) -> int:
    prime, values, rank = (1 << bits) - 1, values.copy(), 0
    for column in range(values.shape[1]):
        candidates = np.flatnonzero(values[rank:, column]) + rank
        if not len(candidates):
            continue
        values[[rank, candidates[0]]] = values[[candidates[0], rank]]
        values[rank] = values[rank] * pow(int(values[rank, column]), -1, prime) % prime
        below = values[rank + 1 :]
        below -= below[:, [column]] * values[rank]
        below %= prime
        rank += 1
        if rank == len(values):
            break
    return rank
