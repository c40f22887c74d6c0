"""States in safetensors files: any nesting of dicts, lists and tuples of tensors and plain values."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

_STRUCTURE = "gemproj"  # the key, in the metadata of a file, of the nesting as JSON


def save_state(state: Any, path: str | os.PathLike[str]) -> None:
    """Write a state to a safetensors file: tensors by where they are, and the nesting as metadata.

    Parameters
    ----------
    state : nesting of dict, list and tuple
        Of tensors, strings, numbers, booleans and None. Tensors may be views and share memory.
    path : path
        The file to write.

    Raises
    ------
    ImportError
        Without the package safetensors.
    TypeError
        For anything else in the state, and for dtypes that the format does not have.
    """
    safetensors = _safetensors()
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_encode(state, "state", tensors))
    try:
        safetensors.torch.save_file(tensors, path, {_STRUCTURE: structure})
    except KeyError as error:
        raise TypeError(f"safetensors files cannot hold tensors of {error}.") from None
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {os.fspath(path)!r}: {error}") from None


def load_state(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Any:
    """Return what `save_state` wrote, with its tensors on `device`.

    Raises
    ------
    ImportError
        Without the package safetensors.
    ValueError
        For a file that `save_state` has not written, or that is damaged.
    """
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
            structure = (file.metadata() or {})[_STRUCTURE]
            return _decode(json.loads(structure), file)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{os.fspath(path)!r} is not a whole safetensors file: {error}") from None
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{os.fspath(path)!r} holds tensors, but no state that gemproj has saved.") from None


def _encode(node: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a node as JSON; its tensors go to `tensors`, named by the expression that finds them."""
    if isinstance(node, torch.Tensor):
        # A copy of its own: the format refuses views with gaps, and tensors that share memory.
        tensors[where] = node.detach().clone(memory_format=torch.contiguous_format)
        return {"tensor": where}
    if node is None or isinstance(node, (str, int, float)):
        return node
    if type(node) is dict:
        # Pairs, because keys of a JSON object are strings.
        return {
            "dict": [
                [_encode(key, f"a key of {where}", {}), _encode(value, f"{where}[{key!r}]", tensors)]
                for key, value in node.items()
            ]
        }
    if type(node) in (list, tuple):
        return {type(node).__name__: [_encode(v, f"{where}[{k}]", tensors) for k, v in enumerate(node)]}
    raise TypeError(
        f"A state is saved if made of dicts, lists, tuples, tensors, strings and numbers; "
        f"{where} is {type(node).__name__}."
    )


def _decode(node: Any, file: Any) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return file.get_tensor(content)
    if kind == "dict":
        return {_decode(key, file): _decode(value, file) for key, value in content}
    return {"list": list, "tuple": tuple}[kind](_decode(item, file) for item in content)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("Saving to a file needs safetensors: pip install 'safetensors>=0.4'.") from error
    return safetensors
