"""S-GEM: one constraint, drawn at random."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np

from gemproj._array import device_of, from_numpy, namespace
from gemproj.methods._method import Method, Outcome, Status, check_count, clip, inverse


@dataclass(frozen=True)
class SGEM(Method):
    """Stochastic GEM: at each call one row, drawn uniformly at random, constrains.

    Compared with A-GEM by Chaudhry et al. (ICLR 2019). For the drawn row i,
    ``lam_i = max(0, -b_i / K_ii)``; the other multipliers are zero and their rows may stay violated.
    In a batch each problem draws its own row. Whoever computes one row only, which is what makes
    S-GEM cheap, has the same with ``method="agem"`` on that row.

    Parameters
    ----------
    seed : int, default 0
        Of random numbers of its own, drawn on the CPU: two objects with one seed draw the same rows,
        call by call, so ranks of a distributed job agree. Objects are equal if their seeds are. A
        copy, or what a pickle brings back, goes on where its original was.

    Notes
    -----
    The name "sgem" stands for one object that all its callers advance. Where a run must repeat, pass
    an object.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import SGEM, project
    >>> method = SGEM(seed=1)
    >>> [project(np.eye(2), -np.ones(2), method=method).tolist() for _ in range(3)]
    [[0.0, -1.0], [-1.0, 0.0], [-1.0, 0.0]]
    """

    seed: int = 0
    _random: np.random.Generator = field(init=False, repr=False, compare=False)

    repeatable = False

    def __post_init__(self) -> None:
        check_count(self.seed, "seed", 0)
        object.__setattr__(self, "_random", np.random.default_rng(self.seed))

    def __copy__(self) -> SGEM:
        return copy.deepcopy(self)  # else both would advance one sequence

    def solve(self, K, b, warm_start=None, upper=None):  # noqa: D102
        xp, batch, t = namespace(K), tuple(b.shape[:-1]), b.shape[-1]
        if not t:
            return Outcome(b * 0.0, 0, int(Status.APPROXIMATE))
        row = self._random.integers(t, size=batch or None)
        # The index of one problem is a number, which a device need not be handed.
        drawn = from_numpy(row, xp, device_of(b))[..., None] if batch else int(row)
        lam = clip(-b * inverse(xp.linalg.diagonal(K)), upper)
        chosen = xp.arange(t, device=device_of(b)) == drawn
        return Outcome(xp.where(chosen, lam, xp.zeros_like(lam)), 1, int(Status.APPROXIMATE))
