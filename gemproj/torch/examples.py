"""Two ways to hold examples in memory: rows of preallocated tensors, and a list of them as they are."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from gemproj.torch.batches import Batch, PerExample, flatten, leaves_of, map_nested, place

_PLAIN = frozenset({bool, int, float, complex, str, type(None)})  # cannot change
_NUMPY = "__numpy__"  # the key of the bytes of an array, which is a dict in a state


class Dense:
    """Examples of one shape, in preallocated tensors with one row for each slot."""

    def __init__(self, like: Batch, capacity: int) -> None:
        leaves, self._spec = flatten(like)
        # What inference mode allocates could not be written to outside of it.
        with torch.inference_mode(False):
            self._leaves = [leaf.new_empty((capacity, *leaf.shape[1:])) for leaf in leaves]
        self.kind = str(self._spec), *((leaf.shape[1:], leaf.dtype) for leaf in leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, in use or not."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def write(self, slots: list[int], examples: Batch, rows: list[int]) -> None:
        """Copy rows of a batch into slots."""
        to, of = (torch.tensor(places, dtype=torch.int64, device="cpu") for places in (slots, rows))
        for kept, leaf in zip(self._leaves, flatten(examples)[0], strict=True):
            kept[to.to(kept.device)] = leaf.detach()[of.to(leaf.device)].to(kept.device)

    @staticmethod
    def gather(chosen: list[tuple[Dense, list[int]]]) -> Batch:
        """Return copies of the examples in some slots, as one batch on the devices of the first ones.

        Those that were loaded may lie on other devices than those that were stored since.
        """
        sizes, joined = [len(slots) for _, slots in chosen], []
        places = np.array([slot for _, slots in chosen for slot in slots], dtype=np.int64)
        at = torch.from_numpy(places)  # faster than torch.tensor
        for leaves in zip(*(held._leaves for held, _ in chosen), strict=True):
            home = leaves[0].device
            at = at.to(home)
            out = leaves[0].new_empty((len(at), *leaves[0].shape[1:]))
            for leaf, some, part in zip(leaves, at.split(sizes), out.split(sizes), strict=True):
                if leaf.device == home:
                    torch.index_select(leaf, 0, some, out=part)
                else:
                    part.copy_(leaf.index_select(0, some.to(leaf.device)))
            joined.append(out)
        return tree_unflatten(joined, chosen[0][0]._spec)

    def check(self, examples: Batch, field: str) -> None:
        """Raise for examples that are not like those stored."""
        leaves, spec = flatten(examples)
        if spec != self._spec:
            raise ValueError(
                f"The batch is nested differently from what is stored: {spec}, not {self._spec}."
            )
        for i, (leaf, like) in enumerate(zip(leaves, self._leaves, strict=True)):
            if (leaf.shape[1:], leaf.dtype) != (like.shape[1:], like.dtype):
                where = field + place(examples, i).removeprefix("batch")
                raise ValueError(
                    f"Stored examples have shape {tuple(like.shape[1:])} and {like.dtype} in {where}; found "
                    f"{tuple(leaf.shape[1:])} and {leaf.dtype}. For examples that differ in length pass the "
                    "loader itself, whose collate_fn pads them, or a data set or list of examples with "
                    "collate=: they are then stored as they are."
                )


class Listed:
    """Examples as they are, in a list with one element for each slot in use."""

    kind = ()

    def __init__(self) -> None:
        self._kept: list[Any] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and arrays, and of other values what `sys.getsizeof` says of each."""
        return sum(getattr(leaf, "nbytes", sys.getsizeof(leaf)) for leaf in leaves_of(self._kept))

    def write(self, slots: list[int], examples: PerExample, rows: list[int]) -> None:
        """Put examples, which are copies, into slots, of which new ones follow those in use."""
        self._kept += [None] * (max(slots, default=-1) + 1 - len(self._kept))
        for slot, row in zip(slots, rows, strict=True):
            self._kept[slot] = examples[row]

    @staticmethod
    def gather(chosen: list[tuple[Listed, list[int]]]) -> PerExample:
        """Return copies of the examples in some slots: there are collate functions that change them."""
        return owned(PerExample(held._kept[slot] for held, slots in chosen for slot in slots))


def hold(examples: Any, capacity: int, n: int = 0) -> Dense | Listed:
    """Return what holds examples of this kind, with the first n of these in the first slots."""
    held: Any = Listed() if isinstance(examples, PerExample) else Dense(examples, capacity)
    held.write(list(range(n)), examples, list(range(n)))
    return held


def packed(examples: Any) -> Any:
    """Return a list of examples as ``torch.load(..., weights_only=True)`` can read it; a batch as it is."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | np.generic):
            return leaf
        flat, scalar = np.ascontiguousarray(leaf).reshape(-1), not isinstance(leaf, np.ndarray)
        of_bytes = torch.from_numpy(flat.view(np.uint8))
        return {_NUMPY: of_bytes, "dtype": leaf.dtype.str, "shape": leaf.shape, "scalar": scalar}

    return map_nested(of, list(examples)) if isinstance(examples, PerExample) else examples


def unpacked(state: list[Any]) -> PerExample:
    """Return copies of the examples that were `packed`."""

    def is_array(value: Any) -> bool:
        return isinstance(value, dict) and _NUMPY in value

    def of(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        array = leaf[_NUMPY].cpu().numpy().view(leaf["dtype"]).reshape(leaf["shape"])
        return array[()] if leaf["scalar"] else array

    return owned(PerExample(map_nested(of, one, is_array) for one in state))


def owned(examples: Any) -> Any:
    """Return copies of the examples of a list, or raise for what cannot be stored; a batch as it is."""
    if not isinstance(examples, PerExample):
        return examples
    with torch.inference_mode(False):  # tensors of inference mode could not be trained on
        return PerExample(map_nested(_copied, one, _is_plain_list) for one in examples)


def _is_plain_list(value: Any) -> bool:
    """Return whether a value is a list of numbers or strings, such as tokens, which is copied at once."""
    return type(value) is list and _PLAIN.issuperset(map(type, value))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, np.ndarray | np.generic) and not (leaf.dtype.hasobject or leaf.dtype.names):
        return leaf.copy()
    if type(leaf) is list:
        return list(leaf)
    if type(leaf) in _PLAIN:
        return leaf
    raise TypeError(
        "Stored examples may hold tensors, NumPy arrays, numbers, strings and None, in dicts, lists, tuples "
        f"and dataclasses; found {type(leaf).__module__}.{type(leaf).__qualname__}. Convert it in the data "
        "set, or pass batches of tensors: (batch for batch in loader)."
    )
