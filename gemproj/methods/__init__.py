"""The methods for the dual problem, and their names."""

from __future__ import annotations

from collections.abc import Callable

from gemproj._arrays import Array
from gemproj.methods._method import Method, Outcome, Status
from gemproj.methods.agem import AGEM
from gemproj.methods.exact import Exact
from gemproj.methods.external import OSQP, Quadprog
from gemproj.methods.gem2017 import GEM2017
from gemproj.methods.pgd import FISTA, PGD

__all__ = [
    "AGEM",
    "FISTA",
    "GEM2017",
    "METHODS",
    "OSQP",
    "PGD",
    "Exact",
    "Method",
    "Outcome",
    "Quadprog",
    "Status",
]

METHODS: dict[str, Method] = {
    "exact": Exact(),
    "pgd": PGD(),
    "fista": FISTA(),
    "agem": AGEM(),
    "quadprog": Quadprog(),
    "osqp": OSQP(),
    "gem2017": GEM2017(),
}

Multipliers = Callable[[Array, Array, Array | None], Array]
AnyMethod = str | Method | Multipliers


def as_method(method: AnyMethod) -> Method | Multipliers:
    """Return the method with the given name; an object or a callable is returned unchanged."""
    if isinstance(method, str):
        try:
            return METHODS[method.lower()]
        except KeyError:
            names = ", ".join(map(repr, METHODS))
            raise ValueError(f"method {method!r} is unknown; the names are {names}.") from None
    if isinstance(method, type):
        raise TypeError(
            f"method must be an object, not a class: write {method.__name__}(), not {method.__name__}."
        )
    if not callable(method):
        raise TypeError(
            f"method must be a name, a Method or a callable (K, b, warm_start); found {method!r}."
        )
    return method
