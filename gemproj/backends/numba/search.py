"""`gemproj._search`, compiled, with loops in place of NumPy's vector operations."""

from __future__ import annotations

from functools import partial
from typing import Any

from gemproj import _search
from gemproj.backends import portable
from gemproj.backends.numba.jit import compile_module
from gemproj.backends.numba.threads import share_pieces

# Time of a search, and of each entry of the coordinates, in units of the time to read a number.
_CALL, _READS = 5_000, 128


def _dot(u: Any, v: Any) -> float:
    total = 0.0
    for i in range(u.size):
        total += u[i] * v[i]
    return total


def _assign(to: Any, v: Any) -> None:
    for i in range(v.size):
        to[i] = v[i]


def _add(to: Any, factor: float, v: Any) -> None:
    for i in range(v.size):
        to[i] += factor * v[i]


def _times(rows: Any, v: Any, out: Any) -> None:
    for r in range(rows.shape[0]):
        total, row = 0.0, rows[r]
        for i in range(row.size):
            total += row[i] * v[i]
        out[r] = total


def _add_rows(weights: Any, rows: Any, to: Any) -> None:
    for r in range(rows.shape[0]):
        factor, row = weights[r], rows[r]
        for i in range(row.size):
            to[i] += factor * row[i]


def _rotate(u: Any, v: Any, cosine: float, sine: float) -> None:
    for i in range(u.size):
        u[i], v[i] = cosine * u[i] + sine * v[i], cosine * v[i] - sine * u[i]


_LOOPS = {"dot": _dot, "assign": _assign, "add": _add, "times": _times, "add_rows": _add_rows}
_solve = compile_module(_search, {**_LOOPS, "rotate": _rotate}).solve


def _run(first: int, last: int, *arguments: Any) -> None:
    """Solve a batch as `gemproj._search.solve` does; threads share a large one."""
    work = last * (_CALL + _READS * arguments[2].shape[1] * arguments[2].shape[2])
    share_pieces(lambda begin, end: _solve(begin, end, *arguments), last, work)


solve = partial(portable.solve, run=_run)
