"""Array libraries, devices, dtypes and blocks: nothing else in the package knows about them.

A projection problem arrives as one array `G` (..., t, d) with `g` (..., d), or as blocks, the way
parameters come out of a model. Both are read through the same `tiles`: small pieces that cover all
d columns, so that no stage ever needs a flattened, converted or concatenated copy of `G`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import array_api_compat
import numpy as np

Array = Any  # an array of NumPy, PyTorch, CuPy or any library of the array API standard
Blocks = Array | Sequence[Array] | Mapping[Any, Array]

# Elements of G and g in one tile: small enough for a float64 copy to stay in cache, or, where none is
# made, large enough for the library to share the work between threads.
_SMALL_TILE, _LARGE_TILE = 1 << 17, 1 << 20
# Columns from which a problem on the CPU is worth decisions that depend on its values. Smaller ones are
# treated alike, whatever they hold, so that problems of a batch cannot change each other's last bits.
_LARGE = 1 << 17


class _once:
    """A property computed at first use: functools.cached_property, without its lock (Python < 3.12)."""

    def __init__(self, function: Any) -> None:
        self.function, self.__doc__ = function, function.__doc__

    def __get__(self, problem: Any, _: Any = None) -> Any:
        if problem is None:
            return self
        value = problem.__dict__[self.function.__name__] = self.function(problem)
        return value


@dataclass(frozen=True)
class Problem:
    """The checked arguments of one call: blocks of `G` and `g`, and what they have in common."""

    xp: Any
    device: Any
    batch: tuple[int, ...]
    t: int
    rows: list[Array]  # (*batch, t, *shape_k)
    vector: list[Array]  # (*batch, *shape_k)
    weight: list[Array] | None  # like `vector`
    keys: Any  # None where g is one array, the type of a sequence, or the keys of a mapping
    traced: list[Array] | None = None  # rows, vector and weight as given, if autograd records any of them
    found: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # kept by later stages

    @_once
    def wide(self) -> Any:
        """Return the dtype of all sums: float64, or float32 on a device that has no float64 (MPS)."""
        return wide_dtype(self.xp, self.device)

    @_once
    def host(self) -> bool:
        """Whether looking at a value is free, because it does not wait for a device."""
        return on_host(self.device)

    def in_full_precision(self) -> AbstractContextManager[Any]:
        """Keep `torch.autocast` of the caller away from products and sums."""
        if not array_api_compat.is_torch_namespace(self.xp):
            return nullcontext()
        return self.xp.autocast(self.device.type, enabled=False)

    @_once
    def columns(self) -> int:
        """Return the number d of parameters."""
        lead = len(self.batch)
        return sum([math.prod(v.shape[lead:]) for v in self.vector])

    @property
    def small(self) -> bool:
        """Whether all rows of one problem of the batch fit into a tile."""
        return self.columns * (self.t + 1) <= _SMALL_TILE

    @property
    def large(self) -> bool:
        """Whether this is on the CPU and has so many columns that its batch is worth a Python loop."""
        return self.host and self.columns >= _LARGE

    def at(self, i: tuple[int, ...]) -> Problem:
        """Return problem i of the batch, as views."""
        rows, vector = [a[(*i, ...)] for a in self.rows], [a[(*i, ...)] for a in self.vector]
        weight = self.weight and [a[(*i, ...)] for a in self.weight]
        return replace(self, batch=(), rows=rows, vector=vector, weight=weight)

    @property
    def threads(self) -> int | None:
        """How many threads may work on arrays of this library; None for as many as there are cores."""
        return int(self.xp.get_num_threads()) if array_api_compat.is_torch_namespace(self.xp) else None

    @property
    def chunked(self) -> bool:
        """Whether this is one large problem without a metric, whose products may be made in chunks."""
        return self.large and not self.batch and self.weight is None

    @property
    def narrow(self) -> Any:
        """The smaller of float32 and float64 that holds all entries of G and g."""
        wide = any(a.dtype == self.xp.float64 for a in [*self.rows, *self.vector])
        return self.xp.float64 if wide else self.xp.float32

    @property
    def tile(self) -> int:
        """Elements in a tile of a large problem: enough for torch's threads, else a small part of G."""
        if array_api_compat.is_torch_namespace(self.xp):
            return _LARGE_TILE
        return min(_LARGE_TILE, max(_SMALL_TILE, self.columns * self.t // 32))

    def tiles(
        self, elements: int = _SMALL_TILE
    ) -> Iterator[tuple[int, tuple[Any, ...], tuple[Any, ...], int]]:
        """Yield (block, lead, index, size): ``vector[block][index]`` is a tile of g with `size` columns.

        Tiles come in order; `lead` is the part of `index` that selects from the batch. The number of
        columns does not depend on the batch, nor do, therefore, the sums over tiles.
        """
        columns = max(64, elements // (self.t + 1))
        for k, vector in enumerate(self.vector):
            for index, size in _tiles(tuple(vector.shape[len(self.batch) :]), columns):
                if not self.batch:
                    yield k, (), (..., *index), size
                    continue
                inner = math.prod(self.batch[1:]) * (self.t + 1) * max(1, size)
                step = max(1, _LARGE_TILE // max(1, inner))
                for start in range(0, self.batch[0], step):
                    lead = slice(start, min(start + step, self.batch[0]))
                    yield k, (lead,), (lead, ..., *index), size

    def give(self, a: Array) -> Array:
        """Return an array of t-space, which on the CPU is one of NumPy, in the library of G and g."""
        return from_numpy(a, self.xp, self.device) if self.host and a is not None else a

    def take(self, a: Array) -> Array:
        """Return an array of the library of G and g as t-space has it."""
        return to_numpy(a) if self.host and a is not None else a

    def unpack(self, x: Any) -> list[Array]:
        """Return the blocks of what `pack` has made, or of an output that the caller gave."""
        if self.keys is None:
            return [x]
        return list(x) if self.keys in (list, tuple) else [x[k] for k in self.keys]

    def pack(self, arrays: list[Array]) -> Any:
        """Give blocks back in the container they came in."""
        if self.keys is None:
            return arrays[0]
        if self.keys in (list, tuple):
            return self.keys(arrays)
        return dict(zip(self.keys, arrays, strict=True))


def _tiles(shape: tuple[int, ...], columns: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Cover an array of `shape` with index tuples of about `columns` elements each."""
    if not shape:
        yield (), 1
        return
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= columns:
        inner *= shape[axis]
        axis -= 1
    step = max(1, columns // max(1, inner))
    tail = (slice(None),) * (len(shape) - axis - 1)
    for lead in product(*(range(n) for n in shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            yield (*lead, slice(start, stop), *tail), (stop - start) * inner


def read_problem(G: Blocks, g: Blocks, metric: Blocks | None = None) -> Problem:
    """Check `G`, `g` and `metric` against each other and bring them into one form.

    Raises
    ------
    TypeError
        For something that is not an array, is not real floating point, or mixes libraries.
    ValueError
        For shapes, keys, lengths or devices that do not fit together.
    """
    rows, keys = _as_blocks(G, "G")
    vector, keys = _as_blocks(g, "g", like=(keys, len(rows)))
    weight = None if metric is None else _as_blocks(metric, "metric", like=(keys, len(rows)))[0]
    xp = _common_namespace([*rows, *vector, *(weight or [])])
    # A batch exists only for plain arrays: blocks have parameter shapes of any rank instead.
    lead = rows[0].ndim - 2 if keys is None else 0
    if lead < 0 or rows[0].ndim < 1:
        raise ValueError(f"G must have shape (..., t, d), one row per constraint; found {_shape(rows[0])}.")
    batch, t = tuple(rows[0].shape[:lead]), rows[0].shape[lead]
    for k, (G_k, g_k) in enumerate(zip(rows, vector, strict=True)):
        where = "" if keys is None else f"[{k if keys in (list, tuple) else keys[k]!r}]"
        if G_k.ndim < 1 or G_k.shape[lead] != t:
            raise ValueError(
                f"Every block of G needs one leading entry per constraint: G{where} has shape {_shape(G_k)}, "
                f"but the first block has {t} constraints."
            )
        expected = batch + tuple(G_k.shape[lead + 1 :])
        if tuple(g_k.shape) != expected:
            raise ValueError(
                f"g{where} must have shape {expected} to go with G{where} of shape {_shape(G_k)}; "
                f"found {_shape(g_k)}."
            )
        if weight is not None and tuple(weight[k].shape) != expected:
            raise ValueError(
                f"metric{where} must have the shape of g{where}, {expected}; found {_shape(weight[k])}."
            )
    device = device_of(vector[0])
    for name, arrays in (("G", rows), ("g", vector), ("metric", weight or [])):
        for a in arrays:
            if device_of(a) != device:
                raise ValueError(
                    f"{name} is on device {device_of(a)} but g is on {device}; move all arrays to one device."
                )
    given = [*rows, *vector, *(weight or [])]
    traced = given if any(is_traced(a) for a in given) else None
    rows, vector = [detach(a) for a in rows], [detach(a) for a in vector]
    weight = weight and [detach(a) for a in weight]
    problem = Problem(xp, device, batch, t, rows, vector, weight, keys, traced)
    if (
        weight is not None
        and problem.host
        and not all(bool(xp.all((w > 0) & xp.isfinite(w))) for w in problem.weight or [])
    ):
        raise ValueError("metric must be positive and finite everywhere; found an entry that is not.")
    return problem


def read_out(out: Blocks, problem: Problem) -> list[Array]:
    """Check that `out` can take what `g` holds, and return its blocks."""
    blocks, _ = _as_blocks(out, "out", like=(problem.keys, len(problem.vector)))
    if _common_namespace(blocks) is not problem.xp:
        raise TypeError(
            f"out must be of the library of g, {type(problem.vector[0]).__name__}; "
            f"found {type(blocks[0]).__name__}."
        )
    for k, (o, g) in enumerate(zip(blocks, problem.vector, strict=True)):
        where = "" if len(blocks) == 1 else f"[{k}]"
        if tuple(o.shape) != tuple(g.shape) or o.dtype != g.dtype:
            raise ValueError(
                f"out{where} must have the shape and dtype of g{where}, {_shape(g)} {g.dtype}; "
                f"found {_shape(o)} {o.dtype}."
            )
        if device_of(o) != problem.device:
            raise ValueError(f"out is on device {device_of(o)} but g is on {problem.device}.")
        if is_traced(o):
            raise ValueError(f"out{where} requires a gradient and cannot be written; pass out{where}.data.")
        if isinstance(o, np.ndarray) and not o.flags.writeable:
            raise ValueError(f"out{where} is read-only; pass an array that can be written.")
    return [detach(o) for o in blocks]


def _as_blocks(a: Blocks, name: str, like: tuple[Any, int] | None = None) -> tuple[list[Array], Any]:
    """Split an argument into blocks; `like` is what `G` was, which `g` and the rest must be too."""
    if isinstance(a, Mapping):
        keys: Any = list(a.keys())
        if like is not None and isinstance(like[0], list):
            if set(keys) != set(like[0]):
                odd = sorted(map(repr, set(keys) ^ set(like[0])))
                raise ValueError(
                    f"{name} and G must have the same keys; only in one of them: {', '.join(odd)}."
                )
            keys = like[0]
        blocks = [a[k] for k in keys]
    elif isinstance(a, (list, tuple)):
        keys, blocks = (tuple if isinstance(a, tuple) else list), list(a)
    else:
        keys, blocks = None, [a]
    if not blocks:
        raise ValueError(f"{name} has no blocks; pass at least one array.")
    if like is not None and _kind(keys) != _kind(like[0]):
        raise TypeError(f"{name} must be {_kind(like[0])}, as G is; found {_kind(keys)}.")
    if like is not None and len(blocks) != like[1]:
        raise ValueError(f"{name} has {len(blocks)} blocks but G has {like[1]}.")
    for block in blocks:
        if not array_api_compat.is_array_api_obj(block):
            hint = "; convert it, for example with numpy.asarray" if isinstance(block, (list, tuple)) else ""
            raise TypeError(
                f"{name} must be an array (NumPy, torch, CuPy, ...), or a sequence or mapping of arrays; "
                f"found {'blocks of type ' if keys is not None else ''}{type(block).__name__}{hint}."
            )
        if isinstance(block, np.ma.MaskedArray):
            raise TypeError(f"{name} must not be a masked array; pass {name}.filled(0.0).")
        if not is_real_floating(block):
            raise TypeError(
                f"{name} must have a real floating-point dtype; found {block.dtype}. Convert it first."
            )
    return blocks, keys


def _kind(keys: Any) -> str:
    if keys is None:
        return "one array"
    return "a sequence of arrays" if keys in (list, tuple) else "a mapping of arrays"


def is_real_floating(a: Array) -> bool:
    """Tell whether an array holds real floating-point numbers."""
    key = (type(a), a.dtype)
    if key not in _REAL_FLOATING:
        _REAL_FLOATING[key] = bool(namespace(a).isdtype(a.dtype, "real floating"))
    return _REAL_FLOATING[key]


# Looking these up takes longer than to project a small gradient.
_NAMESPACES: dict[type, Any] = {}
_REAL_FLOATING: dict[Any, bool] = {}


def namespace(a: Array) -> Any:
    """Return the functions of the library of an array, by the names of the array API standard."""
    xp = _NAMESPACES.get(type(a))
    if xp is None:
        xp = _NAMESPACES[type(a)] = array_api_compat.array_namespace(a)
    return xp


_NUMPY = namespace(np.empty(0))


def device_of(a: Array) -> Any:
    """Return the device of an array: "cpu" for NumPy's."""
    return "cpu" if type(a) is np.ndarray else array_api_compat.device(a)


def _common_namespace(arrays: list[Array]) -> Any:
    kinds = {type(a) for a in arrays}
    if len(kinds) == 1:
        return namespace(arrays[0])
    try:
        return array_api_compat.array_namespace(*arrays)
    except TypeError:
        found = sorted({type(a).__module__.split(".")[0] + "." + type(a).__name__ for a in arrays})
        raise TypeError(f"All arrays must come from one library; found {', '.join(found)}.") from None


def _shape(a: Array) -> tuple[int, ...]:
    return tuple(a.shape)


def detach(a: Array) -> Array:
    """Return the array outside of automatic differentiation; itself, where nothing is recorded."""
    return a.detach() if array_api_compat.is_torch_array(a) and a.requires_grad else a


def is_traced(a: Array) -> bool:
    """Tell whether automatic differentiation records what is done with `a`."""
    return array_api_compat.is_torch_array(a) and a.requires_grad and _is_recording()


def _is_recording() -> bool:
    import torch

    return torch.is_grad_enabled()


def note_written(a: Array) -> None:
    """Tell autograd of a write that went past it, so that it refuses to use what was there before."""
    if array_api_compat.is_torch_array(a) and not a.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(a)


def is_recorded(g: Blocks) -> bool:
    """Tell whether `torch.compile`, `torch.export` or `torch.jit.trace` records what is done with `g`."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.compiler.is_compiling() or torch.jit.is_tracing()):
        return False
    blocks = list(g.values()) if isinstance(g, Mapping) else g if isinstance(g, (list, tuple)) else [g]
    return all(isinstance(block, torch.Tensor) for block in blocks)


def wide_dtype(xp: Any, device: Any) -> Any:
    """Return float64, or float32 where a device has no float64 (Apple's MPS)."""
    return xp.float32 if getattr(device, "type", None) == "mps" else xp.float64


def on_host(device: Any) -> bool:
    """Tell whether `device` is the CPU, where reading a value waits for nothing."""
    if isinstance(device, str):
        return device == "cpu"
    return getattr(device, "type", None) == "cpu" or "CPU_DEVICE" in str(device)


def to_numpy(a: Array) -> np.ndarray:
    """Bring an array to NumPy: without a copy on the CPU, with a wait on a device."""
    if isinstance(a, np.ndarray):
        return a
    if array_api_compat.is_torch_array(a):
        return a.detach().cpu().numpy()
    return a.get() if array_api_compat.is_cupy_array(a) else np.asarray(a)


def from_numpy(a: Any, xp: Any, device: Any) -> Array:
    """Bring a NumPy array to another library and device, without a copy where that is possible."""
    if xp is _NUMPY:
        return a
    if xp.__name__.endswith("torch"):
        if not np.ndim(a):
            return xp.tensor(a, device=device)
        # From memory that is not pinned, CUDA has read the array when this returns, but the device need not
        # have come so far.
        ahead = getattr(device, "type", None) == "cuda"
        return xp.from_numpy(np.ascontiguousarray(a)).to(device, non_blocking=ahead)
    return xp.asarray(a, device=device)
