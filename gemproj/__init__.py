"""Fine-tune a model, and say beforehand how far it may drift.

Underneath is an exact projection of gradients, with an error bound, for NumPy, PyTorch and CuPy, in three
stages: ``(G, g) -> gram -> (K, b) -> method -> multipliers -> combine -> x``.
"""

from gemproj._combine import combine
from gemproj._dual import solve_dual, solve_gram
from gemproj._gram import gram
from gemproj._project import project
from gemproj._solution import DualSolution
from gemproj._tspace import Gram
from gemproj.methods import AGEM, FISTA, GEM2017, OSQP, PGD, Exact, Method, Quadprog, Status

__version__ = "0.2.0"

__all__ = [
    "AGEM",
    "FISTA",
    "GEM2017",
    "OSQP",
    "PGD",
    "DualSolution",
    "Exact",
    "Gram",
    "Method",
    "Quadprog",
    "Status",
    "combine",
    "gram",
    "project",
    "solve_dual",
    "solve_gram",
]
