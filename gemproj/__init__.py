"""Gradient projection for continual learning: exact GEM at the price of A-GEM.

Three stages, data flowing one way: ``(G, g) -> gram -> (K, b) -> method -> multipliers -> combine -> x``.
"""

from gemproj._dual import DualSolution, solve_dual
from gemproj._gram import Gram, gram
from gemproj._project import combine, project
from gemproj.methods import (
    AGEM,
    FISTA,
    GEM2017,
    MEGA1,
    MEGA2,
    OSQP,
    PGD,
    SGEM,
    Equality,
    Exact,
    Method,
    Quadprog,
    Status,
)

__version__ = "0.1.0"

__all__ = [
    "AGEM",
    "FISTA",
    "GEM2017",
    "MEGA1",
    "MEGA2",
    "OSQP",
    "PGD",
    "SGEM",
    "DualSolution",
    "Equality",
    "Exact",
    "Gram",
    "Method",
    "Quadprog",
    "Status",
    "combine",
    "gram",
    "project",
    "solve_dual",
]
