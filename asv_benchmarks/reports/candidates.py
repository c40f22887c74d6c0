"""The timed candidates: the published recipes, every method of gemproj, and the memory floor."""

from functools import partial
from typing import Any

import numpy as np
import torch

from asv_benchmarks.benchmarks.peers import agem_published, floor, gem_published, igem_published
from asv_benchmarks.benchmarks.timing import Call
from gemproj import GEM2017, PGD, project
from gemproj.methods import METHODS

FLOOR, GIVEN, MEAN = "memory floor", "A-GEM, reference given", "A-GEM, mean of the rows"
READ = "one read of G and g"
# The lines of the figure: Okabe and Ito's colours, which colour-blind readers can distinguish, and markers.
LOOKS: dict[str, dict[str, Any]] = {
    GIVEN: {"color": "#E69F00", "marker": "s"},
    MEAN: {"color": "#D55E00", "marker": "D"},
    "I-GEM, published": {"color": "#CC79A7", "marker": "v"},
    "GEM, reference recipe": {"color": "#000000", "marker": "X"},
    "gemproj exact": {"color": "#0072B2", "marker": "o"},
    "gemproj exact, NumPy": {"color": "#56B4E9", "marker": "^"},
    FLOOR: {"color": "#767676", "linestyle": "--"},
}


def by_columns(G: torch.Tensor) -> torch.Tensor:
    """Return G stored as the code of GEM, Avalanche and Mammoth stores it: strides (1, t)."""
    return G.T.contiguous().T


def candidates(G: torch.Tensor, g: torch.Tensor) -> dict[str, Call]:
    """Return the calls of all candidates for float32 tensors on the CPU; NumPy works on the same memory."""
    rows, vector = G.numpy(), g.numpy()
    # Three steps, as in I-GEM; no memory strength, because it defines another point than the projection.
    methods = {**METHODS, "pgd": PGD(steps=3), "gem2017": GEM2017(memory_strength=0.0)}
    ours = {f"gemproj {name}": Call(partial(project, G, g, method=m)) for name, m in methods.items()}
    out, x, y = torch.empty_like(g), torch.empty_like(g), np.empty_like(vector)
    return {
        FLOOR: Call(partial(floor, G, g, out)),
        READ: Call(lambda: (G.sum(), g.sum())),
        GIVEN: Call(lambda: agem_published(G[0], g)),
        MEAN: Call(lambda: agem_published(G.mean(0), g)),
        "GEM, reference recipe": Call(partial(gem_published, G, g)),
        "I-GEM, published": Call(partial(igem_published, G, g)),
        **ours,
        # NumPy copies on one thread; after a copy by torch, its threads would be awake for the timed call.
        "gemproj exact, in place": Call(partial(project, G, x, out=x), lambda: np.copyto(x.numpy(), vector)),
        "gemproj exact, G by columns": Call(partial(project, by_columns(G), g)),
        "gemproj exact, NumPy": Call(partial(project, rows, vector)),
        "gemproj exact, NumPy, in place": Call(
            partial(project, rows, y, out=y), lambda: np.copyto(y, vector)
        ),
    }
