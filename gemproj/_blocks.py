"""Arguments given as one array, or as a sequence or mapping with one array per parameter of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gemproj._arrays import DTYPE, Array, Blocks, is_array, is_real_floating, is_torch
from gemproj._checks import refuse_masked


def as_blocks(a: Blocks, name: str, like: tuple[Any, int] | None = None) -> tuple[list[Array], Any]:
    """Return the checked blocks of an argument, and its keys.

    `like` holds the keys and the number of blocks of G, with which the argument must agree.
    """
    # The usual case first: one array skips the slower checks of sequences and mappings.
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
    if like is not None and _kind(keys) != _kind(like[0]):
        raise TypeError(f"{name} must be {_kind(like[0])}, as G is; found {_kind(keys)}.")
    if like is not None and len(blocks) != like[1]:
        raise ValueError(f"{name} has {len(blocks)} blocks but G has {like[1]}.")
    # Only one block per type and one per dtype is checked, because models have hundreds of blocks.
    for block in _one_of_each(type, blocks):
        if not is_array(block):
            hint = "; convert it, for example with numpy.asarray" if isinstance(block, (list, tuple)) else ""
            raise TypeError(
                f"{name} must be an array (NumPy, torch, CuPy, ...), or a sequence or mapping of arrays; "
                f"found {'blocks of type ' if keys is not None else ''}{type(block).__name__}{hint}."
            )
        refuse_masked(block, name)
    for block in _one_of_each(DTYPE, blocks):
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
