"""`Problem`: the checked G, g and metric of one call, with their library, device and shapes."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any

import numpy as np

from gemproj._arrays import (
    DTYPE,
    REQUIRES_GRAD,
    SHAPE,
    Array,
    Blocks,
    all_on,
    common_namespace,
    detach_all,
    device_of,
    from_numpy,
    on_host,
    refuse_transformed,
    to_numpy,
    wide_dtype,
)
from gemproj._blocks import as_blocks
from gemproj._checks import shape


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
        Blocks of G, shapes ``(*batch, t, *shape_k)``; without `batch` where `shared`.
    vector : list of array
        Blocks of g, shapes ``(*batch, *shape_k)``.
    weight : list of array or None
        Blocks of the metric, shaped like the blocks of g; without `batch` where `shared`.
    keys : None, type or list
        None where g is one array, the type of a sequence, or the keys of a mapping.
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
    shapes: list[tuple[int, ...]] = field(init=False)
    sizes: list[int] = field(init=False)
    columns: int = field(init=False)

    def __post_init__(self) -> None:
        self.host, lead = on_host(self.device), len(self.batch)
        self.shapes = [v.shape for v in self.vector]
        # A torch.Size is sliced only if there is a batch, because slicing it is slow.
        self.sizes = [math.prod(of_block[lead:] if lead else of_block) for of_block in self.shapes]
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
        """Return an array of t-space (a NumPy array on the CPU) as an array of the library of G and g."""
        return from_numpy(a, self.xp, self.device)

    def to_host(self, a: Array) -> Array:
        """Return an array of the library of G and g as an array of t-space (a NumPy array on the CPU)."""
        return to_numpy(a) if self.host and a is not None else a

    def empty(self) -> list[Array]:
        """Return uninitialised blocks for x."""
        # Not empty_like, which would copy the zero strides of a broadcast g.
        return [self.xp.empty(tuple(v.shape), dtype=v.dtype, device=self.device) for v in self.vector]

    def pack(self, arrays: list[Array]) -> Any:
        """Return blocks in a container like that of g: an array, a sequence or a mapping."""
        if self.keys is None:
            return arrays[0]
        if self.keys in (list, tuple):
            return self.keys(arrays)
        return dict(zip(self.keys, arrays, strict=True))


def check_problem(G: Blocks, g: Blocks, metric: Blocks | None = None, *, values: bool = True) -> Problem:
    """Return `G`, `g` and `metric` as one `Problem`; raise if they are invalid or do not fit together.

    Without `values` only types and shapes are checked, because tensors of torch.func have no readable values.
    """
    rows, keys = as_blocks(G, "G")
    vector, keys = as_blocks(g, "g", like=(keys, len(rows)))
    weight = None if metric is None else as_blocks(metric, "metric", like=(keys, len(rows)))[0]
    n, arrays = len(rows), [*rows, *vector, *(weight or ())]
    xp, device = common_namespace(arrays), device_of(vector[0])
    if type(vector[0]) is not np.ndarray:
        if not all_on(device, arrays):
            k, found = next((k, found) for k, found in enumerate(map(device_of, arrays)) if found != device)
            name = ("G", "g", "metric")[k // n]
            raise ValueError(f"{name} is on device {found} but g is on {device}; use one for all arrays.")
        if values:
            refuse_transformed(arrays)
        detach_all(arrays)
        rows, vector, weight = arrays[:n], arrays[n : 2 * n], arrays[2 * n :] or None
    if weight is not None and values and on_host(device):
        for w in weight:
            if not bool(xp.all((w > 0) & xp.isfinite(w))):
                raise ValueError("metric must be positive and finite everywhere; found an entry that is not.")
    if keys is None:
        return _arrays_problem(xp, device, rows[0], vector[0], None if weight is None else weight[0])
    return _blocks_problem(xp, device, rows, vector, weight, keys)


def _arrays_problem(xp: Any, device: Any, G: Array, g: Array, w: Array | None) -> Problem:
    """Return the problem of arrays G (..., t, d), g (..., d) and metric (..., d); broadcasts the batch."""
    of_G, of_g = shape(G), shape(g)
    if len(of_G) < 2:
        raise ValueError(f"G must have shape (..., t, d), one row per constraint; found {of_G}.")
    lead, batch, (t, d) = of_G[:-2], of_g[:-1], of_G[-2:]
    if of_g[-1:] != (d,):
        raise ValueError(
            f"g must have shape {(*lead, d)} or (..., {d}) to go with G of shape {of_G}; found {of_g}."
            f"{' If G has one column per constraint, pass G.T.' if of_g[-1:] == (t,) else ''}"
        )
    if w is not None and (w.ndim < 1 or w.shape[-1] != d):
        raise ValueError(f"metric must have the shape of g, {of_g}, or ({d},); found {shape(w)}.")
    if not lead and batch and (w is None or w.ndim == 1):
        weight = None if w is None else [w]
        return Problem(xp, device, batch, t, [G], [g], weight, None, shared=True)
    if lead != batch or (w is not None and tuple(w.shape[:-1]) != batch):
        try:
            found = [lead, batch] if w is None else [lead, batch, tuple(w.shape[:-1])]
            batch = np.broadcast_shapes(*found)
        except ValueError:
            raise ValueError(
                f"The leading dimensions of G {of_G}, g {of_g}"
                f"{'' if w is None else f' and metric {shape(w)}'} do not broadcast. "
                "G needs shape (..., t, d), g and metric (..., d)."
            ) from None
        G, g = xp.broadcast_to(G, (*batch, t, d)), xp.broadcast_to(g, (*batch, d))
        w = None if w is None else xp.broadcast_to(w, (*batch, d))
    return Problem(xp, device, batch, t, [G], [g], None if w is None else [w], None)


def _blocks_problem(
    xp: Any, device: Any, rows: list[Array], vector: list[Array], weight: list[Array] | None, keys: Any
) -> Problem:
    """Return the problem of blocks G[k] (t, *shape_k) and g[k] (*shape_k); raise if shapes do not fit."""
    if rows[0].ndim < 1:
        raise ValueError("Blocks of G must have shape (t, *shape_k), one entry per constraint; found ().")
    problem = Problem(xp, device, (), rows[0].shape[0], rows, vector, weight, keys)
    alike = list(map(SHAPE, rows)) == [(problem.t, *of_g) for of_g in problem.shapes]
    if not alike or (weight is not None and list(map(SHAPE, weight)) != problem.shapes):
        _find_odd_block(problem)
    return problem


def _find_odd_block(problem: Problem) -> None:
    """Raise for the first block whose shape does not fit."""
    t, weight, keys = problem.t, problem.weight, problem.keys
    for k, (G_k, g_k) in enumerate(zip(problem.rows, problem.vector, strict=True)):
        where = f"[{k if keys in (list, tuple) else keys[k]!r}]"
        if G_k.ndim < 1 or G_k.shape[0] != t:
            raise ValueError(
                f"Every block of G needs one leading entry per constraint: G{where} has shape {shape(G_k)}, "
                f"but the first block has {t} constraints."
            )
        expected = tuple(G_k.shape[1:])
        if tuple(g_k.shape) != expected:
            raise ValueError(
                f"g{where} must have shape {expected} to go with G{where} of shape {shape(G_k)}; "
                f"found {shape(g_k)}."
            )
        if weight is not None and tuple(weight[k].shape) != expected:
            raise ValueError(
                f"metric{where} must have the shape of g{where}, {expected}; found {shape(weight[k])}."
            )


def check_out(out: Blocks, problem: Problem) -> list[Array]:
    """Return the blocks of `out`; raise if x cannot be written to them."""
    blocks, _ = as_blocks(out, "out", like=(problem.keys, len(problem.vector)))
    if common_namespace(blocks) is not problem.xp:
        raise TypeError(
            f"out must be of the library of g, {type(problem.vector[0]).__name__}; "
            f"found {type(blocks[0]).__name__}."
        )
    if len(blocks) == 1 or not (problem.is_torch and _alike(blocks, problem)):
        for k, (o, g) in enumerate(zip(blocks, problem.vector, strict=True)):
            _check_block("" if len(blocks) == 1 else f"[{k}]", o, g, problem)
    detach_all(blocks)
    return blocks


def _alike(blocks: list[Array], problem: Problem) -> bool:
    """Return whether the tensors of `out` pass one fast check, so that no check per block is needed."""
    vector = problem.vector
    if all(map(is_, blocks, vector)):
        return True
    same = list(map(SHAPE, blocks)) == problem.shapes and list(map(DTYPE, blocks)) == list(map(DTYPE, vector))
    return same and all_on(problem.device, blocks) and not any(map(REQUIRES_GRAD, blocks))


def _check_block(where: str, o: Array, g: Array, problem: Problem) -> None:
    if o.shape != g.shape or o.dtype != g.dtype:
        raise ValueError(
            f"out{where} must have the shape and dtype of g{where}, {shape(g)} {g.dtype}; "
            f"found {shape(o)} {o.dtype}."
        )
    if isinstance(o, np.ndarray):
        if not o.flags.writeable:
            raise ValueError(f"out{where} is read-only; pass an array that can be written.")
    elif device_of(o) != problem.device:
        raise ValueError(f"out is on device {device_of(o)} but g is on {problem.device}.")
    elif problem.is_torch and o.requires_grad and problem.xp.is_grad_enabled():
        raise ValueError(f"out{where} requires a gradient and cannot be written; pass out{where}.data.")
    elif problem.is_torch and o.is_inference() and not problem.xp.is_inference_mode_enabled():
        raise ValueError(f"out{where} was made in inference mode and cannot be written outside of it.")
