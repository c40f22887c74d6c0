"""Stage 1: all that the dual problem needs to know about G and g, in one read of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from gemproj._array import Array, Blocks, Problem, namespace, read_problem, to_numpy
from gemproj._threads import cores, share
from gemproj.compiled.addresses import CHUNK, WIDE_RANGE, table_of
from gemproj.kernels import stages_of
from gemproj.methods._method import inverse

# Products of a chunk of columns are summed in float32 before the sums go on in float64. Vectorised loops
# keep 4 partial sums or more, so rounding adds up over a quarter of a chunk.
_PARTIAL_SUMS, _EPS, _EPS_32 = 4, 2.0**-52, 2.0**-23
# Rounding of sums in float64: columns that are all alike make 50 units of its precision of it.
WIDE_ROUNDING = 128 * _EPS
NARROW_ROUNDING = WIDE_ROUNDING + CHUNK / _PARTIAL_SUMS * _EPS_32 / 2
# Squared norms beyond which products may have left the range of float32.
_NARROW_RANGE = (1e-24, 1e30)


class Gram(NamedTuple):
    """The projection problem in t-space, in float64 (float32 on devices that have no float64).

    Attributes
    ----------
    K : array, shape (..., t, t)
        Gram matrix of the constraints, ``G @ G.T`` (``G @ diag(1/w) @ G.T`` with a metric w).
    b : array, shape (..., t)
        Linear term, ``G @ g``: negative where g violates a constraint.
    gg : array, shape (...)
        Squared norm of g, ``g @ g`` (``g @ diag(w) @ g`` with a metric w).
    """

    K: Array
    b: Array
    gg: Array


class Measured(NamedTuple):
    """What stage 1 hands on: the numbers, how they were rounded and in which units the rows are.

    Attributes
    ----------
    gram : Gram
        Of the rows ``units[i] * G[i]`` and the gradient ``units[t] * g``.
    rounding : float
        Of its entries, relative to ``|g_i| |g_j|``.
    units : array, shape (..., t + 1), or None
        Powers of two that keep squares inside the range of float64; None stands for ones.
    finite : bool
        Whether all numbers are known to be finite.
    """

    gram: Gram
    rounding: float
    units: Array | None = None
    finite: bool = False

    def raw(self) -> Gram:
        """Return the numbers for G and g as they were given, as far as float64 can hold them."""
        if self.units is None:
            return self.gram
        K, b, gg = self.gram
        rows, vector = self.units[..., :-1], self.units[..., -1]
        with np.errstate(over="ignore", under="ignore"):
            return Gram(
                K / rows[..., :, None] / rows[..., None, :],
                b / rows / vector[..., None],
                gg / vector / vector,
            )


def gram(G: Blocks, g: Blocks, *, metric: Blocks | None = None) -> Gram:
    """Compute the Gram matrix of the constraints, the linear term and the squared norm of g.

    Sums run in float64 whatever the dtype of the input, and nothing of the size of `G` is allocated.
    (On the CPU, products of 512 columns of a large problem of more than 8 rows, or without numba of any,
    that has no float64 in it are summed in float32 first: entries are then good to about 1e-8 of
    ``|g_i| |g_j|``, and to 8e-6 at worst.)

    Parameters
    ----------
    G : array, shape (..., t, d), or blocks
        Constraint gradients as rows. Or a sequence or mapping of arrays ``G[k]`` of shape
        ``(t, *shape_k)``: one problem whose Gram matrix is the sum over the blocks.
    g : array, shape (..., d), or blocks
        The proposed gradient; blocks ``g[k]`` have shape ``(*shape_k)``.
    metric : array or blocks, shaped like `g`, optional
        Positive weights w of the distance ``sum(w * (x - g)**2)``.

    Returns
    -------
    Gram
        ``K`` (..., t, t), ``b`` (..., t) and ``gg`` (...), on the device of `G`.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import gram
    >>> K, b, gg = gram(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([-2.0, 1.0]))
    >>> K.tolist(), b.tolist(), float(gg)
    ([[1.0, 1.0], [1.0, 2.0]], [-2.0, -1.0], 5.0)
    """
    problem = read_problem(G, g, metric)
    return Gram(*map(problem.give, measure(problem).raw()))


def measure(problem: Problem) -> Measured:
    """Stage 1 on checked arguments."""
    kernels, table = stages_of(problem), table_of(problem)
    if kernels is not None:
        return Measured(Gram(*kernels.gram(problem)), WIDE_ROUNDING)
    if table is None:
        return _measure_portably(problem)
    total = table.gram()
    if table.wide:
        if _all_within(total, *WIDE_RANGE):
            return _measured(problem, total, WIDE_ROUNDING, finite=True)
        units = _units(problem, total)
        if units is None:
            return _measured(problem, total, WIDE_ROUNDING)
    elif _all_within(total, *_NARROW_RANGE):
        return _measured(problem, total, NARROW_ROUNDING, finite=True)
    # One by one, so that no bit of the other problems changes.
    return _one_by_one(problem) if problem.batch else _measure_portably(problem)


# NumPy would warn of infinities that stage 2 reports, with the row that holds them.
@np.errstate(over="ignore", invalid="ignore", under="ignore")
def _measure_portably(problem: Problem) -> Measured:
    if problem.large and problem.batch and 0 not in problem.batch:
        return _one_by_one(problem)
    with problem.in_full_precision():
        if problem.chunked and table_of(problem) is None:
            total = _chunked_total(problem)
            wide = problem.narrow == problem.wide
            if _all_within(total, *(WIDE_RANGE if wide else _NARROW_RANGE)):
                return _measured(problem, total, WIDE_ROUNDING if wide else NARROW_ROUNDING, finite=True)
        total, units, finite = _wide_total(problem), None, False
        rounding = WIDE_ROUNDING * float(problem.xp.finfo(problem.wide).eps) / _EPS
        if problem.host:
            finite = _all_within(total, *WIDE_RANGE)
            # Squares may have left the range of float64: once more, in units in which they do not.
            units = None if finite else _units(problem, total)
            total = total if units is None else _wide_total(problem, units)
    return _measured(problem, total, rounding, units, finite)


def _one_by_one(problem: Problem) -> Measured:
    """Measure each problem of a batch on the CPU for itself."""
    parts = [measure(problem.at(i)) for i in np.ndindex(problem.batch)]

    def stack(arrays: list[np.ndarray]) -> np.ndarray:
        return np.stack(arrays).reshape((*problem.batch, *arrays[0].shape))

    units = None
    if any(part.units is not None for part in parts):
        ones = np.ones(problem.t + 1)
        units = stack([ones if part.units is None else part.units for part in parts])
    gram = Gram(*(stack([part.gram[i] for part in parts]) for i in range(3)))
    return Measured(gram, max(part.rounding for part in parts), units)


def _measured(
    problem: Problem, total: Any, rounding: float, units: Any = None, finite: bool = False
) -> Measured:
    """Take apart the Gram matrix of the stacked rows [G; g], (..., t + 1, t + 1)."""
    t = problem.t
    return Measured(Gram(total[..., :t, :t], total[..., :t, t], total[..., t, t]), rounding, units, finite)


def stacked_tiles(problem: Problem, units: Any = None) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield (lead, tile): the rows [G; g] tile by tile, (..., t + 1, size) in float64, times `units`.

    With a metric w, G is divided and g multiplied by sqrt(w). On the CPU tiles are NumPy arrays,
    whose products come out the same whatever the size of the batch. A tile lasts until the next.
    """
    xp, t, stack = problem.xp, problem.t, None
    for k, lead, index, size in problem.tiles():
        vector = problem.vector[k][index]
        batch = tuple(vector.shape[: len(problem.batch)])
        if stack is None or size > stack.shape[-1] or stack.shape[:-2] != batch:
            stack = xp.empty((*batch, t + 1, size), dtype=problem.wide, device=problem.device)
        tile = stack[..., :size]
        tile[..., :t, :] = xp.reshape(problem.rows[k][index], (*batch, t, size))
        tile[..., t, :] = xp.reshape(vector, (*batch, size))
        if problem.weight is not None:
            root = xp.sqrt(xp.astype(xp.reshape(problem.weight[k][index], (*batch, size)), problem.wide))
            tile[..., :t, :] /= root[..., None, :]
            tile[..., t, :] *= root
        if problem.host:
            tile = to_numpy(tile)
        if units is not None:
            tile *= units[(*lead, ...)][..., None]
        yield lead, tile


def _wide_total(problem: Problem, units: Any = None) -> Any:
    shape = (*problem.batch, problem.t + 1, problem.t + 1)
    total: Any = np.zeros(shape)
    if not problem.host:
        total = problem.xp.zeros(shape, dtype=problem.wide, device=problem.device)
    xp = namespace(total)
    for lead, tile in stacked_tiles(problem, units):
        total[(*lead, ...)] += xp.matmul(tile, xp.matrix_transpose(tile))
    return total


def _chunked_total(problem: Problem) -> np.ndarray:
    """Add the products of chunks of columns, made in float32 or float64, in float64."""
    xp, t = problem.xp, problem.t
    columns = max(1, problem.tile // (t + 1) // CHUNK) * CHUNK
    jobs = _groups(problem, columns)
    parts = np.empty((len(jobs), t + 1, t + 1))
    torch = array_api_compat.is_torch_namespace(xp)
    threads = 1 if torch else min(cores(), len(jobs))  # torch has threads of its own

    def work(thread: int) -> None:
        stack = xp.empty((t + 1, columns), dtype=problem.narrow, device=problem.device)
        for i in range(thread, len(jobs), threads):
            end = 0
            for k, index, size in jobs[i]:
                start, end = end, end + size
                stack[:t, start:end] = xp.reshape(problem.rows[k][index], (t, size))
                stack[t, start:end] = xp.reshape(problem.vector[k][index], (size,))
            count = -(-end // CHUNK)
            stack[:, end : count * CHUNK] = 0.0
            chunks = xp.moveaxis(xp.reshape(stack[:, : count * CHUNK], (t + 1, count, CHUNK)), 1, 0)
            # An array times its own transpose takes a path in NumPy that is slow for few rows, and one row
            # alone is slow in torch.
            product = xp.matmul(chunks[:, :t, :], xp.matrix_transpose(chunks))
            parts[i, :t] = to_numpy(xp.sum(product, axis=0, dtype=problem.wide))
            parts[i, t, t] = float(xp.sum(xp.square(chunks[:, t, :]), dtype=problem.wide))

    share(work, threads, threads)
    total = parts.sum(axis=0)
    total[t, :t] = total[:t, t]
    return total


def _groups(problem: Problem, columns: int) -> list[list[tuple[int, tuple[Any, ...], int]]]:
    """Return (block, index, size) of tiles of all blocks, in groups of at most so many columns."""
    groups: list[list[tuple[int, tuple[Any, ...], int]]] = []
    room = 0
    for k, _, index, size in problem.tiles(columns * (problem.t + 1)):
        if size > room:
            groups.append([])
            room = columns
        groups[-1].append((k, index, size))
        room -= size
    return groups


def _all_within(total: np.ndarray, low: float, high: float) -> bool:
    """Tell whether all squared norms lie between `low` and `high`; then no product exceeds `high`."""
    if total.ndim == 2:
        return all(low < square < high for square in total.diagonal().tolist())
    squares = np.diagonal(total, axis1=-2, axis2=-1)
    return not squares.size or bool(squares.min() > low and squares.max() < high)


def _units(problem: Problem, total: np.ndarray) -> np.ndarray | None:
    """Return powers of two that bring the rows whose squares are out of range near one; None if all fit."""
    if not any(str(a.dtype).endswith("float64") for a in [*problem.rows, *problem.vector]):
        return None  # squares of what narrower types hold are in the range of float64
    largest = np.zeros(total.shape[:-1])
    for lead, tile in stacked_tiles(problem):
        part = largest[(*lead, ...)]
        np.maximum(part, np.max(np.abs(tile), axis=-1, initial=0.0), out=part)
    squares = np.diagonal(total, axis1=-2, axis2=-1)
    fits = (squares > 1e-280) & (squares < 1e280) | (largest == 0) | ~np.isfinite(largest)
    exponents = np.where(fits, 0, -np.frexp(np.where(fits, 1.0, largest))[1])
    return None if fits.all() else np.ldexp(1.0, np.clip(exponents, -1000, 1000))


def factor_rows(problem: Problem, gram: Gram, rounding: float, units: np.ndarray | None = None) -> np.ndarray:
    """Return F (t + 1, t + 1) with ``[G; g] = F' Q'`` for some orthonormal Q (d, t + 1), for one problem.

    F says about the cone and g all that K, b and |g|^2 say, without their squares: in it rows may be
    dependent up to 1e-14 where K resolves 1e-7. Where all columns fit into one tile it is Householder's
    factorisation. Else it comes from combinations of rows that are orthogonal as far as K can tell: their
    own Gram matrix tells the rest, at the speed of matrix products. One more read of G and g. Rows that
    are not in `gram` are left out.
    """
    t = problem.t
    K, b, gg = (to_numpy(a) for a in gram)
    sizes, total = _unit_diagonal(np.block([[K, b[:, None]], [b[None, :], gg[None, None]]]))
    if problem.small:
        with problem.in_full_precision():
            stack = np.concatenate([tile.T.copy() for _, tile in stacked_tiles(problem, units)])
        stack[:, sizes == 0] = 0.0
        R: Any = np.linalg.qr(stack, mode="r")
        return np.concatenate([R, np.zeros((t + 1 - len(R), t + 1))])
    squares, basis = np.linalg.eigh(total)
    # Not below the rounding of K: such directions are wrong anyway, and only have to be made larger.
    scale = np.sqrt(np.maximum(squares, (t + 1) * rounding))
    forth, back = (basis / scale).T * inverse(sizes), sizes[:, None] * basis * scale
    total = np.zeros((t + 1, t + 1))
    with problem.in_full_precision():
        for _, tile in stacked_tiles(problem, units):
            tile[sizes == 0] = 0.0
            rows = forth @ tile
            total += rows @ rows.T
    n, total = _unit_diagonal(total)
    squares, basis = np.linalg.eigh(total)
    return ((back * n) @ (basis * np.sqrt(np.maximum(squares, 0.0)))).T


def _unit_diagonal(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split a Gram matrix into norms and cosines."""
    n = np.sqrt(np.diagonal(total))
    return n, total * inverse(n)[:, None] * inverse(n)
