"""`Problem`: the checked G, g and metric of one call, with their library, device and shapes.

Each argument is one array, or a sequence or mapping with one array (block) per parameter of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np

from gemproj._arrays import (
    Array,
    Blocks,
    detach,
    device_of,
    from_numpy,
    is_array,
    is_real_floating,
    is_torch,
    namespace,
    on_host,
    refuse_transformed,
    to_numpy,
    wide_dtype,
)
from gemproj._checks import refuse_masked


@dataclass(eq=False)
class Problem:
    """One projection problem, or a batch of independent problems.

    Attributes
    ----------
    xp : module
        Array API namespace of all arrays.
    device : device
    batch : tuple of int
        Leading dimensions; blocks have none.
    t : int
        Number of constraints.
    rows : list of array
        Blocks of G, shapes ``(*batch, t, *shape_k)``; without `batch` if `shared`.
    vector : list of array
        Blocks of g, shapes ``(*batch, *shape_k)``.
    weight : list of array or None
        Blocks of the metric, shaped like the blocks of g; without `batch` if `shared`.
    keys : None, type or list
        None if g is one array, else the type of the sequence, or the keys of the mapping.
    shared : bool
        Whether all problems of the batch have the same G, which is stored once.
    backend : object
        Backend of stages 1 and 3, chosen by `gemproj.backends.select`; None before that.
    """

    xp: Any
    device: Any
    batch: tuple[int, ...]
    t: int
    rows: list[Array]
    vector: list[Array]
    weight: list[Array] | None
    keys: Any
    shared: bool = False
    backend: Any = field(default=None, init=False)
    host: bool = field(init=False)
    sizes: list[int] = field(init=False)
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.host, lead = on_host(self.device), len(self.batch)
        self.sizes = [math.prod(v.shape[lead:]) for v in self.vector]
        self.columns = sum(self.sizes)

    @property
    def wide(self) -> Any:
        """The dtype of t-space: float64, or float32 on a device that has no float64."""
        return wide_dtype(self.xp, self.device)

    @property
    def like(self) -> tuple[tuple[int, ...], Any, Any]:
        """Shape (..., t), library and device of arguments with one number per constraint."""
        return (*self.batch, self.t), self.xp, self.device

    @property
    def is_torch(self) -> bool:
        """Whether the arrays are torch tensors."""
        return self.xp.__name__.endswith("torch")

    def has_float64(self) -> bool:
        """Return whether any array of G or g has a dtype wider than float32."""
        return any(self.xp.finfo(a.dtype).bits > 32 for a in [*self.rows, *self.vector])

    def without_autocast(self) -> AbstractContextManager[Any]:
        """Return a context that disables `torch.autocast`, so that products and sums keep their dtype."""
        return self.xp.autocast(self.device.type, enabled=False) if self.is_torch else nullcontext()

    def at(self, i: tuple[int, ...]) -> Problem:
        """Return problem i of the batch, as views."""
        vector = [a[(*i, ...)] for a in self.vector]
        if self.shared:
            return replace(self, batch=(), vector=vector, shared=False)
        rows = [a[(*i, ...)] for a in self.rows]
        weight = None if self.weight is None else [a[(*i, ...)] for a in self.weight]
        return replace(self, batch=(), rows=rows, vector=vector, weight=weight)

    def to_caller(self, a: Array) -> Array:
        """Convert an array of t-space (a NumPy array on the CPU) to the library of G and g."""
        return from_numpy(a, self.xp, self.device)

    def to_host(self, a: Array) -> Array:
        """Convert an array of the library of G and g to an array of t-space (a NumPy array on the CPU)."""
        return to_numpy(a) if self.host and a is not None else a


def check_problem(G: Blocks, g: Blocks, metric: Blocks | None = None, *, values: bool = True) -> Problem:
    """Return `G`, `g` and `metric` as one `Problem`; raise if they are invalid or do not fit together.

    Without `values` only types and shapes are checked, because torch.func does not allow reading values.
    """
    rows, keys = as_blocks(G, "G")
    vector, keys = as_blocks(g, "g", like=(keys, len(rows)))
    weight = None if metric is None else as_blocks(metric, "metric", like=(keys, len(rows)))[0]
    if isinstance(keys, list) and (order := list(g)) != keys:  # x follows the key order of g
        rows, vector, keys = [G[k] for k in order], [g[k] for k in order], order
        weight = None if metric is None else [metric[k] for k in order]
    n, arrays = len(rows), [*rows, *vector, *(weight or ())]
    xp, device = namespace(*arrays), device_of(vector[0])
    if type(vector[0]) is not np.ndarray:
        for k, a in enumerate(arrays):
            if device_of(a) != device:
                raise ValueError(
                    f"{('G', 'g', 'metric')[k // n]} is on device {device_of(a)} but g is on {device}; "
                    "use one device for all arrays."
                )
        if values:
            refuse_transformed(arrays)
        arrays = [detach(a) for a in arrays]
        rows, vector, weight = arrays[:n], arrays[n : 2 * n], arrays[2 * n :] or None
    if weight is not None and values and on_host(device):
        for w in weight:  # reductions allocate nothing and propagate NaN
            if math.prod(w.shape) and not (float(xp.min(w)) > 0.0 and float(xp.max(w)) < math.inf):
                raise ValueError("metric must be positive and finite everywhere; found an entry that is not.")
    if keys is None:
        return _arrays_problem(xp, device, rows[0], vector[0], None if weight is None else weight[0])
    if rows[0].ndim < 1:
        raise ValueError("Blocks of G must have shape (t, *shape_k), one entry per constraint; found ().")
    problem = Problem(xp, device, (), rows[0].shape[0], rows, vector, weight, keys)
    for k, (a, v, w) in enumerate(zip(rows, vector, weight or vector, strict=True)):
        if a.shape != (problem.t, *v.shape) or w.shape != v.shape:
            _refuse_block(problem, k)
    return problem


def _arrays_problem(xp: Any, device: Any, G: Array, g: Array, w: Array | None) -> Problem:
    """Return the problem of arrays G (..., t, d), g (..., d) and metric (..., d), broadcast to one batch."""
    of_G, of_g = tuple(G.shape), tuple(g.shape)
    if len(of_G) < 2:
        raise ValueError(f"G must have shape (..., t, d), one row per constraint; found {of_G}.")
    lead, batch, (t, d) = of_G[:-2], of_g[:-1], of_G[-2:]
    if of_g[-1:] != (d,):
        raise ValueError(
            f"g must have shape {(*lead, d)} or (..., {d}) to go with G of shape {of_G}; found {of_g}."
            f"{' If G has one column per constraint, pass G.T.' if of_g[-1:] == (t,) else ''}"
        )
    of_w = (d,) if w is None else tuple(w.shape)
    if of_w[-1:] != (d,):
        raise ValueError(f"metric must have the shape of g, {of_g}, or ({d},); found {of_w}.")
    shared = not lead and len(batch) > 0 and len(of_w) == 1
    if not shared and (lead != batch or (w is not None and of_w[:-1] != batch)):
        try:
            batch = np.broadcast_shapes(lead, batch, of_w[:-1])
        except ValueError:
            raise ValueError(
                f"The leading dimensions of G {of_G}, g {of_g}"
                f"{'' if w is None else f' and metric {of_w}'} do not broadcast. "
                "G needs shape (..., t, d), g and metric (..., d)."
            ) from None
        G, g = xp.broadcast_to(G, (*batch, t, d)), xp.broadcast_to(g, (*batch, d))
        w = None if w is None else xp.broadcast_to(w, (*batch, d))
    return Problem(xp, device, batch, t, [G], [g], None if w is None else [w], None, shared)


def _refuse_block(problem: Problem, k: int) -> None:
    """Raise an error for block k, whose shapes do not fit together."""
    G, g, weight, keys = problem.rows[k], problem.vector[k], problem.weight, problem.keys
    where = f"[{k if keys in (list, tuple) else keys[k]!r}]"
    if G.ndim < 1 or G.shape[0] != problem.t:
        raise ValueError(
            f"Every block of G needs one leading entry per constraint: G{where} has shape {tuple(G.shape)}, "
            f"but the first block has {problem.t} constraints."
        )
    if G.shape[1:] != g.shape:
        raise ValueError(
            f"g{where} must have shape {tuple(G.shape[1:])} to go with G{where} of shape {tuple(G.shape)}; "
            f"found {tuple(g.shape)}."
        )
    if weight is not None:
        raise ValueError(
            f"metric{where} must have the shape of g{where}, {tuple(g.shape)}; "
            f"found {tuple(weight[k].shape)}."
        )


def check_out(out: Blocks, problem: Problem) -> list[Array]:
    """Return the blocks of `out`; raise if x cannot be written to them."""
    blocks, _ = as_blocks(out, "out", like=(problem.keys, len(problem.vector)))
    if namespace(*blocks) is not problem.xp:
        raise TypeError(
            f"out must be of the library of g, {type(problem.vector[0]).__name__}; "
            f"found {type(blocks[0]).__name__}."
        )
    if len({id(o) for o in blocks}) < len(blocks):
        raise ValueError("out has one array for several blocks; pass one array per block.")
    for k, (o, g) in enumerate(zip(blocks, problem.vector, strict=True)):
        where = "" if len(blocks) == 1 else f"[{k}]"
        if o.shape != g.shape or o.dtype != g.dtype:
            raise ValueError(
                f"out{where} must have the shape and dtype of g{where}, {tuple(g.shape)} {g.dtype}; "
                f"found {tuple(o.shape)} {o.dtype}."
            )
        if _overlaps(o):
            raise ValueError(f"out{where} has entries that share memory; pass an array without overlaps.")
        if isinstance(o, np.ndarray):
            if not o.flags.writeable:
                raise ValueError(f"out{where} is read-only; pass an array that can be written.")
        elif device_of(o) != problem.device:
            raise ValueError(f"out is on device {device_of(o)} but g is on {problem.device}.")
        elif problem.is_torch and o.requires_grad and problem.xp.is_grad_enabled():
            raise ValueError(f"out{where} requires a gradient and cannot be written; pass out{where}.data.")
        elif problem.is_torch and o.is_inference() and not problem.xp.is_inference_mode_enabled():
            raise ValueError(f"out{where} was made in inference mode and cannot be written outside of it.")
    return [detach(a) for a in blocks]


def _overlaps(a: Array) -> bool:
    """Return whether entries share memory: a stride is zero, or the array spans less memory than it needs."""
    if isinstance(a, np.ndarray):
        whole, strides, one = a.flags.c_contiguous, a.strides, a.itemsize
    elif is_torch(a):
        whole, strides, one = a.is_contiguous(), a.stride(), 1
    else:
        return False
    if whole:
        return False
    steps = [(n, abs(step)) for n, step in zip(a.shape, strides, strict=True)]
    extent = one + sum((n - 1) * step for n, step in steps)
    still = any(n > 1 and step == 0 for n, step in steps)
    return 0 not in a.shape and (still or extent < one * math.prod(a.shape))


def as_blocks(a: Blocks, name: str, like: tuple[Any, int] | None = None) -> tuple[list[Array], Any]:
    """Return the checked blocks of an argument, and its keys.

    `like` holds the keys and the number of blocks of G; the argument must fit them.
    """
    # A single array, the usual case, skips the slower checks of sequences and mappings.
    plain = type(a) is np.ndarray or is_torch(a)
    if plain and is_real_floating(a) and (like is None or like[0] is None):
        return [a], None
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
    # Only one block per type and one per dtype is checked, because models have hundreds of blocks.
    for block in _one_of_each(type, blocks):
        refuse_masked(block, name)
        if not is_array(block):
            listed = isinstance(block, (list, tuple)) or hasattr(block, "__array__")
            hint = "; convert it, for example with numpy.asarray" if listed else ""
            raise TypeError(
                f"{name} must be an array (NumPy, torch, CuPy, ...), or a sequence or mapping of arrays; "
                f"found {'blocks of type ' if keys is not None else ''}{type(block).__name__}{hint}."
            )
    if like is not None and _kind(keys) != _kind(like[0]):
        stack = " If G is a list of rows, stack them." if keys is None and like[0] in (list, tuple) else ""
        raise TypeError(f"{name} must be {_kind(like[0])}, as G is; found {_kind(keys)}.{stack}")
    if like is not None and len(blocks) != like[1]:
        raise ValueError(f"{name} has {len(blocks)} blocks but G has {like[1]}.")
    for block in _one_of_each(attrgetter("dtype"), blocks):
        if not is_real_floating(block):
            raise TypeError(
                f"{name} must have a real floating-point dtype; found {block.dtype}. Convert it first."
            )
    return blocks, keys


def _one_of_each(kind: Callable[[Any], Any], blocks: list[Any]) -> list[Any]:
    kinds = list(map(kind, blocks))
    return [blocks[kinds.index(k)] for k in dict.fromkeys(kinds)]


def _kind(keys: Any) -> str:
    if keys is None:
        return "one array"
    return "a sequence of arrays" if keys in (list, tuple) else "a mapping of arrays"


def blocks_of(a: Blocks) -> Sequence[Any]:
    """Return the arrays of an argument that has not been checked yet."""
    if isinstance(a, (list, tuple)):
        return a
    # Arrays are tested first, because `isinstance(a, Mapping)` is slow.
    return [a] if hasattr(a, "dtype") or not isinstance(a, Mapping) else list(a.values())
