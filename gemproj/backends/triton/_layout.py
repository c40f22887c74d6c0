"""Where the columns of a problem lie, and how they are cut into shares for the programs of a kernel.

Nothing is concatenated. Several blocks travel as a table of addresses, one line per segment: a run of
columns of one block that belongs to one program. One array needs no table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from gemproj._arrays import DTYPE, SHAPE
from gemproj.backends.triton._tables import Table

# The code of a dtype in the table; a set of dtypes is a sum of their bits 1 << code.
CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
_ITEMSIZE = np.array([4, 8, 2, 2])
# Numbers in a line of the table: addresses of rows and g, row stride, columns, code of rows + 4 * code of g.
LINE: tl.constexpr = tl.constexpr(5)
# Columns in multiples of which shares are made: nearly equal ones, at aligned addresses.
UNIT = 64
# Layouts of blocks, and tables of x of each, that are kept: a training loop has one or two.
_MOST = 16


@dataclass(eq=False)
class Layout:
    """What kernels need to find the columns of G and g."""

    device: torch.device
    t: int
    columns: int  # of one problem; each block ends at a multiple of 64
    problems: int
    dtypes: tuple[int, int]  # sets of those of rows and of g
    rows: int = 0  # addresses, for one array
    vector: int = 0
    strides: tuple[int, int, int] = (0, 0, 0)  # between rows; between problems of rows and of g
    blocks: np.ndarray | None = None  # a line of the table for each whole block
    _cuts: dict[Any, Cut] = field(default_factory=dict)

    def holds(self, *dtypes: torch.dtype) -> bool:
        """Return whether any block of G or g is of one of these dtypes."""
        return any((self.dtypes[0] | self.dtypes[1]) >> CODES[dtype] & 1 for dtype in dtypes)

    @property
    def align(self) -> int:
        """Numbers of the narrowest dtype in 16 bytes: of what addresses must be multiples for wide loads."""
        return 8 if self.holds(torch.float16, torch.bfloat16) else 4 if self.holds(torch.float32) else 2

    def cut(self, unit: int, most: int) -> Cut:
        """Return at most `most` shares of each problem, multiples of `unit` columns."""
        found = self._cuts.get((unit, most))
        if found is None:
            share = max(1, -(-self.columns // (unit * most))) * unit
            found = Cut(share, max(1, -(-self.columns // share)))
            if self.blocks is not None:
                found.cut_blocks(self.blocks, self.device)
            if found.table is None or found.table.lasts:
                self._cuts[unit, most] = found
        return found


@dataclass(eq=False)
class Cut:
    """Shares of the columns."""

    share: int  # columns of one program
    parts: int  # programs of one problem
    table: Table | None = None
    _where: Any = None  # block, and first byte in a block of g, of each line
    _outputs: OrderedDict[Any, Table] = field(default_factory=OrderedDict)

    def cut_blocks(self, blocks: np.ndarray, device: torch.device) -> None:
        """Make the table: where the lines of each program begin, and the lines."""
        sizes = _padded(blocks[:, 3])
        ends = np.cumsum(sizes)
        begins = ends - sizes
        starts = np.unique(np.concatenate([begins, np.arange(self.parts, dtype=np.int64) * self.share]))
        starts = starts[starts < ends[-1]]
        k = np.searchsorted(ends, starts, side="right")  # passes over empty blocks
        lines, offset = blocks[k], starts - begins[k]
        first_byte = offset * _ITEMSIZE[lines[:, 4] // 4]
        lines[:, 0] += offset * _ITEMSIZE[lines[:, 4] % 4]
        lines[:, 1] += first_byte
        lines[:, 3] = np.minimum(np.diff(starts, append=ends[-1]), lines[:, 3] - offset)
        first = np.searchsorted(starts, np.arange(self.parts + 1, dtype=np.int64) * self.share)
        self.table = Table(np.concatenate([first, lines.ravel()]), device)
        self._where = k, first_byte

    def output(self, distances: tuple[int, ...], device: torch.device) -> Table:
        """Return where segments of x begin, in bytes from its first block, for blocks that far from it."""
        table = self._outputs.get(distances)
        if table is None:
            k, first_byte = self._where
            table = Table(np.array(distances, dtype=np.int64)[k] + first_byte, device)
            if table.lasts:
                _keep(self._outputs, distances, table)
        return table


def _keep(store: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    store[key] = value
    if len(store) > _MOST:
        store.popitem(last=False)


_layouts: OrderedDict[Any, Layout] = OrderedDict()


def lay_out(rows: Sequence[Tensor], vector: Sequence[Tensor]) -> Layout | None:
    """Return the layout of one problem; None where the kernels cannot read its blocks where they are.

    Parameters
    ----------
    rows, vector : sequences of tensors, shapes (t, *shape_k) and (*shape_k)
        At least one each, of float16, bfloat16, float32 or float64. Rows may lie anywhere, but what is in a
        row must be contiguous.
    """
    if len(rows) == 1:
        G, g = rows[0], vector[0]
        whole = _has_whole_rows(G) and g.is_contiguous()
        return _of_array(G, g, 1, G.shape[0], g.numel(), (G.stride(0), 0, 0)) if whole else None
    device, t = vector[0].device, rows[0].shape[0]
    key = (
        device,
        t,
        tuple([G.data_ptr() for G in rows]),
        tuple([g.data_ptr() for g in vector]),
        tuple([G.stride() for G in rows]),
        tuple([g.stride() for g in vector]),
        tuple(map(SHAPE, vector)),
        tuple(map(DTYPE, rows)),
        tuple(map(DTYPE, vector)),
    )
    found = _layouts.get(key)
    if found is None:
        found = _of_blocks(device, t, rows, vector)
        if found is not None:
            _keep(_layouts, key, found)
    return found


def _has_whole_rows(G: Tensor) -> bool:
    return G.is_contiguous() or (G.shape[0] > 0 and G[0].is_contiguous())


def _of_blocks(
    device: torch.device, t: int, rows: Sequence[Tensor], vector: Sequence[Tensor]
) -> Layout | None:
    if not all(map(_has_whole_rows, rows)) or not all(map(Tensor.is_contiguous, vector)):
        return None
    dtypes = set(map(DTYPE, rows)), set(map(DTYPE, vector))
    if not dtypes[0] | dtypes[1] <= CODES.keys():
        return None
    lines = [
        [G.data_ptr(), g.data_ptr(), G.stride(0), g.numel(), CODES[G.dtype] + 4 * CODES[g.dtype]]
        for G, g in zip(rows, vector, strict=True)
    ]
    blocks = np.array(lines, dtype=np.int64)
    of_rows, of_vector = (sum(1 << CODES[dtype] for dtype in found) for found in dtypes)
    return Layout(device, t, int(_padded(blocks[:, 3]).sum()), 1, (of_rows, of_vector), blocks=blocks)


def _padded(sizes: np.ndarray) -> np.ndarray:
    """Return the columns that blocks count for: shares, multiples of 64, then begin at aligned addresses."""
    return -(-sizes // UNIT) * UNIT


def lay_out_batch(G: Tensor, g: Tensor) -> Layout | None:
    """Return the layout of a batch (B, t, d), (B, d), whose columns must be contiguous, or None."""
    problems, t, columns = G.shape
    for_rows, row_stride, step = G.stride()
    for_g, step_of_g = g.stride()
    whole = columns <= 1 or step == step_of_g == 1
    return _of_array(G, g, problems, t, columns, (row_stride, for_rows, for_g)) if whole else None


def _of_array(
    G: Tensor, g: Tensor, problems: int, t: int, columns: int, strides: tuple[int, int, int]
) -> Layout | None:
    types = G.dtype, g.dtype
    if types[0] not in CODES or types[1] not in CODES:
        return None
    return Layout(
        g.device,
        t,
        columns,
        problems,
        (1 << CODES[types[0]], 1 << CODES[types[1]]),
        G.data_ptr(),
        g.data_ptr(),
        strides,
    )


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; on the CPU, where programs run in turn, a few."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def power(n: int) -> int:
    """Return the next power of two; Triton's own function takes a hundred times as long."""
    return 1 << (n - 1).bit_length()
