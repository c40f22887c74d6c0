"""The compiled loops of stage 1 (products of rows) and stage 3 (linear combinations of rows).

The arrays of a problem are given by their addresses, see `addresses`, because one call reads hundreds of
arrays. The problem keeps the arrays alive. Scratch arrays belong to the caller: loops allocate nothing.
"""

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
from gemproj.backends.numba.columns import (
    QUAD,
    TRANSPOSED,
    add_dots,
    add_separated,
    separate,
    transpose,
)
from gemproj.backends.numba.jit import entry as fast_entry
from gemproj.backends.numba.jit import fast
from gemproj.backends.numba.lanes import HEIGHT, LANES, MULTIPLE
from gemproj.backends.numba.vectors import add_block, add_few, add_scaled, narrow, widen

# Maximum number of groups of HEIGHT gradients that are multiplied while a tile of G stays in cache.
MOST_GROUPS = 16
# Number of rows that stage 3 adds at a time.
_TOGETHER = 10


@fast
def _copy(address, step, n, like, tile, r, c):
    """Copy n entries of the dtype of `like`, `step` bytes apart, to ``tile[r, c : c + n]``."""
    if step == like.itemsize:
        widen(address, n, like, tile, r, c)
    else:
        for i in range(n):
            widen(address + i * step, 1, like, tile, r, c + i)


@fast
def read_vector(line, start, n, like, tile, r):
    """Copy n entries of g to row r of a tile."""
    _copy(line[VECTOR] + start * line[VECTOR_STEP], line[VECTOR_STEP], n, like, tile, r, 0)


@fast
def read_rows(line, start, n, t, like, columns, tile):
    """Copy n columns of G, starting at column `start`, to the first t rows of a tile.

    `columns` is None if the entries of each row are adjacent; else G may have any strides.
    """
    row, column, done, transposed = line[ROW_STEP], line[COLUMN_STEP], 0, 0
    source = line[ROWS] + start * column
    if columns is not None:
        done, transposed = _read_columns(source, row, column, n, t, like, tile)
    for r in range(t):
        begin = done if r < transposed else 0
        _copy(source + r * row + begin * column, column, n - begin, like, tile, r, begin)


@fast
def _read_columns(source, row, column, n, t, like, tile):
    """Copy columns with adjacent entries to rows of a tile; return the numbers of columns and rows copied."""
    done, height = n // TRANSPOSED * TRANSPOSED, 32 // max(4, like.itemsize)  # bfloat16 is read as float32
    if column == like.itemsize or row != like.itemsize:
        return 0, 0
    if t < 8 and column == t * row:
        separate(source, done, t, like, tile)
        return done, t
    if t < height:
        return 0, 0
    # Up to 3 remaining rows are copied entry by entry; more are transposed together with preceding rows.
    transposed = t - t % height if t % height <= 3 else t
    for c in range(0, done, TRANSPOSED):
        for r in range(0, transposed, height):
            first = min(r, t - height)
            transpose(source + c * column + first * row, column, like, tile, first, c)
    return done, transposed


@fast
def _columns_of(line, piece, piece_columns):
    """Return the first column of a piece in the block of a line, and the end column (exclusive)."""
    start = max(piece * piece_columns - line[FIRST_COLUMN], 0)
    return start, min((piece + 1) * piece_columns - line[FIRST_COLUMN], line[COLUMNS])


@fast
def _fill_up(tile, first, rows, n):
    """Pad rows with zeros from n columns to a multiple of MULTIPLE; return the new number of columns."""
    end = -(-n // MULTIPLE) * MULTIPLE
    for r in range(first, first + rows):
        for c in range(n, end):
            tile[r, c] = 0
    return end


@fast
def _add_tile(tile, rows, n, sums):
    """Add the products of all pairs of rows of a tile to partial sums, in blocks of the lower triangle."""
    k = 0
    for i in range(0, rows, HEIGHT):
        for j in range(0, i + 1, HEIGHT):
            add_block(tile, i, j, min(HEIGHT, rows - i), n, sums, k)
            k += 1


@fast
def _clear(rows):
    """Set all entries of all rows to zero."""
    for r in range(rows.shape[0]):
        for c in range(rows.shape[1]):
            rows[r, c] = 0


@fast
def _total(sums, k, p, q):
    """Return the product of row p of one group and row q of another group, from the sums of block k."""
    total, first = 0.0, (p * HEIGHT + q) * LANES
    for lane in range(first, first + LANES):
        total += sums[k, lane]
    return total


@fast
def _collect(sums, rows, t, totals, problem, piece):
    """Write products of the first `rows` rows of [G; g] to `totals`: K, then b and |g|^2 from row t."""
    k = 0
    for i in range(0, rows, HEIGHT):
        for j in range(0, i + 1, HEIGHT):
            for r in range(i, min(i + HEIGHT, rows)):
                for c in range(j, min(j + HEIGHT, r + 1)):
                    total = _total(sums, k, r - i, c - j)
                    totals[problem, piece, r * t + c] = total
                    if r < t:
                        totals[problem, piece, c * t + r] = total
            k += 1


@fast_entry
def sum_products(first, last, lines, blocks, pieces, piece_columns, like, columns, totals, tile, sums):
    """Write the products of the rows [G; g] over pieces ``first .. last - 1`` of the problems to `totals`.

    Each piece has its own K, b and |g|^2 in `totals` (problems, pieces, t * t + t + 1). Products are summed
    over the columns of a tile in its dtype, and over tiles in float64. `columns` is None if the entries of
    each row of G are adjacent. For other arrays, a second version of the loop is compiled at first use.
    """
    rows, n = tile.shape
    t = rows - 1
    few = 0 < t < HEIGHT
    for p in range(first, last):
        problem, piece = p // pieces, p % pieces
        _clear(sums)
        for k in range(problem * blocks, (problem + 1) * blocks):
            line = lines[k]
            start, stop = _columns_of(line, piece, piece_columns)
            row, column = line[ROW_STEP], line[COLUMN_STEP]
            in_place = few and line[VECTOR_STEP] == like.itemsize
            if columns is not None:
                in_place &= column == like.itemsize or (row == like.itemsize and column == t * row)
            while start < stop:
                here = min(n, stop - start)
                if in_place and here >= MULTIPLE:
                    here -= here % MULTIPLE  # few rows are multiplied in place
                    source, vector = line[ROWS] + start * column, line[VECTOR] + start * like.itemsize
                    add_few(source, row, column, vector, here, t, like, columns, tile, sums)
                else:
                    read_rows(line, start, here, t, like, columns, tile)
                    read_vector(line, start, here, like, tile, t)
                    _add_tile(tile, rows, _fill_up(tile, 0, rows, here), sums)
                start += here
        _collect(sums, rows, t, totals, problem, piece)


@fast_entry
def sum_shared_products(first, last, lines, blocks, t, piece_columns, like, columns, totals, tile, sums):
    """Write the products of the rows [G; g] to `totals`, for many g and one G; only problem 0 gets K.

    `first` and `last` count groups of HEIGHT gradients: all groups of piece 0, then all groups of piece 1,
    and so on. Each tile of G is read once for up to MOST_GROUPS groups. The tile holds the rows of G,
    followed by a group of gradients.
    """
    problems = totals.shape[0]
    n, row_groups, groups = tile.shape[1], (t + HEIGHT - 1) // HEIGHT, (problems + HEIGHT - 1) // HEIGHT
    # Order of the blocks in `sums`: the blocks of K, then for each group of gradients its products with each
    # group of rows of G, and its products with itself.
    size, vectors = row_groups * (row_groups + 1) // 2, row_groups * HEIGHT
    _clear(tile)
    while first < last:
        piece, group = first // groups, first % groups
        count = min(MOST_GROUPS, last - first, groups - group)
        _clear(sums)
        for k in range(blocks):
            line = lines[k]
            start, stop = _columns_of(line, piece, piece_columns)
            while start < stop:
                here = min(n, stop - start)
                read_rows(line, start, here, t, like, columns, tile)
                end = _fill_up(tile, 0, t, here)
                if group == 0:
                    _add_tile(tile, t, end, sums)
                place = size
                for c in range(group, group + count):
                    height = min(HEIGHT, problems - c * HEIGHT)
                    for i in range(height):
                        read_vector(
                            lines[(c * HEIGHT + i) * blocks + k], start, here, like, tile, vectors + i
                        )
                    _fill_up(tile, vectors, height, here)
                    for j in range(row_groups + 1):
                        add_block(tile, vectors, j * HEIGHT, height, end, sums, place)
                        place += 1
                start += here
        if group == 0:
            _collect(sums, t, t, totals, 0, piece)
        for p in range(group * HEIGHT, min((group + count) * HEIGHT, problems)):
            place, i = size + (p // HEIGHT - group) * (row_groups + 1), p % HEIGHT
            for r in range(t):
                totals[p, piece, t * t + r] = _total(sums, place + r // HEIGHT, i, r % HEIGHT)
            totals[p, piece, t * t + t] = _total(sums, place + row_groups, i, i)
        first += count


@fast_entry
def add_pieces(totals):
    """Add the sums of all pieces to the sums of piece 0, by pairwise summation to limit rounding."""
    for p in range(totals.shape[0]):
        left = totals.shape[1]
        while left > 1:
            half = left // 2
            for k in range(half):
                for i in range(totals.shape[2]):
                    totals[p, k, i] += totals[p, left - half + k, i]
            left -= half


@fast
def _add_rows(line, start, n, like, columns, lam, chosen, sums):
    """Add rows times their multipliers to n sums; rows whose multiplier is zero need not be finite."""
    row, column, count = line[ROW_STEP], line[COLUMN_STEP], 0
    source = line[ROWS] + start * column
    for r in range(lam.size):
        if lam[r] != 0.0:
            chosen[count] = r
            count += 1
    done = 0
    if columns is not None:
        done = _add_columns(source, row, column, n, like, lam, sums)
        if column != like.itemsize:
            for k in range(count):
                for c in range(done, n):
                    add_scaled(source + c * column, row, 1, like, lam, chosen, k, 1, sums, c)
            return
    # A few rows at a time, because processors prefetch only a few streams of memory.
    for k in range(0, count, _TOGETHER):
        add_scaled(source, row, n, like, lam, chosen, k, min(_TOGETHER, count - k), sums, 0)


@fast
def _add_columns(source, row, column, n, like, lam, sums):
    """Add the dot products of columns with lam to `sums`; return how many of the n columns were added."""
    t = lam.size
    if column == like.itemsize or row != like.itemsize:
        return 0
    if t < 8 and column == t * row:
        add_separated(source, n // TRANSPOSED * TRANSPOSED, t, like, lam, sums)
        return n // TRANSPOSED * TRANSPOSED
    if t < QUAD:
        return 0
    add_dots(source, column, n // QUAD * QUAD, t, like, lam, sums)
    return n // QUAD * QUAD


@fast
def _write(line, start, n, like, sums):
    """Write n sums to x, rounded to its dtype."""
    address, step = line[OUT] + start * line[OUT_STEP], line[OUT_STEP]
    if step == like.itemsize:
        narrow(sums, 0, n, address, like)
    else:
        for c in range(n):
            narrow(sums, c, 1, address + c * step, like)


@fast_entry
def write_combination(
    first, last, lines, blocks, pieces, piece_columns, shared, like, columns, lam, sums, chosen
):
    """Write pieces ``first .. last - 1`` of ``x = g + G'lam`` for lam (problems, t); x may be g itself.

    The pieces are numbered problem by problem; if G is `shared`, piece by piece over all problems. Sums are
    in float64 and stay in cache. x is written after its sums are complete, because x may be g.
    """
    problems = lam.shape[0]
    while first < last:
        problem, piece = (
            (first % problems, first // problems) if shared else (first // pieces, first % pieces)
        )
        together = min(last - first, problems - problem) if shared else 1
        for k in range(blocks):
            line = lines[problem * blocks + k]
            start, stop = _columns_of(line, piece, piece_columns)
            while start < stop:
                here = min(sums.shape[1], stop - start)
                for p in range(problem, problem + together):
                    one = lines[p * blocks + k]
                    read_vector(one, start, here, like, sums, 0)
                    _add_rows(line, start, here, like, columns, lam[p], chosen, sums)
                    _write(one, start, here, like, sums)
                start += here
        first += together
