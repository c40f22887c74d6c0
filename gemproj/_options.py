"""What is asked for beside G and g: the method and the options of the problem."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemproj._arrays import (
    Array,
    detach,
    is_array,
    is_real_floating,
    namespace,
    on_host,
    refuse_masked,
    to_numpy,
    wide_dtype,
)
from gemproj._blocks import shape
from gemproj._bounds import check_scalar
from gemproj.methods import AnyMethod, Exact, Method, as_method
from gemproj.methods._method import check_count


@dataclass(frozen=True, eq=False)
class Options:
    """The checked options of a projection; those that are arrays are checked against b later."""

    method: Any
    h: Any = None
    margin: Any = 0.0
    penalty: Any = None
    equality: Any = False
    refine: int = 0


def check_options(
    method: AnyMethod,
    *,
    h: Any = None,
    margin: Any = 0.0,
    penalty: Any = None,
    equality: Any = False,
    refine: int = 0,
) -> Options:
    """Check the options that do not depend on the data."""
    plain = h is None and penalty is None and type(margin) is float and margin == 0.0
    if plain and equality is False and type(refine) is int and refine == 0:
        return _named(method) if type(method) is str else Options(as_method(method))
    found = as_method(method)
    check_scalar(margin, "margin")
    if penalty is not None:
        check_scalar(penalty, "penalty")
    check_count(refine, "refine", 0)
    for name, value in {"h": h, "margin": margin, "penalty": penalty, "equality": equality}.items():
        refuse_masked(value, name)
    if not (is_array(equality) or isinstance(equality, (bool, list, tuple))):
        raise TypeError(
            f"equality must be True, False or a boolean array of one per constraint; found {equality!r}."
        )
    accepts = found.accepts if isinstance(found, Method) else {"h", "margin"}
    given = {
        "h": h is not None,
        "margin": is_array(margin) or bool(margin),
        "penalty": penalty is not None,
        "equality": equality is not False,
    }
    for name in given:
        if given[name] and name not in accepts:
            raise ValueError(f"{name} cannot be combined with method {found!r}, which does not take it.")
    if refine and not isinstance(found, Exact):
        raise ValueError(f"refine needs method 'exact', which finds the active set; found {found!r}.")
    return Options(found, h, margin, penalty, equality, refine)


@lru_cache(maxsize=64)
def _named(method: str) -> Options:
    return Options(as_method(method))


def check_start(warm_start: Any, expected: tuple[int, ...], xp: Any, device: Any) -> Array | None:
    """Check the multipliers that a method starts from, if there are any."""
    return None if warm_start is None else check_multipliers(warm_start, "warm_start", expected, xp, device)


def check_multipliers(lam: Any, name: str, expected: tuple[int, ...], xp: Any, device: Any) -> Array:
    """Check one number per constraint, shape (..., t), and return it as t-space has it."""
    check_look_of_multipliers(lam, name, expected, xp)
    lam = xp.asarray(detach(lam), dtype=wide_dtype(xp, device), device=device)
    return to_numpy(lam) if on_host(device) else lam


def check_look_of_multipliers(lam: Any, name: str, expected: tuple[int, ...], xp: Any) -> None:
    """Check the library, shape and dtype of one number per constraint."""
    refuse_masked(lam, name)
    if not is_array(lam):
        raise TypeError(f"{name} must be an array of shape {expected}; found {type(lam).__name__}.")
    if tuple(lam.shape) != expected:
        raise ValueError(
            f"{name} must have shape {expected}, one multiplier per constraint; found {shape(lam)}."
        )
    if namespace(lam) is not xp:
        library = xp.__name__.rpartition(".")[2]
        raise TypeError(
            f"{name} must be of the library of the other arrays, {library}; found {type(lam).__name__}."
        )
    if not is_real_floating(lam):
        raise TypeError(f"{name} must have a real floating-point dtype; found {lam.dtype}.")
