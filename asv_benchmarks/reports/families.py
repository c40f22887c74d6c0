"""Families of projections that are hard for one solver or another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

Problem = tuple[np.ndarray, np.ndarray]
Draw = Callable[[np.random.Generator, int], Problem]


@dataclass(frozen=True)
class Family:
    """A function that draws G (t, d) and g (d,), the numbers t of constraints, and the number of draws."""

    draw: Draw
    sizes: tuple[int, ...] = (2, 5, 10, 30, 60, 120)
    multiple: int = 1

    def problems(self, repeats: int, largest: int) -> Iterator[Problem]:
        """Draw `repeats` problems of every size up to `largest`, fewer where t > 20."""
        for t in self.sizes:
            if t <= largest:
                for seed in range(self.multiple * max(1, min(repeats, 120 // t))):
                    yield self.draw(np.random.default_rng([t, seed]), t)


def normal(rng: np.random.Generator, t: int, scale: float = 1.0) -> Problem:
    return scale * rng.standard_normal((t, 2 * t + 3)), scale * rng.standard_normal(2 * t + 3)


def with_rows(change: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Family:
    """Return the family of problems whose rows are normal, and then changed."""

    def draw(rng: np.random.Generator, t: int) -> Problem:
        G, g = normal(rng, t)
        return change(G, rng), g

    return Family(draw)


def of_norm(rng: np.random.Generator, t: int, norm: float) -> Problem:
    G, g = normal(rng, t)
    return norm * unit(G), norm * unit(g)


def some_zero(G: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    G[rng.permutation(len(G))[: (len(G) + 2) // 3]] = 0.0
    return G


def of_condition(G: np.ndarray, rng: np.random.Generator, condition: float) -> np.ndarray:
    """Singular values from 1 down to 1 / condition, evenly on a logarithmic scale."""
    left, _, right = np.linalg.svd(G, full_matrices=False)
    return left * np.geomspace(1.0, 1.0 / condition, len(G)) @ right


def nearly_parallel(rng: np.random.Generator, t: int) -> Problem:
    """Rows of pairwise cosine .999, and a gradient that points against most of them."""
    G, g = (unit(a) for a in normal(rng, t))
    direction = unit(rng.standard_normal(len(g)))
    return np.sqrt(0.999) * direction + np.sqrt(0.001) * G, 0.03 * g - direction


def opposite(rng: np.random.Generator, t: int, tilt: float = 0.0) -> Problem:
    """Pairs u and -u + tilt v. Without the tilt x is orthogonal to u; with the tilt only if v.g < 0."""
    G, g = (unit(a) for a in normal(rng, t))
    half = t // 2
    G[half : 2 * half] = -G[:half] + tilt * unit(rng.standard_normal((half, len(g))))
    return G, g


def more_rows_than_columns(rng: np.random.Generator, t: int) -> Problem:
    """Twice as many rows as columns, around a common direction, so that zero is not the only feasible x."""
    d = max(1, t // 2)
    G, direction = rng.standard_normal((t, d)), rng.standard_normal(d)
    G *= np.where(G @ direction < 0, -1.0, 1.0)[:, None]
    return G, rng.standard_normal(d)


def hilbert(rng: np.random.Generator, t: int) -> Problem:
    """Rows of the Hilbert matrix, about half of them negated: at t = 30 beyond any float64 method."""
    columns = np.arange(2 * t + 3)
    G = 1.0 / (1.0 + np.arange(t)[:, None] + columns)
    return G * rng.choice([-1.0, 1.0], (t, 1)), rng.standard_normal(len(columns))


def integers(rng: np.random.Generator, t: int) -> Problem:
    """Small integers: repeated, opposite, dependent and zero rows, and ties, all at once."""
    d = rng.integers(1, 5)
    g = rng.integers(-3, 4, d)
    g[0] += not g.any()
    return rng.integers(-2, 3, (t, d)).astype(float), g.astype(float)


def unit(a: np.ndarray) -> np.ndarray:
    return a / np.linalg.norm(a, axis=-1, keepdims=True)


FAMILIES: dict[str, Family] = {
    "random": Family(normal),
    # The sum of the rows nearly vanishes: every step that helps one row hurts another.
    "conflicting": with_rows(lambda G, rng: G - 0.99 * G.mean(axis=0)),
    "nearly parallel, cosine .999": Family(nearly_parallel),
    "row norms 1e-6 to 1e6": with_rows(lambda G, rng: G * 10.0 ** rng.uniform(-6, 6, (len(G), 1))),
    "all times 1e-30": Family(partial(normal, scale=1e-30)),
    "all times 1e30": Family(partial(normal, scale=1e30)),
    "gradient norms 1e-3": Family(partial(of_norm, norm=1e-3)),
    "gradient norms 1e-6": Family(partial(of_norm, norm=1e-6)),
    "zero rows": with_rows(some_zero),
    "duplicates": with_rows(lambda G, rng: np.concatenate([G[: len(G) // 2], G[: -(-len(G) // 2)]])),
    "opposite pairs": Family(opposite),
    "opposite, tilt 1e-3": Family(partial(opposite, tilt=1e-3)),
    "opposite, tilt 1e-5": Family(partial(opposite, tilt=1e-5)),
    "opposite, tilt 1e-7": Family(partial(opposite, tilt=1e-7)),
    "t = 2d": Family(more_rows_than_columns),
    "condition 1e8": with_rows(partial(of_condition, condition=1e8)),
    "condition 1e10": with_rows(partial(of_condition, condition=1e10)),
    "Hilbert, random signs": Family(hilbert),
    "tiny integers": Family(integers, sizes=(2, 3, 4, 5), multiple=10),
}
