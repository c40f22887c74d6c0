"""Strings that stand for methods: the arguments of a torch operator are tensors, numbers and strings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from gemproj.methods import METHODS, Method

_methods: dict[str, Any] = {}
_NAMED = {str, *(type(method) for method in METHODS.values())}


def method_named(name: str) -> Any:
    """Return the method that a string stands for."""
    return _methods[name]


def name_of(method: Any) -> str:
    """Return the string that stands for a method."""
    if torch.compiler.is_compiling() and isinstance(method, Method):
        # torch.compile knows of an object that the compiled function makes only its class and fields.
        names = _fields(type(method))
        if names is not None:
            values = {name: getattr(method, name) for name in names}
            if all(type(value) in (bool, int, float, str, type(None)) for value in values.values()):
                return _named_anew(type(method), **values)
    return _named(method)


@torch.compiler.assume_constant_result
def _named_anew(kind: type[Method], **values: Any) -> str:
    return _named(kind(**values))


@torch.compiler.assume_constant_result
def _named(method: Any) -> str:
    # The repr of the methods of this package says all that they are; that of others may not.
    name = repr(method) if type(method) in _NAMED else f"{type(method).__name__} at {id(method)}"
    _methods[name] = method
    return name


@torch.compiler.assume_constant_result
def _fields(kind: type[Method]) -> tuple[str, ...] | None:
    """Return what an object is made from; None for a class that is no dataclass itself."""
    own = "__dataclass_fields__" in vars(kind)
    return tuple(field.name for field in fields(kind) if field.init) if own else None
