"""`Problem`: the checked G, g and metric of one call, with their library, device and shapes.

Each argument is one array, or a sequence or mapping with one array (block) per parameter of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_
from typing import Any

import numpy as np

from gemproj._arrays import (
    Array,
    Blocks,
    detached,
    device_of,
    from_numpy,
    is_array,
    is_real_floating,
    is_torch,
    may_overlap,
    namespace,
    on_host,
    refuse_transformed,
    to_numpy,
    wide_dtype,
)
from gemproj._checks import check_array
from gemproj._warn import warn

_SHAPE, _SIZE, _DTYPE = attrgetter("shape"), attrgetter("size"), attrgetter("dtype")
_KINDS: tuple[Callable[[Any], Any], ...] = (type, _DTYPE)


@dataclass(eq=False)
class Problem:
    """One projection problem, or a batch of independent problems.

    Attributes
    ----------
    xp : module
        Array API namespace of all arrays.
    device : device
    batch : tuple of int
        Leading dimensions; of blocks only g has them.
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
    is_torch: bool = field(init=False)
    sizes: list[int] = field(init=False)
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.host, lead = on_host(self.device), len(self.batch)
        self.is_torch = self.xp.__name__.endswith("torch")
        if lead:
            self.sizes = [math.prod(v.shape[lead:]) for v in self.vector]
        else:  # torch takes long to make shapes
            count = self.xp.Tensor.numel if self.is_torch else _SIZE
            self.sizes = list(map(count, self.vector))
        self.columns = sum(self.sizes)

    @property
    def wide(self) -> Any:
        """The dtype of t-space: float64, or float32 on a device that has no float64."""
        return wide_dtype(self.xp, self.device)

    @property
    def like(self) -> tuple[tuple[int, ...], Any, Any]:
        """Shape (..., t), library and device of arguments with one number per constraint."""
        return (*self.batch, self.t), self.xp, self.device

    def without_autocast(self) -> AbstractContextManager[Any]:
        """Return a context that disables `torch.autocast`, so that products and sums keep their dtype."""
        return self.xp.autocast(self.device.type, enabled=False) if self.is_torch else nullcontext()

    def at(self, i: tuple[int, ...]) -> Problem:
        """Return problem i of the batch, as views."""
        vector, rows, weight = [a[(*i, ...)] for a in self.vector], self.rows, self.weight
        if not self.shared:
            rows = [a[(*i, ...)] for a in rows]
            weight = None if weight is None else [a[(*i, ...)] for a in weight]
        return replace(self, batch=(), rows=rows, vector=vector, weight=weight, shared=False)

    def to_caller(self, a: Array) -> Array:
        """Convert an array of t-space (a NumPy array on the CPU) to the library of G and g."""
        return from_numpy(a, self.xp, self.device)

    def to_host(self, a: Array) -> Array:
        """Convert an array of the library of G and g to an array of t-space (a NumPy array on the CPU)."""
        return to_numpy(a) if self.host else a


def check_problem(G: Blocks, g: Blocks, metric: Blocks | None = None, *, values: bool = True) -> Problem:
    """Return `G`, `g` and `metric` as one `Problem`; raise if they are invalid or do not fit together.

    Without `values` only types and shapes are checked, because torch.func does not allow reading values.
    """
    rows, keys = as_blocks(G, "G")
    vector, of_g = as_blocks(g, "g", (keys, rows))
    weight = None if metric is None else as_blocks(metric, "metric", (keys, rows))[0]
    if isinstance(keys, list) and (order := list(g)) != keys:  # x follows the key order of g
        rows, vector, keys = [G[k] for k in order], [g[k] for k in order], order
        weight = None if metric is None else [metric[k] for k in order]
    keys = keys if isinstance(keys, list) else of_g  # x is a list or a tuple, as g is
    n, arrays = len(rows), [*rows, *vector, *(weight or ())]
    if keys is not None and not all(map(is_, rows, vector)) and _alike(rows, vector):
        warn(
            f"All blocks of G and g have equal shapes, so g counts as {rows[0].shape[0]} gradients. If G is "
            "one row, give it a leading axis of size 1: [b[None] for b in G].",
            RuntimeWarning,
        )
    xp, device = namespace(*arrays), device_of(vector[0])
    if type(vector[0]) is not np.ndarray:
        cpu = is_torch(vector[0]) and device.type == "cpu"  # half the time of comparing devices
        here = [a.is_cpu if cpu else device_of(a) == device for a in arrays]
        if not all(here):
            k = here.index(False)
            raise ValueError(
                f"{('G', 'g', 'metric')[k // n]} is on device {device_of(arrays[k])} but g is on {device}; "
                "use one device for all arrays."
            )
        refuse_transformed(arrays, values)
        arrays = detached(arrays)
        rows, vector, weight = arrays[:n], arrays[n : 2 * n], arrays[2 * n :] or None
    if weight is not None and values and on_host(device):
        for w in weight:  # reductions allocate nothing and propagate NaN
            if math.prod(w.shape) and not (float(xp.min(w)) > 0.0 and float(xp.max(w)) < math.inf):
                raise ValueError("metric must be positive and finite everywhere; found an entry that is not.")
    if keys is None:
        return _arrays_problem(xp, device, rows[0], vector[0], None if weight is None else weight[0])
    return _blocks_problem(xp, device, rows, vector, weight, keys)


def _blocks_problem(
    xp: Any, device: Any, rows: list[Array], vector: list[Array], weight: list[Array] | None, keys: Any
) -> Problem:
    """Return the problem of blocks G[k] (t, *shape_k), g[k] (*shape_k) or (*batch, *shape_k), metric[k]."""
    t = rows[0].shape[0] if rows[0].ndim else 0
    lead = max(0, 1 + vector[0].ndim - rows[0].ndim)
    batch = tuple(vector[0].shape[:lead])
    arguments = {"G": rows, "g": vector} | ({} if weight is None else {"metric": weight})
    shapes = list(zip(*(map(_SHAPE, blocks) for blocks in arguments.values()), strict=True))
    for found in dict.fromkeys(shapes):  # hundreds of blocks have a few shapes
        own = tuple(found[1][lead:])
        if found[:2] != ((t, *own), (*batch, *own)) or found[2:] not in ((), (own,)):
            k = shapes.index(found)
            here = ", ".join(
                f"{_at(name, keys, k)} has shape {tuple(shape)}"
                for name, shape in zip(arguments, found, strict=True)
            )
            raise ValueError(
                "Blocks must have the shapes (t, *shape) in G, (*shape) in g and metric, or (m, *shape) in g "
                f"for m gradients, with the t and m of the first block in all blocks, here t = {t}"
                f"{f' and m = {batch[0]}' if lead else ''}; {here}."
                f"{' For one row, G needs a leading axis of size 1.' if found[0] == found[1] else ''}"
            )
    return Problem(xp, device, batch, t, rows, vector, weight, keys, shared=lead > 0)


def _arrays_problem(xp: Any, device: Any, G: Array, g: Array, w: Array | None) -> Problem:
    """Return the problem of arrays G (..., t, d), g (..., d) and metric (..., d), broadcast to one batch."""
    of_G, of_g = tuple(G.shape), tuple(g.shape)
    if len(of_G) < 2:
        raise ValueError(
            f"G must have shape (..., t, d), one row per constraint; found {of_G}. For one row, pass G[None]."
            f"{' G and g seem to be exchanged.' if len(of_g) > 1 else ''}"
        )
    lead, batch, (t, d) = of_G[:-2], of_g[:-1], of_G[-2:]
    if of_g[-1:] != (d,):
        column = of_g[1:] == (1,)
        turned = (of_g[:1] if column else of_g[-1:]) == (t,)
        raise ValueError(
            f"g must have shape {(*lead, d)} or (..., {d}) to go with G of shape {of_G}; found {of_g}."
            f"{' If G has one column per constraint, pass G.T.' if turned else ''}"
            f"{' If g is a column, pass g[:, 0].' if column else ''}"
        )
    of_w = (d,) if w is None else tuple(w.shape)
    dense = of_w == (d, d) and not (lead or batch)
    if of_w[-1:] != (d,) or dense:
        raise ValueError(
            f"metric must have the shape of g, {of_g}; found {of_w}."
            f"{' For a dense W pass K = G W^-1 G.T to solve_gram: x = g + W^-1 G.T @ lam.' if dense else ''}"
        )
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


def check_out(out: Blocks, G: Blocks, problem: Problem) -> list[Array]:
    """Return the blocks of `out`; raise if x cannot be written to them."""
    blocks, _ = as_blocks(out, "out", (problem.keys, problem.vector))
    if namespace(*blocks) is not problem.xp:
        raise TypeError(
            f"out must be of the library of g, {type(problem.vector[0]).__name__}; "
            f"found {type(blocks[0]).__name__}."
        )
    given = set(map(id, blocks))
    if len(given) < len(blocks):
        raise ValueError("out has one array for several blocks; pass one array per block.")
    if not given.isdisjoint(map(id, blocks_of(G))):
        raise ValueError(
            "out is an array of G, which is read while x is written; pass a copy of it as G, or another out."
        )
    writes = problem.is_torch and problem.xp.is_grad_enabled()
    if _plain(blocks, problem, writes):  # the usual case, because models have hundreds of blocks
        return detached(blocks)
    for k, (o, g) in enumerate(zip(blocks, problem.vector, strict=True)):
        wrong = ""
        if o.shape != g.shape or o.dtype != g.dtype:
            wrong = (
                f"must have the shape and dtype of g, {tuple(g.shape)} {g.dtype}; "
                f"found {tuple(o.shape)} {o.dtype}"
            )
        elif may_overlap(o):
            wrong = "has entries that share memory, or strides that allow it; pass a contiguous array"
        elif isinstance(o, np.ndarray | np.generic) and not o.flags.writeable:
            wrong = "is read-only; pass an array that can be written"
        elif device_of(o) != problem.device:
            wrong = f"is on device {device_of(o)} but g is on {problem.device}"
        elif writes and o.requires_grad:
            wrong = "requires a gradient and cannot be written; pass its .data"
        elif problem.is_torch and o.is_inference() and not problem.xp.is_inference_mode_enabled():
            wrong = "was made in inference mode and cannot be written outside of it"
        if wrong:
            raise ValueError(f"{_at('out', problem.keys, k)} {wrong}.")
    return detached(blocks)


def _plain(out: list[Array], problem: Problem, writes: bool) -> bool:
    """Return whether all arrays can be written, like g, and are in row-major order; False if unknown."""
    for kind in () if all(map(is_, out, problem.vector)) else (_SHAPE, _DTYPE):
        if list(map(kind, out)) != list(map(kind, problem.vector)):
            return False
    if not problem.is_torch:
        return all(type(o) is np.ndarray and o.flags.carray for o in out)
    Tensor, devices = problem.xp.Tensor, {*map(attrgetter("device"), out)}
    if devices != {problem.device} or any(map(Tensor.is_inference, out)):
        return False
    return all(map(Tensor.is_contiguous, out)) and not (writes and any(map(attrgetter("requires_grad"), out)))


def as_blocks(a: Blocks, name: str, like: tuple[Any, list[Array]] | None = None) -> tuple[list[Array], Any]:
    """Return the checked blocks of an argument, and its keys.

    `like` holds the keys and the blocks of G; the argument must fit them.
    """
    # A single array, the usual case, skips the slower checks of sequences and mappings.
    plain = type(a) is np.ndarray or is_torch(a)
    if plain and is_real_floating(a) and (like is None or like[0] is None):
        return [a], None
    keys: Any
    if isinstance(a, (list, tuple)):
        keys, blocks = (tuple if isinstance(a, tuple) else list), list(a)
    elif isinstance(a, Mapping):
        keys = list(a.keys())
        if like is not None and isinstance(like[0], list):
            if odd := sorted(map(repr, set(keys) ^ set(like[0]))):
                raise ValueError(
                    f"{name} and G must have the same keys; only in one of them: {', '.join(odd)}."
                )
            keys = like[0]
        blocks = [a[k] for k in keys]
    else:
        keys, blocks = None, [a]
    if not blocks:
        none = " Without any constraint, g is its own projection." if name == "G" else ""
        raise ValueError(f"{name} has no blocks; pass at least one array.{none}")
    # Only one block per type and one per dtype is checked, because models have hundreds of blocks.
    for kind in _KINDS:
        kinds = list(map(kind, blocks))
        for k in map(kinds.index, dict.fromkeys(kinds)):
            _check_block(blocks[k], _at(name, keys, k), keys is not None)
    if like is None:
        return blocks, keys
    if _kind(keys) != _kind(like[0]):
        remedy = ""
        if keys is None:
            flat = f"Pass {name} in blocks, of the shapes of G[k][0], or flatten G, too"
            listed = all(row.shape == blocks[0].shape for row in like[1])
            remedy = f" {'If G is a list of rows, stack them' if listed else flat}."
        raise TypeError(f"{name} must be {_kind(like[0])}, as G is; found {_kind(keys)}.{remedy}")
    if len(blocks) != len(like[1]):
        raise ValueError(f"{name} has {len(blocks)} blocks but G has {len(like[1])}.")
    return blocks, keys


def _check_block(a: Any, name: str, one_of_many: bool) -> None:
    """Raise unless `a` is an array of real floating-point numbers."""
    if isinstance(a, (list, tuple)) and any(x is None or is_array(x) for x in a):
        for i, x in enumerate(a):
            _check_block(x, f"{name}[{i}]", one_of_many)
        library, whole = "torch" if is_torch(a[0]) else "np", name.partition("[")[0]
        raise TypeError(
            f"{name} is a {type(a).__name__} of arrays, such as the gradients of one task. {whole} needs one "
            f"block per parameter, with one row per task: rows = [{library}.stack(b) for b in zip(*{whole})]."
        )
    if a is None and name.startswith("out"):
        raise TypeError(f"{name} is None; pass an array to write to, such as torch.zeros_like(p) for p.grad.")
    if a is None:
        raise TypeError(
            f"{name} is None, which torch.autograd.grad returns for an unused parameter: call it with "
            "allow_unused=True, materialize_grads=True, or pass zeros."
        )
    must, remedy = "an array (NumPy, torch, CuPy, ...)", "Convert it first"
    if one_of_many:
        remedy += ", or leave it out, if it is no parameter but a counter of a state_dict"
    else:
        must += ", or a list, tuple or mapping of arrays"
    check_array(a, name, must, remedy)


def _alike(rows: list[Array], vector: list[Array]) -> bool:
    """Return whether blocks of g may be meant as one gradient, under one row without its leading axis."""
    same = all(a.shape == b.shape for a, b in zip(rows, vector, strict=True))
    return same and len({block.shape[:1] for block in rows}) == 1 and rows[0].shape[:1] not in ((), (1,))


def _kind(keys: Any) -> str:
    if keys is None:
        return "one array"
    return "a sequence of arrays" if keys in (list, tuple) else "a mapping of arrays"


def _at(name: str, keys: Any, k: int) -> str:
    """Return the name of block k of an argument."""
    return name if keys is None else f"{name}[{k if keys in (list, tuple) else keys[k]!r}]"


def blocks_of(a: Blocks) -> Sequence[Any]:
    """Return the arrays of an argument that has not been checked yet."""
    if isinstance(a, (list, tuple)):
        return a
    # Arrays are tested first, because `isinstance(a, Mapping)` is slow.
    return [a] if hasattr(a, "dtype") or not isinstance(a, Mapping) else list(a.values())
