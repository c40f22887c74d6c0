"""Functions that depend on the array library: namespace, device, dtype, and conversion to and from NumPy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import array_api_compat
import numpy as np

Array = Any  # an array of NumPy, PyTorch, CuPy or any library of the array API standard
Blocks = Array | Sequence[Array] | Mapping[Any, Array]

# Caches by type: computing these values takes longer than projecting a small gradient.
_NAMESPACES: dict[type, Any] = {}
_REAL_FLOATING: dict[Any, bool] = {}


def namespace(a: Array, *others: Array) -> Any:
    """Return the array API namespace of arrays; raise a TypeError if their libraries differ."""
    kind = type(a)
    if others and {*map(type, others)} != {kind}:  # no loop, because models have hundreds of blocks
        kinds = {type(a): a for a in (a, *others)}  # such as Tensor and Parameter
        try:
            return array_api_compat.array_namespace(*kinds.values())
        except TypeError:
            found = ", ".join(sorted(f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in kinds))
            raise TypeError(
                f"All arrays must come from one library; found {found}. Convert them to one."
            ) from None
    xp = _NAMESPACES.get(kind)
    if xp is None:
        xp = _NAMESPACES[kind] = array_api_compat.array_namespace(a)
    return xp


_NUMPY = namespace(np.empty(0))


def device_of(a: Array) -> Any:
    """Return the device of an array; "cpu" for a NumPy array."""
    if type(a) is np.ndarray:
        return "cpu"
    return a.device if is_torch(a) else array_api_compat.device(a)


def on_host(device: Any) -> bool:
    """Return whether `device` is the CPU, where reading a value needs no synchronisation."""
    kind = device if isinstance(device, str) else getattr(device, "type", None)
    return kind == "cpu" if kind is not None else "CPU_DEVICE" in str(device)


def wide_dtype(xp: Any, device: Any) -> Any:
    """Return float64, or float32 on a device without float64 (Apple's MPS)."""
    return xp.float32 if getattr(device, "type", None) == "mps" else xp.float64


def is_array(a: Any) -> bool:
    """Return whether `a` is an array of a library with mutable arrays that array-api-compat supports.

    A NumPy masked array is none, because the projection would ignore its mask.
    """
    if type(a) is np.ndarray:
        return True
    if array_api_compat.is_jax_array(a) or array_api_compat.is_ndonnx_array(a):
        return False
    return array_api_compat.is_array_api_obj(a) and not isinstance(a, np.ma.MaskedArray)


def is_real_floating(a: Array) -> bool:
    """Return whether an array has a real floating-point dtype."""
    key = (type(a), a.dtype)
    found = _REAL_FLOATING.get(key)
    if found is None:
        xp = namespace(a)
        try:  # float8 is excluded, because libraries have no arithmetic for it
            floating = xp.isdtype(a.dtype, "real floating") and xp.finfo(a.dtype).bits >= 16
        except TypeError:  # a dtype that another package has added to NumPy
            floating = False
        found = _REAL_FLOATING[key] = bool(floating)
    return found


def is_torch(a: Any) -> bool:
    """Return whether `a` is a torch tensor."""
    return isinstance(a, getattr(sys.modules.get("torch"), "Tensor", ()))


def detached(arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays detached from autograd."""
    return [a.detach() if a.requires_grad else a for a in arrays] if is_torch(arrays[0]) else list(arrays)


def refuse_transformed(arrays: Sequence[Array], values: bool = True) -> None:
    """Raise for distributed tensors; with `values`, also for those without: sparse, in `torch.func`, ..."""
    if not is_torch(arrays[0]):
        return
    torch = sys.modules["torch"]
    kinds = {*map(type, arrays)} - {torch.Tensor}
    if kinds and any(hasattr(kind, "device_mesh") for kind in kinds):
        raise TypeError(
            "Tensors must be local; found a DTensor. A Keeper projects sharded gradients. Else sum "
            "`gram` of to_local() over the processes, call `solve_gram`, and `combine` shards."
        )
    if not values:
        return
    try:  # no public function tells whether tensors are sparse or wrapped by torch.func and have no memory
        for a in arrays:
            a.data_ptr()
        dense = not (arrays[0].is_nested or arrays[0].is_meta)
    except RuntimeError as error:
        dense = not any(a.layout is not torch.strided for a in arrays)
        if dense:
            raise TypeError(
                "Only gemproj.project supports torch.func transforms (vmap, grad, ...). To solve many "
                "problems with this function, pass arrays with leading dimensions."
            ) from error
    if not dense:
        raise TypeError("Tensors must be dense; found a sparse, nested or meta tensor.")


def is_recording() -> bool:
    """Return whether `make_fx` records the operations on tensors; it also overrides torch functions then."""
    mode = getattr(sys.modules.get("torch.fx.experimental.proxy_tensor"), "get_proxy_mode", None)
    return mode is not None and mode() is not None


def is_row_major(a: Array) -> bool:
    """Return whether the entries are adjacent, in row-major order, at aligned addresses; False if unknown."""
    if isinstance(a, np.ndarray):
        return (flags := a.flags).c_contiguous and flags.aligned
    return bool(a.is_contiguous() if is_torch(a) else hasattr(a, "flags") and a.flags.c_contiguous)


def may_overlap(a: Array) -> bool:
    """Return whether entries may share memory: a stride is shorter than what the smaller strides cover.

    This is also true for a few arrays without shared memory, for example with shape (2, 3), strides (3, 2).
    """
    tensor = is_torch(a)
    if not (tensor or isinstance(a, np.ndarray)) or is_row_major(a) or 0 in a.shape:
        return False
    strides, covered = (a.stride(), 1) if tensor else (a.strides, a.itemsize)
    for step, n in sorted((abs(step), n) for step, n in zip(strides, a.shape, strict=True) if n > 1):
        if step < covered:
            return True
        covered += (n - 1) * step
    return False


def empty_as(arrays: Sequence[Array]) -> list[Array]:
    """Return uninitialised arrays of the shapes, dtypes and devices of `arrays`, in row-major order.

    By default `empty_like` keeps the memory order of an array, even if column-major.
    """
    xp = namespace(*arrays)
    if xp is _NUMPY:
        return [np.empty(a.shape, a.dtype) for a in arrays]
    if not is_torch(arrays[0]):
        return [xp.empty(a.shape, dtype=a.dtype, device=device_of(a)) for a in arrays]
    torch = sys.modules["torch"]
    if all(map(torch.Tensor.is_contiguous, arrays)):  # no loop, because models have hundreds of blocks
        return list(map(torch.empty_like, arrays))
    return [torch.empty_like(a, memory_format=torch.contiguous_format) for a in arrays]


def note_written(arrays: Sequence[Array]) -> None:
    """Increment the version counters of tensors written outside of autograd, so that autograd notices."""
    if is_torch(arrays[0]):
        sys.modules["torch"].autograd.graph.increment_version(arrays)


def to_numpy(a: Array) -> np.ndarray:
    """Return an array as a NumPy array: a view on the CPU, a synchronising copy from a device.

    NumPy has no bfloat16; float32 holds its numbers.
    """
    if isinstance(a, np.ndarray):
        return a
    if is_torch(a):
        a = a.detach().resolve_neg().cpu()
        return (a.float() if a.dtype == sys.modules["torch"].bfloat16 else a).numpy()
    return a.get() if array_api_compat.is_cupy_array(a) else np.asarray(a)


def from_numpy(a: Any, xp: Any, device: Any) -> Array:
    """Convert a NumPy array to an array of the library `xp` on `device`, without a copy if possible.

    Arrays of other libraries, numbers and None are returned unchanged.
    """
    if xp is _NUMPY or not isinstance(a, np.ndarray | np.generic):
        return a
    if a.dtype == np.float64 and wide_dtype(xp, device) is not xp.float64:
        a = a.astype(np.float32)
    if xp.__name__.endswith("torch"):
        if not np.ndim(a):
            return xp.tensor(a, device=device)
        # CUDA reads pageable memory before this call returns, so the copy on the device may finish later.
        ahead = getattr(device, "type", None) == "cuda"
        a = np.ascontiguousarray(a) if a.flags.writeable else np.array(a)  # torch has no read-only tensors
        return xp.from_numpy(a).to(device, non_blocking=ahead)
    return xp.asarray(a, device=device)
