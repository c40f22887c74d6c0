"""Quadratic programs as projections, and the commands that solve sets of them beside other solvers."""

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from problems import assert_close, rational_projection

qpsolvers = pytest.importorskip("qpsolvers", reason="needs the extra compare")
pytest.importorskip("mpmath")
pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from asv_benchmarks.reports import batched, boards, gem_script, gradient_cones, maros_meszaros, mpc  # noqa: E402
from asv_benchmarks.reports.programs import solve_problem  # noqa: E402

SHAPES = {  # numbers of variables, inequalities and equalities; rank of P
    "plain": (8, 12, 3, 8),
    "more rows than variables": (5, 40, 1, 5),
    "singular P": (8, 12, 3, 4),
    "no equalities": (6, 9, 0, 6),
    "no inequalities": (6, 0, 3, 6),
    "bounds only": (6, 0, 0, 6),
}


def drawn(rng, n, k, m, rank):
    """Return a program, and its solution, which is drawn first: x, and multipliers of half of the constraints."""
    V = rng.standard_normal((rank, n))
    P, x = V.T @ V, rng.standard_normal(n)
    G, A = rng.standard_normal((k, n)), rng.standard_normal((m, n))
    z, y, z_box = rng.random(k), rng.standard_normal(m), rng.standard_normal(n)
    z[::2], z_box[::2] = 0.0, 0.0
    h = G @ x + np.where(z > 0.0, 0.0, rng.random(k))
    lb = np.where(z_box < 0.0, x, x - rng.random(n))
    ub = np.where(z_box > 0.0, x, x + rng.random(n))
    lb[0], ub[2] = -np.inf, np.inf
    lb[4] = ub[4] = x[4]  # a variable that is fixed
    q = -(P @ x + G.T @ z + A.T @ y + z_box)
    rows = ((G, h) if k else (None, None)) + ((A, A @ x) if m else (None, None))
    return qpsolvers.Problem(P, q, *rows, lb, ub), x


@pytest.mark.parametrize("shape", SHAPES)
def test_an_answer_meets_the_conditions_of_a_program(shape, rng):
    for _ in range(5):
        problem, x = drawn(rng, *SHAPES[shape])
        found = solve_problem(problem, eps_abs=1e-12)
        assert found.found
        if problem.G is not None:  # an infinite bound is none
            P, q, G, h, *rest = problem.unpack()
            both = np.concatenate([G, -G]), np.concatenate([h, np.full(len(h), np.inf)])
            more = solve_problem(qpsolvers.Problem(P, q, *both, *rest), eps_abs=1e-12)
            assert_close(more.x, found.x, atol=1e-10)
        assert found.is_optimal(1e-11)
        assert found.z is None or np.min(found.z, initial=0.0) >= 0.0
        value, right = (0.5 * v @ problem.P @ v + problem.q @ v for v in (found.x, x))
        assert abs(value - right) < 1e-10 * (1.0 + abs(right))
        if shape != "singular P":  # else there may be others
            assert_close(found.x, x, atol=1e-10)


def test_contradicting_constraints_and_programs_without_a_minimum_have_no_answer():
    for problem in (
        qpsolvers.Problem(np.eye(2), np.zeros(2), lb=np.ones(2), ub=np.zeros(2)),
        qpsolvers.Problem(np.zeros((2, 2)), np.ones(2), -np.eye(2)[:1], np.zeros(1)),
    ):
        assert not solve_problem(problem).found
    with pytest.raises(np.linalg.LinAlgError):  # not convex
        solve_problem(qpsolvers.Problem(-np.eye(2), np.zeros(2), lb=np.zeros(2)))


def test_the_set_of_control_is_read_solved_and_judged(tmp_path, rng):
    for name in "AB":
        drawn(rng, *SHAPES["plain"])[0].save(str(tmp_path / f"{name}.npz"))
    found = CliRunner().invoke(typed(mpc.main), [str(tmp_path), "--peers", "--out", str(tmp_path / "out.md")])
    assert found.exit_code == 0, found.output
    page = (tmp_path / "out.md").read_text()
    assert "| gemproj | 2 of 2 | 2 of 2 |" in page
    assert all(f"| {name} |" in page for name in boards.PEERS if name in qpsolvers.available_solvers)
    qpsolvers.Problem(np.eye(2), np.zeros(2), lb=np.ones(2), ub=np.zeros(2)).save(str(tmp_path / "C.npz"))
    found = CliRunner().invoke(typed(mpc.main), [str(tmp_path)])
    assert found.exit_code == 1, found.output
    assert "2 of 3" in found.output


@pytest.mark.parametrize("command", [mpc, maros_meszaros, gem_script])
def test_a_folder_that_is_not_there_is_named(command):
    found = CliRunner().invoke(typed(command.main), ["nowhere"])
    assert found.exit_code == 2
    assert "nowhere" in found.output


def test_a_file_of_maros_and_meszaros_is_read(tmp_path):
    """Equalities, bounds on both sides and on none; 1e20 is infinity."""
    P, q = np.array([[2.0, 0.5], [0.5, 1.0]]), np.array([-1.0, 3.0])
    A = np.array([[1.0, 1.0], [1.0, -1.0], [2.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    l, u = np.array([-1.0, 0.5, -1e20, 0.0, -1e20]), np.array([4.0, 0.5, 3.0, 1e20, 2.0])  # noqa: E741
    given = {"P": scipy.sparse.csc_matrix(P), "A": scipy.sparse.csc_matrix(A)}
    scipy.io.savemat(tmp_path / "TWO.mat", {**given, "q": q[:, None], "l": l[:, None], "u": u[:, None]})
    problem = maros_meszaros.read(tmp_path / "TWO.mat")
    assert_close(problem.P, P, atol=0)
    assert_close(problem.q, q, atol=0)
    assert_close(np.column_stack([problem.G, problem.h]), [[1, 1, 4], [2, 1, 3], [-1, -1, 1]], atol=0)
    assert_close(np.column_stack([problem.A, problem.b]), [[1, -1, 0.5]], atol=0)
    assert problem.lb.tolist() == [0.0, -np.inf]
    assert problem.ub.tolist() == [np.inf, 2.0]
    chosen = [maros_meszaros.chosen(problem, subset) for subset in maros_meszaros.Subset]
    assert chosen == [True, True, True]
    problem.P = np.diag([1.0, 0.0])
    assert not maros_meszaros.chosen(problem, maros_meszaros.Subset.posdef)
    found = CliRunner().invoke(typed(maros_meszaros.main), [str(tmp_path)])
    assert found.exit_code == 0, found.output


def test_cones_are_written_with_the_right_answers(tmp_path):
    """Those of rational arithmetic, for rows and gradients of size one."""
    gradient_cones.write(tmp_path, repeats=1, largest=3)
    paths = sorted(tmp_path.glob("*.npz"))
    assert len({path.stem.partition("-0")[0] for path in paths}) >= 10
    for path in paths:
        problem, x = qpsolvers.Problem.load(str(path)), np.load(path)["x"]
        assert np.linalg.norm(problem.q) == pytest.approx(1.0)
        assert np.linalg.norm(problem.G, axis=1).max() == pytest.approx(1.0)
        right = np.array(rational_projection(-problem.G, -problem.q), dtype=float)
        assert_close(x, right, atol=1e-15)


@pytest.mark.parametrize("name", ["gemproj", *batched.LOOPS, *batched.VMAPS])
def test_batches_are_solved_and_wrong_answers_are_seen(name):
    if name != "gemproj":
        pytest.importorskip(name)
    K, b = batched.draw(20, 4)
    makers = {**batched.LOOPS, **{k: make(4) for k, make in batched.VMAPS.items() if k == name}}
    lam = {"gemproj": batched.ours, **makers}[name](K, b)
    assert batched.residual(K, b, lam) < 1e-6
    assert batched.residual(K, b, 1.01 * lam + 0.01) > 1e-3


def typed(main):
    """Return a command of a script as its users call it."""
    import typer

    app = typer.Typer()
    app.command()(main)
    return app
