"""Stage 1: all that the dual problem needs to know about G and g, in one read of both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from gemproj._array import Array, Blocks, Problem, from_numpy, read_problem, to_numpy
from gemproj.methods._method import inverse

# Columns whose products are summed in the dtype of the input before the sums go on in float64. Matrix
# products keep 16 partial sums or more, so rounding adds up over a sixteenth of a chunk.
CHUNK, _PARTIAL_SUMS = 512, 16
# Rounding of sums in float64, in units of its precision: 50 is what columns that are all alike make of it.
_WIDE_ROUNDING = 128


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


@dataclass(frozen=True)
class Measured:
    """What stage 1 hands on: the numbers, how they were rounded and in which units the rows are.

    Attributes
    ----------
    gram : Gram
        Of the rows ``units[i] * G[i]`` and the gradient ``units[t] * g``.
    rounding : float
        Of its entries, relative to ``|g_i| |g_j|``.
    units : array, shape (..., t + 1), or None
        Powers of two that keep squares inside the range of float64; None stands for ones.
    """

    gram: Gram
    rounding: float
    units: Array | None = None

    def raw(self) -> Gram:
        """Return the numbers for G and g as they were given, as far as float64 can hold them."""
        if self.units is None:
            return self.gram
        K, b, gg = self.gram
        rows, vector = self.units[..., :-1], self.units[..., -1]
        return Gram(
            K / rows[..., :, None] / rows[..., None, :], b / rows / vector[..., None], gg / vector / vector
        )


def gram(G: Blocks, g: Blocks, *, metric: Blocks | None = None) -> Gram:
    """Compute the Gram matrix of the constraints, the linear term and the squared norm of g.

    Sums run in float64 whatever the dtype of the input, on pieces that stay in cache, so nothing of
    the size of `G` is allocated. (On the CPU, products of 512 columns of a large float32 problem are
    summed in float32 first: entries are then good to about 1e-8 of ``|g_i| |g_j|``, and to 1e-6 at
    worst.)

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
    return measure(read_problem(G, g, metric)).raw()


# NumPy would warn of infinities that stage 2 reports, with the row that holds them.
@np.errstate(over="ignore", invalid="ignore", under="ignore")
def measure(problem: Problem) -> Measured:
    """Stage 1 on checked arguments."""
    if problem.large and problem.batch and 0 not in problem.batch:
        return _one_by_one(problem)
    rounding = _WIDE_ROUNDING * float(problem.xp.finfo(problem.wide).eps)
    with problem.in_full_precision():
        if problem.native:
            total = _native_total(problem)
            if _all_within(total, 1e-24, 1e30):
                eps = float(problem.xp.finfo(problem.vector[0].dtype).eps)
                return _measured(problem, total, rounding + CHUNK / _PARTIAL_SUMS * eps / 2)
        total, units = _wide_total(problem), None
        if problem.host and not _all_within(total, 1e-280, 1e280):
            # Squares may have left the range of float64: once more, in units in which they do not.
            units = _units(problem, total)
            total = total if units is None else _wide_total(problem, units)
    return _measured(problem, total, rounding, units)


def _one_by_one(problem: Problem) -> Measured:
    xp, parts = problem.xp, [measure(problem.at(i)) for i in np.ndindex(problem.batch)]

    def stack(arrays: list[Array]) -> Array:
        return xp.reshape(xp.stack(arrays), (*problem.batch, *arrays[0].shape))

    units = None
    if any(part.units is not None for part in parts):
        ones = xp.ones(problem.t + 1, dtype=problem.wide, device=problem.device)
        units = stack([ones if part.units is None else part.units for part in parts])
    gram = Gram(*(stack([part.gram[i] for part in parts]) for i in range(3)))
    return Measured(gram, max(part.rounding for part in parts), units)


def _measured(problem: Problem, total: Any, rounding: float, units: Any = None) -> Measured:
    """Take apart the Gram matrix of the stacked rows [G; g], (..., t + 1, t + 1)."""
    t = problem.t
    if problem.host:
        total = from_numpy(total, problem.xp, problem.device)
        units = units if units is None else from_numpy(units, problem.xp, problem.device)
    return Measured(Gram(total[..., :t, :t], total[..., :t, t], total[..., t, t]), rounding, units)


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
    xp = array_api_compat.array_namespace(total)
    for lead, tile in stacked_tiles(problem, units):
        total[(*lead, ...)] += xp.matmul(tile, xp.matrix_transpose(tile))
    return total


def _native_total(problem: Problem) -> np.ndarray:
    """Add tiles without copying them: products of chunks in the dtype of the input, their sums in float64."""
    xp, t = problem.xp, problem.t
    total = np.zeros((t + 1, t + 1))

    def product_sum(left: Array, right: Array) -> np.ndarray:
        product = xp.matmul(left, xp.matrix_transpose(right))
        return to_numpy(xp.sum(product, axis=0, dtype=problem.wide))

    for k, _, index, size in problem.tiles(large=True):
        rows = xp.reshape(problem.rows[k][index], (t, size))
        vector = xp.reshape(problem.vector[k][index], (1, size))
        # The whole chunks, and what is left over as one shorter chunk.
        for start, stop in ((0, size - size % CHUNK), (size - size % CHUNK, size)):
            if start == stop:
                continue
            chunks = max(1, (stop - start) // CHUNK)
            columns = (stop - start) // chunks
            G = xp.moveaxis(xp.reshape(rows[:, start:stop], (t, chunks, columns)), 0, 1)
            # One row like the others: torch multiplies a (CHUNK, 1) column ten times more slowly.
            g = xp.moveaxis(xp.reshape(vector[:, start:stop], (1, chunks, columns)), 0, 1)
            total[:t, :t] += product_sum(G, G)
            total[:t, t:] += product_sum(G, g)
            total[t:, t:] += product_sum(g, g)
    total[t, :t] = total[:t, t]
    return total


def _all_within(total: np.ndarray, low: float, high: float) -> bool:
    """Tell whether all squared norms lie between `low` and `high`."""
    squares = np.diagonal(total, axis1=-2, axis2=-1)
    return bool(np.all((squares > low) & (squares < high)))


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
