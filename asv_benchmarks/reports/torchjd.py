"""``python -m asv_benchmarks.reports.torchjd``: TorchJD's aggregators with its own projector and with ours.

UPGrad projects every row of the Jacobian, DualProj their mean. Ratios carry over to other machines; times do
not.
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torchjd.aggregation import DualProjWeighting, UPGradWeighting
from torchjd.linalg import QuadprogProjector

from asv_benchmarks.benchmarks.timing import Call, in_turn
from asv_benchmarks.reports.machine import describe
from asv_benchmarks.reports.options import Page, numbers
from asv_benchmarks.reports.tables import Table, digits, power, publish
from gemproj.integrations.torchjd import ConeProjector

PROJECTORS = {"gemproj": ConeProjector(), "TorchJD": QuadprogProjector()}
# By aggregator: its class of weightings, and the vectors that it projects.
AGGREGATORS: dict[str, tuple[Any, Callable[[int], torch.Tensor]]] = {
    "UPGrad": (UPGradWeighting, lambda m: torch.eye(m) / m),
    "DualProj": (DualProjWeighting, lambda m: torch.full((m,), 1.0 / m)),
}
# An answer that violates a condition by more than this, in units of |J'u|, is a failure.
TOLERANCE = 1e-2
PARAMETERS, DRAWS, OBJECTIVES = 1000, 20, 16
NOTE = (
    f"float32, {PARAMETERS} parameters. ms: the least time of the weights from a given Gram matrix. "
    "Residual: the largest violation of an optimality condition, over the norms of the row and of J'u, "
    "computed from J in float64. TorchJD: its default, quadprog in a loop over the vectors. Failures: an "
    f"exception, NaN or a residual above {TOLERANCE:g}."
)


Draw = Callable[[np.random.Generator, int], np.ndarray]


def _rows(rng: np.random.Generator, m: int) -> np.ndarray:
    return rng.standard_normal((m, PARAMETERS))


def _changed(change: Callable[[np.ndarray], np.ndarray]) -> Draw:
    return lambda rng, m: change(_rows(rng, m))


def _low_rank(rng: np.random.Generator, m: int) -> np.ndarray:
    rank = max(2, m // 4)
    return rng.standard_normal((m, rank)) @ _rows(rng, rank)


FAMILIES: dict[str, Draw] = {
    "random": _rows,
    "rows of small sum": _changed(lambda J: J - 0.9 * J.mean(0)),
    "rows of sum zero": _changed(lambda J: J - J.mean(0)),
    "random, norms of 1e-6": _changed(lambda J: 1e-6 / PARAMETERS**0.5 * J),
    "random, norms of 1e6": _changed(lambda J: 1e6 / PARAMETERS**0.5 * J),
    "random, norms from 1e-3 to 1e3": lambda rng, m: 10.0 ** rng.uniform(-3, 3, (m, 1)) * _rows(rng, m),
    "repeated rows": _changed(lambda J: np.vstack([J[: len(J) // 2], J[: -(-len(J) // 2)]])),
    "opposite rows": _changed(lambda J: np.vstack([J[: len(J) // 2], -J[: -(-len(J) // 2)]])),
    "a row opposite to a sum": _changed(lambda J: np.vstack([J[:-1], -J[0] - J[1]])),
    "rank m/4": _low_rank,
}


def draw(family: str, m: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a Jacobian of a family, (m, parameters); rounding to `dtype` perturbs relations between rows."""
    return torch.tensor(FAMILIES[family](np.random.default_rng(seed), m), dtype=dtype)


def residual(J: torch.Tensor, U: torch.Tensor, W: torch.Tensor) -> float:
    """Return the largest violation of the optimality conditions of ``x = J'w``, free of scale.

    With ``s = J x`` and ``lam = w - u``, both scaled to rows of norm one and ``|J'u| = 1``, it is the largest
    ``|min(s, lam)|``; NaN if w is.
    """
    rows, u, w = (np.asarray(a.double()) for a in (J, U, W))
    norms, size = np.linalg.norm(rows, axis=1), np.linalg.norm(u @ rows, axis=-1, keepdims=True)
    norms, size = (np.where(a > 0, a, 1.0) for a in (norms, size))
    s, lam = (w @ rows) @ rows.T / norms / size, (w - u) * norms / size
    # A row of zeros constrains nothing.
    return float(np.max(np.abs(np.minimum(s, lam)), initial=0.0, where=np.any(rows != 0, axis=1)))


def times(aggregator: str, family: str, counts: list[int], seconds: float) -> Table:
    """Return the times, their ratio and the residuals of an aggregator, by number of objectives."""
    ms, residuals = ([f"{name} {what}" for name in PROJECTORS] for what in ("ms", "residual"))
    table = Table(f"{aggregator}, {family}", ["objectives", "vectors", *ms, "TorchJD / gemproj", *residuals])
    weighting, vectors = AGGREGATORS[aggregator]
    for m in counts:
        J, U = draw(family, m), vectors(m)
        G = J @ J.T
        calls = {name: Call(partial(weighting(projector=p), G)) for name, p in PROJECTORS.items()}
        ours, theirs = (min(taken) for taken in in_turn(calls, seconds).values())
        residuals = [power(residual(J, U, projector(U, G))) for projector in PROJECTORS.values()]
        cells = [digits(1e3 * ours), digits(1e3 * theirs), digits(theirs / ours, 2), *residuals]
        table.rows.append([str(m), str(U.numel() // m), *cells])
    return table


def failures() -> Table:
    """Return the table of worst residuals and of failures by family."""
    head = ["", *(f"{name} {what}" for name in PROJECTORS for what in ("residual", "failures"))]
    title = f"UPGrad of {OBJECTIVES} objectives, {DRAWS} Jacobians each: worst residual and failures"
    table = Table(title, head)
    for family in FAMILIES:
        cells = []
        for projector in PROJECTORS.values():
            found = [_attempt(projector, family, seed) for seed in range(DRAWS)]
            given = [r for r in found if np.isfinite(r)]
            cells += [power(max(given, default=np.nan)), str(sum(not r <= TOLERANCE for r in found))]
        table.rows.append([family, *cells])
    return table


def _attempt(projector: Any, family: str, seed: int) -> float:
    J, U = draw(family, OBJECTIVES, seed), torch.eye(OBJECTIVES) / OBJECTIVES
    try:
        return residual(J, U, projector(U, J @ J.T))
    except Exception:  # any error means that there is no answer
        return np.inf


def main(
    m: Annotated[str, typer.Option(help="Numbers of objectives, separated by commas.")] = "4,16,64,256",
    seconds: Annotated[float, typer.Option(help="Time for the repetitions of a call.")] = 0.5,
    out: Page = None,
) -> None:
    """Time and judge both projectors."""
    counts = numbers(m, "m")

    def parts() -> Iterator[object]:
        yield f"TorchJD {version('torchjd')}. {describe()}\n\n{NOTE}\n"
        yield failures()
        for aggregator in AGGREGATORS:
            for family in ("random", "rows of small sum"):
                yield times(aggregator, family, counts, seconds)

    publish(parts(), out)


if __name__ == "__main__":
    typer.run(main)
