"""What is timed: the published recipes, every method of this library, and the least that memory allows."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from asv_benchmarks.benchmarks.peers import agem_published, floor, gem_published, igem_published
from asv_benchmarks.benchmarks.timing import nothing
from gemproj import GEM2017, PGD, project
from gemproj.methods import METHODS

FLOOR, GIVEN, MEAN = "memory floor", "A-GEM, reference given", "A-GEM, mean of the rows"
# The lines of the figure besides the floor: Okabe and Ito's colours, which differ for all kinds of eyes,
# and a marker for each.
LOOKS = {
    GIVEN: ("#E69F00", "s"),
    MEAN: ("#D55E00", "D"),
    "I-GEM, published": ("#CC79A7", "v"),
    "GEM, reference recipe": ("#000000", "X"),
    "gemproj exact": ("#0072B2", "o"),
    "gemproj exact, NumPy": ("#56B4E9", "^"),
}
MAIN = [FLOOR, *LOOKS]


class Candidate(NamedTuple):
    """A projection by name; `prepare` undoes what running it has done to g."""

    name: str
    role: Literal["floor", "peer", "ours"]
    run: Callable[[], Any]
    prepare: Callable[[], object] = nothing


def by_columns(G: torch.Tensor) -> torch.Tensor:
    """Return the same matrix, stored as GEM's own code, Avalanche and Mammoth keep it: strides (1, t)."""
    return G.T.contiguous().T


def candidates(G: torch.Tensor, g: torch.Tensor) -> list[Candidate]:
    """Return all candidates for float32 tensors on the CPU; NumPy works on the same memory."""
    rows, vector = G.numpy(), g.numpy()
    # Three steps, as in I-GEM; no memory strength, which asks for another point than the projection.
    methods = {**METHODS, "pgd": PGD(steps=3), "gem2017": GEM2017(memory_strength=0.0)}
    ours = {f"gemproj {name}": partial(project, G, g, method=method) for name, method in methods.items()}
    out, x, y = torch.empty_like(g), torch.empty_like(g), np.empty_like(vector)
    return [
        Candidate(FLOOR, "floor", partial(floor, G, g, out)),
        Candidate("one read of G and g", "floor", lambda: (G.sum(), g.sum())),
        Candidate(GIVEN, "peer", lambda: agem_published(G[0], g)),
        Candidate(MEAN, "peer", lambda: agem_published(G.mean(0), g)),
        Candidate("GEM, reference recipe", "peer", partial(gem_published, G, g)),
        Candidate("I-GEM, published", "peer", partial(igem_published, G, g)),
        *(Candidate(name, "ours", run) for name, run in ours.items()),
        # NumPy copies, on one thread: torch's would be awake for the call that is timed.
        Candidate(
            "gemproj exact, in place",
            "ours",
            lambda: project(G, x, out=x),
            lambda: np.copyto(x.numpy(), vector),
        ),
        Candidate("gemproj exact, G by columns", "ours", partial(project, by_columns(G), g)),
        Candidate("gemproj exact, NumPy", "ours", partial(project, rows, vector)),
        Candidate(
            "gemproj exact, NumPy, in place",
            "ours",
            lambda: project(rows, y, out=y),
            lambda: np.copyto(y, vector),
        ),
    ]
