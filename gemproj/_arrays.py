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
_IS_TORCH: dict[type, bool] = {}


def namespace(a: Array, *others: Array) -> Any:
    """Return the array API namespace of arrays; raise a TypeError if their libraries differ."""
    kind = type(a)
    for other in others:
        if type(other) is not kind:
            return _common_namespace(a, *others)
    xp = _NAMESPACES.get(kind)
    if xp is None:
        xp = _NAMESPACES[kind] = array_api_compat.array_namespace(a)
    return xp


def _common_namespace(*arrays: Array) -> Any:
    """Return the namespace of arrays of several types, such as Tensor and Parameter."""
    try:
        return array_api_compat.array_namespace(*arrays)
    except TypeError:
        found = sorted({f"{type(a).__module__.split('.')[0]}.{type(a).__name__}" for a in arrays})
        raise TypeError(f"All arrays must come from one library; found {', '.join(found)}.") from None


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
    found = _IS_TORCH.get(type(a))
    if found is None:
        found = _IS_TORCH[type(a)] = array_api_compat.is_torch_array(a)
    return found


def detach(a: Array) -> Array:
    """Return the array detached from autograd; the array itself if it requires no gradient."""
    return a.detach() if is_torch(a) and a.requires_grad else a


def refuse_transformed(arrays: Sequence[Array]) -> None:
    """Raise for sparse, nested, meta and distributed tensors, and for tensors inside `torch.func`."""
    if is_torch(arrays[0]):
        first, torch = arrays[0], sys.modules["torch"]
        if first.is_nested or first.is_meta or any(a.layout is not torch.strided for a in arrays):
            raise TypeError("Tensors must be dense; found a sparse, nested or meta tensor.")
        if any(type(a) is not torch.Tensor and hasattr(a, "device_mesh") for a in arrays):
            raise TypeError(
                "Tensors must be local; found a DTensor. Use gemproj.torch.GradientProjector for sharded "
                "parameters, or pass their to_local() to gemproj.torch.distributed.project."
            )
        functorch = torch._C._functorch
        if functorch.peek_interpreter_stack() is not None and any(
            map(functorch.is_functorch_wrapped_tensor, arrays)
        ):
            raise TypeError(
                "Only gemproj.project supports torch.func transforms (vmap, grad, ...). To solve many "
                "problems with this function, pass arrays with leading dimensions."
            )


def empty_as(a: Array) -> Array:
    """Return an uninitialised array of the shape, dtype and device of `a`, in row-major order.

    By default `empty_like` keeps the memory order of `a`, even if column-major.
    """
    if type(a) is np.ndarray:
        return np.empty(a.shape, a.dtype)
    if is_torch(a):
        torch = sys.modules["torch"]
        return torch.empty_like(a, memory_format=torch.contiguous_format)
    return namespace(a).empty(a.shape, dtype=a.dtype, device=device_of(a))


def note_written(arrays: Sequence[Array]) -> None:
    """Increment the version counters of tensors written outside of autograd, so that autograd notices."""
    if is_torch(arrays[0]):
        note = sys.modules["torch"].autograd.graph.increment_version
        for a in arrays:
            if not a.is_inference():
                note(a)


def to_numpy(a: Array) -> np.ndarray:
    """Return an array as a NumPy array: a view on the CPU, a synchronising copy from a device."""
    if isinstance(a, np.ndarray):
        return a
    if is_torch(a):
        return a.detach().resolve_neg().cpu().numpy()
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
