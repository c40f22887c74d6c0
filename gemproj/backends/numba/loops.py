"""Stages 1 and 3 as loops: products of rows, and sums of rows."""

from __future__ import annotations

from gemproj.backends.numba.addresses import (
    COLUMN_STEP,
    COLUMNS,
    FIRST_COLUMN,
    OUT,
    OUT_STEP,
    ROW_STEP,
    ROWS,
    VECTOR,
    VECTOR_STEP,
)
from gemproj.backends.numba.bfloat16 import entry
from gemproj.backends.numba.columns import QUAD, TURNED, add_dots, add_separated
from gemproj.backends.numba.jit import fast
from gemproj.backends.numba.lanes import HEIGHT, LANES, MULTIPLE
from gemproj.backends.numba.reading import adjacent, read_rows, read_vector, view
from gemproj.backends.numba.scratch import BLOCK, CROWDS, PART, align, count_shared_sums, count_sums
from gemproj.backends.numba.vectors import add_block, add_few, add_scaled, widen

# Rows that are added at a time.
_TOGETHER = 10


@fast
def _columns_of(line, piece, piece_columns):
    """Return where the columns of a piece start and stop in the block of a line."""
    start = max(piece * piece_columns - line[FIRST_COLUMN], 0)
    return start, min((piece + 1) * piece_columns - line[FIRST_COLUMN], line[COLUMNS])


@fast
def _fill_up(tile, step, rows, n, like):
    """Fill rows with zeros up to a multiple of what is worked on at once; return that number of columns."""
    end = -(-n // MULTIPLE) * MULTIPLE
    for r in range(rows if end > n else 0):
        row = view(tile + r * step, end, like)
        for c in range(n, end):
            row[c] = 0
    return end


@fast
def _add_tile(tile, step, rows, n, sums, like):
    """Add the products of all rows of a tile to partial sums, block by block of the lower triangle."""
    for i in range(0, rows, HEIGHT):
        for j in range(0, i + 1, HEIGHT):
            add_block(tile + i * step, tile + j * step, step, n, min(HEIGHT, rows - i), sums, like)
            sums += BLOCK * 8


@fast
def _total(sums, start):
    total = 0.0
    for lane in range(LANES):
        total += sums[start + lane]
    return total


@fast
def _collect(sums, rows, total):
    """Write partial sums of the first rows to a symmetric matrix."""
    k = 0
    for i in range(0, rows, HEIGHT):
        for j in range(0, i + 1, HEIGHT):
            for p in range(min(HEIGHT, rows - i)):
                for q in range(min(HEIGHT, i + p - j + 1)):
                    total[i + p, j + q] = _total(sums, k + (p * HEIGHT + q) * LANES)
                    total[j + q, i + p] = total[i + p, j + q]
            k += BLOCK


@fast
def sum_products(lines, blocks, first, last, pieces, piece_columns, n, like, scratch, totals):
    """Write the products of the rows [G; g] over pieces ``first .. last - 1`` of the problems to totals.

    Each piece has a matrix (t + 1, t + 1) of its own in totals (problems, pieces, ...). Products of at
    most n columns are summed in the dtype of `scratch`, the rest in float64; see `for_products`.
    """
    rows = totals.shape[2]
    t, size = rows - 1, count_sums(rows)
    few = 0 < t < HEIGHT
    sums, step = align(scratch.ctypes.data), n * scratch.itemsize
    tile = align(sums + 8 * size)
    all_sums = view(sums, size, totals)
    for p in range(first, last):
        problem, piece = p // pieces, p % pieces
        all_sums[:] = 0.0
        for k in range(problem * blocks, (problem + 1) * blocks):
            line = lines[k]
            start, stop = _columns_of(line, piece, piece_columns)
            # Few rows are multiplied where they lie.
            in_place = few and line[VECTOR_STEP] == like.itemsize and adjacent(line, t, like)
            while start < stop:
                here = min(n, stop - start)
                if in_place and here >= MULTIPLE:
                    here -= here % MULTIPLE
                    row, column = line[ROW_STEP], line[COLUMN_STEP]
                    source, vector = line[ROWS] + start * column, line[VECTOR] + start * like.itemsize
                    add_few(source, row, column, vector, here, t, sums, like, scratch)
                    start += here
                    continue
                read_rows(line, start, here, t, like, tile, step, scratch)
                read_vector(line, start, here, like, tile + t * step, scratch)
                _add_tile(tile, step, rows, _fill_up(tile, step, rows, here, scratch), sums, scratch)
                start += here
        _collect(all_sums, rows, totals[problem, piece])


@fast
def sum_shared_products(lines, blocks, first, last, piece_columns, n, like, scratch, totals):
    """Do the same for problems of one G, which is read once for many gradients; K only for problem 0.

    `first` and `last` count groups of HEIGHT gradients, those of piece 0 before those of piece 1.
    """
    problems, t = totals.shape[0], totals.shape[2] - 1
    groups, crowds = (t + HEIGHT - 1) // HEIGHT, (problems + HEIGHT - 1) // HEIGHT
    # First those of K, then for each group of gradients those with the rows and among themselves.
    size, total_size = count_sums(t), count_shared_sums(t)
    sums, step = align(scratch.ctypes.data), n * scratch.itemsize
    tile = align(sums + 8 * total_size)
    all_sums = view(sums, total_size, totals)
    view(tile, (groups + 1) * HEIGHT * n, scratch)[:] = 0
    vectors = tile + groups * HEIGHT * step
    while first < last:
        piece, crowd = first // crowds, first % crowds
        count = min(CROWDS, last - first, crowds - crowd)
        all_sums[:] = 0.0
        for k in range(blocks):
            line = lines[k]
            start, stop = _columns_of(line, piece, piece_columns)
            while start < stop:
                here = min(n, stop - start)
                read_rows(line, start, here, t, like, tile, step, scratch)
                end = _fill_up(tile, step, t, here, scratch)
                if crowd == 0:
                    _add_tile(tile, step, t, end, sums, scratch)
                place = sums + 8 * size
                for c in range(crowd, crowd + count):
                    height = min(HEIGHT, problems - c * HEIGHT)
                    for i in range(height):
                        one = lines[(c * HEIGHT + i) * blocks + k]
                        read_vector(one, start, here, like, vectors + i * step, scratch)
                    _fill_up(vectors, step, height, here, scratch)
                    for j in range(groups + 1):
                        add_block(vectors, tile + j * HEIGHT * step, step, end, height, place, scratch)
                        place += 8 * BLOCK
                start += here
        if crowd == 0:
            _collect(all_sums, t, totals[0, piece])
        for p in range(crowd * HEIGHT, min((crowd + count) * HEIGHT, problems)):
            place, i = size + (p // HEIGHT - crowd) * (groups + 1) * BLOCK, p % HEIGHT
            for r in range(t):
                total = _total(all_sums, place + r // HEIGHT * BLOCK + (i * HEIGHT + r % HEIGHT) * LANES)
                totals[p, piece, t, r] = totals[p, piece, r, t] = total
            totals[p, piece, t, t] = _total(all_sums, place + groups * BLOCK + (i * HEIGHT + i) * LANES)
        first += count


@fast
def add_pieces(totals):
    """Add pieces up into the first one, in pairs, so that rounding does not add up over pieces."""
    for p in range(totals.shape[0]):
        left = totals.shape[1]
        while left > 1:
            half = left // 2
            for k in range(half):
                for i in range(totals.shape[2]):
                    for j in range(totals.shape[3]):
                        totals[p, k, i, j] += totals[p, left - half + k, i, j]
            left -= half


@fast
def _add_active(rows, step, n, like, active, scale, count, x):
    """Add active rows times their scale to x; a few at a time: processors follow few streams of memory."""
    for k in range(0, count, _TOGETHER):
        add_scaled(rows, step, active + 8 * k, scale + 8 * k, min(_TOGETHER, count - k), n, x, like)


@fast
def _write(line, start, values, like):
    """Round entries of x to the output."""
    n, address, step = values.size, line[OUT] + start * line[OUT_STEP], line[OUT_STEP]
    if step == like.itemsize:
        out = view(address, n, like)
        for c in range(n):
            out[c] = entry(values[c], like)
    else:
        for c in range(n):
            view(address + c * step, 1, like)[0] = entry(values[c], like)


@fast
def _find_active(lam, active, scale):
    count = 0
    for i in range(lam.size):
        if lam[i] != 0.0:
            active[count], scale[count] = i, lam[i]
            count += 1
    return count


@fast
def _add_columns(line, start, like, lam, scratch, x):
    """Add the products of columns and lam to x; `scratch` has room for a number."""
    row, column, t, n, done = line[ROW_STEP], line[COLUMN_STEP], lam.size, x.size, 0
    source, scale, target = line[ROWS] + start * column, lam.ctypes.data, x.ctypes.data
    if row == like.itemsize and t < 8 and adjacent(line, t, like):
        done = n // TURNED * TURNED
        add_separated(source, scale, t, done, target, like)
    elif row == like.itemsize and t >= QUAD:
        done = n // QUAD * QUAD
        add_dots(source, column, scale, t, done, target, like)
    for r in range(t):
        if lam[r] == 0.0:
            continue
        for c in range(done, n):
            widen(source + c * column + r * row, 1, scratch.ctypes.data, like, lam)
            x[c] += lam[r] * scratch[0]


@fast
def write_combination(lines, blocks, first, last, pieces, piece_columns, shared, like, lam, scratch):
    """Write pieces ``first .. last - 1`` of ``x = g + G'lam`` for lam (problems, t); x may be g itself.

    Pieces of a problem follow each other; with one G for all, which is `shared`, problems of a piece do.
    Sums run in float64 and stay in cache; x is written only then, because it may be g. They and a list of
    active rows are in `scratch`, see `for_combination`.
    """
    problems, t = lam.shape
    sums = align(scratch.ctypes.data)
    chosen = align(sums + 8 * PART)
    factors = chosen + 8 * t
    active, scale = view(chosen, t, lines), view(factors, t, lam)
    while first < last:
        problem, piece = (
            (first % problems, first // problems) if shared else (first // pieces, first % pieces)
        )
        together = min(last - first, problems - problem) if shared else 1
        for k in range(blocks):
            line = lines[problem * blocks + k]
            columns_follow = line[COLUMN_STEP] == like.itemsize
            start, stop = _columns_of(line, piece, piece_columns)
            while start < stop:
                here = min(PART, stop - start)
                x = view(sums, here, lam)
                place = line[ROWS] + start * line[COLUMN_STEP]
                for p in range(problem, problem + together):
                    one = lines[p * blocks + k]
                    read_vector(one, start, here, like, sums, lam)
                    if columns_follow:
                        count = _find_active(lam[p], active, scale)
                        _add_active(place, line[ROW_STEP], here, like, chosen, factors, count, sums)
                    else:
                        _add_columns(line, start, like, lam[p], scale, x)
                    _write(one, start, x, like)
                start += here
        first += together
