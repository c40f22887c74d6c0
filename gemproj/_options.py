"""The method and the options of a projection, checked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from gemproj._arrays import is_array
from gemproj._checks import check_count, check_scalar, refuse_masked
from gemproj.methods import AnyMethod, Exact, Method, as_method


@dataclass(frozen=True, eq=False)
class Options:
    """Checked options of a projection; `make_bounds` checks the arrays among them against b."""

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
    """Return the options of a projection, checked as far as possible without G and g."""
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
