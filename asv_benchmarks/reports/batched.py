"""``python -m asv_benchmarks.reports.batched``: many small dual problems at once, beside loops and JAX.

All solve ``min 1/2 lam'K lam + b'lam, lam >= 0`` for the same n matrices K of size t by t, in float64 on the
CPU, in one thread. gemproj takes them in one call, qpax and jaxopt in one call of `jax.vmap`, compiled
before, and quadprog and DAQP in a loop.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import numpy as np
import typer

from asv_benchmarks.reports.boards import shortest
from asv_benchmarks.reports.machine import load, one_thread, processor, versions
from asv_benchmarks.reports.options import Page, numbers
from asv_benchmarks.reports.tables import Table, digits, power, publish
from gemproj import solve_gram

# The most problems that a solver gets: a loop takes the same time for each, jaxopt takes milliseconds.
MOST = {"quadprog": 1_000, "daqp": 1_000, "qpax": 10_000, "jaxopt": 1_000}
BYTES = 600_000_000  # most memory of the matrices K
PACKAGES = ["gemproj", "numpy", "numba", "quadprog", "daqp", "qpax", "jaxopt", "jax"]
Batch = tuple[np.ndarray, np.ndarray]
Solve = Callable[[np.ndarray, np.ndarray], np.ndarray]


def draw(n: int, t: int) -> Batch:
    """Return K (n, t, t) and b (n, t) of random rows and gradients with 2 t entries."""
    rng = np.random.default_rng([n, t])
    G, g = rng.standard_normal((n, t, 2 * t)), rng.standard_normal((n, 2 * t, 1))
    return G @ G.swapaxes(1, 2), (G @ g)[..., 0]


def ours(K: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve all problems in one call."""
    return solve_gram(K, b).multipliers


def quadprog(K: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve the problems one by one."""
    solve, rows, right = import_module("quadprog").solve_qp, np.eye(b.shape[-1]), np.zeros(b.shape[-1])
    return np.stack([solve(K[i], -b[i], rows, right)[0] for i in range(len(b))])


def daqp(K: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve the problems one by one, with the bounds as bounds."""
    solve, t = import_module("daqp").solve, b.shape[-1]
    rows, upper, lower, sense = np.zeros((0, t)), np.full(t, 1e30), np.zeros(t), np.zeros(t, dtype=np.int32)
    return np.stack([solve(K[i], b[i], rows, upper, lower, sense, primal_tol=1e-9)[0] for i in range(len(b))])


def qpax(t: int) -> Solve:
    """Return a compiled function that solves all problems at once by qpax's interior-point method."""
    solve, rows = import_module("qpax").solve_qp, (np.zeros((0, t)), np.zeros(0), -np.eye(t), np.zeros(t))
    return _mapped(lambda K, b: solve(K, b, *rows, solver_tol=1e-9)[0])


def jaxopt(t: int) -> Solve:
    """Return a compiled function that solves all problems at once by jaxopt's OSQP for bounds."""
    solver = import_module("jaxopt").BoxOSQP(tol=1e-9, maxiter=4000)
    identity, bounds = np.eye(t), (np.zeros(t), np.full(t, np.inf))

    def one(K: Any, b: Any) -> Any:
        return solver.run(params_obj=(K, b), params_eq=identity, params_ineq=bounds).params.primal[0]

    return _mapped(one)


def _mapped(one: Callable[[Any, Any], Any]) -> Solve:
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    jax = import_module("jax")
    jax.config.update("jax_enable_x64", True)
    every = jax.jit(jax.vmap(one))
    return lambda K, b: np.asarray(every(K, b))


LOOPS = {"quadprog": quadprog, "daqp": daqp}
VMAPS = {"qpax": qpax, "jaxopt": jaxopt}


def residual(K: np.ndarray, b: np.ndarray, lam: np.ndarray) -> float:
    """Return the largest violation of the optimality conditions, of rows of norm one and a b of size one."""
    norms = np.sqrt(np.diagonal(K, axis1=-2, axis2=-1))
    s, size = ((K @ lam[..., None])[..., 0] + b) / norms, np.abs(b / norms).max(axis=-1, keepdims=True)
    return float(np.abs(np.minimum(lam * norms, s) / size).max())


@one_thread()
def main(
    counts: Annotated[str, typer.Option(help="Numbers of problems.")] = "100,1000,10000,100000",
    t: Annotated[str, typer.Option(help="Numbers of constraints.")] = "2,8,32",
    seconds: Annotated[float, typer.Option(help="Time for the repetitions of a call.")] = 0.3,
    out: Page = None,
) -> None:
    """Time all solvers that are installed, and judge their answers."""
    loops = {name: solve for name, solve in LOOPS.items() if find_spec(name)}
    vmaps = {name: make for name, make in VMAPS.items() if find_spec(name)}

    def parts() -> Iterator[object]:
        yield f"{processor()}, one thread{load()}. {versions(PACKAGES)}.\n"
        names = ["gemproj", *loops, *vmaps]
        for rows in numbers(t, "t"):
            head = ["problems", *(f"{name}, µs" for name in names), *(f"{name}, residual" for name in names)]
            table = Table(f"t = {rows}: time for each problem, and largest residual", head)
            solvers: dict[str, Solve] = {
                "gemproj": ours,
                **loops,
                **{k: make(rows) for k, make in vmaps.items()},
            }
            for n in numbers(counts, "counts"):
                if 8 * n * rows * rows > BYTES:
                    continue
                K, b = draw(n, rows)
                us, wrong = [], []
                for name, solve in solvers.items():
                    taken, found = np.nan, np.nan
                    if n <= MOST.get(name, n):
                        solve(K, b)  # compiled
                        spent, lam = shortest(partial(solve, K, b), seconds)
                        taken, found = 1e6 * spent / n, residual(K, b, lam)
                    us.append(digits(taken))
                    wrong.append(power(found))
                table.rows.append([f"{n:,}", *us, *wrong])
            yield table

    publish(parts(), out)


if __name__ == "__main__":
    typer.run(main)
