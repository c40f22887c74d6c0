"""The methods of the dual problem, one file each; a string names a default object of each."""

from __future__ import annotations

from collections.abc import Callable

from gemproj._array import Array
from gemproj.methods._method import Method, Outcome, Status
from gemproj.methods.agem import AGEM
from gemproj.methods.equality import Equality
from gemproj.methods.exact import Exact
from gemproj.methods.fista import FISTA
from gemproj.methods.gem2017 import GEM2017
from gemproj.methods.mega import MEGA1, MEGA2
from gemproj.methods.osqp import OSQP
from gemproj.methods.pgd import PGD
from gemproj.methods.quadprog import Quadprog
from gemproj.methods.sgem import SGEM

__all__ = [
    "AGEM",
    "FISTA",
    "GEM2017",
    "MEGA1",
    "MEGA2",
    "NAMES",
    "OSQP",
    "PGD",
    "SGEM",
    "Equality",
    "Exact",
    "Method",
    "Outcome",
    "Quadprog",
    "Status",
]

NAMES: dict[str, Method] = {
    "exact": Exact(),
    "pgd": PGD(),
    "fista": FISTA(),
    "agem": AGEM(),
    "quadprog": Quadprog(),
    "osqp": OSQP(),
    "gem2017": GEM2017(),
    "sgem": SGEM(),
    "mega1": MEGA1(),
    "mega2": MEGA2(),
    "equality": Equality(),
}

AnyMethod = str | Method | Callable[[Array, Array, Array | None], Array]


def find(method: AnyMethod) -> Method | Callable[[Array, Array, Array | None], Array]:
    """Turn a nickname into its method; pass a method or any callable through.

    Raises
    ------
    ValueError
        For an unknown nickname.
    TypeError
        For a method class instead of an object, or something that cannot be called.
    """
    if isinstance(method, str):
        try:
            return NAMES[method.lower()]
        except KeyError:
            names = ", ".join(map(repr, NAMES))
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
