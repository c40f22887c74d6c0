"""Errors name the argument, what was found and what to do."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided
from problems import assert_close

from gemproj import FISTA, GEM2017, OSQP, PGD, Quadprog, combine, gram, project, solve_dual, solve_gram

G, g = np.eye(3, 5), -np.ones(5)
TENSORS, META = (torch.eye(3, 5), -torch.ones(5)), torch.ones(5, device="meta")
OTHER, READ_ONLY = np.empty(5), np.empty(5)
READ_ONLY.setflags(write=False)
SCALARS = np.ones(3)  # whose entries are no arrays

MASKED = np.ma.masked_array(np.ones(3), [False, True, False])
with torch.inference_mode():
    INFERENCE = torch.empty(5)


class Sharded(torch.Tensor):
    device_mesh = None  # by which a DTensor is told


SHARDED = TENSORS[0].as_subclass(Sharded)

BIG, SQUARE = 1e160 * np.eye(3, 5), np.ones((3, 3, 5))
WRONG_VALUES = [
    (lambda: project(BIG, g), "rows 0, 1, 2, which hold .*squares overflow; scale it down"),
    (lambda: project(G.T, g), "If G has one column per constraint, pass G.T."),
    (lambda: project(G.T, g[:, None]), r"pass G.T. If g is a column, pass g\[:, 0\]."),
    (lambda: project(G[:1], g[:, None]), r"found \(\d+, 1\). If g is a column"),
    (lambda: solve_gram(np.array([[1.0, 0.5], [0.2, 1.0]]), np.ones(2)), "K must be .* symmetric: found"),
    (lambda: solve_gram(np.array([[1.0, 1.0], [1.0, 0.0]]), np.ones(2)), "K must be .* semidefinite"),
    (lambda: solve_gram(np.eye(2), np.ones(2), np.array(-1.0)), "gg must be .*; found -1"),
    (lambda: solve_gram(np.full((2, 2), np.nan), np.ones(2)), "K is not finite: rows 0, 1, which hold NaN"),
    (lambda: solve_gram(np.eye(2), np.array([[1.0, 1.0], [1.0, np.inf]])), "b of problem 1 is not finite"),
    (lambda: solve_gram(np.array([[1.0, np.nan], [np.nan, 1.0]]), np.ones(2)), "K and b are not finite"),
    (lambda: solve_gram(np.eye(2), np.ones(2), np.array(np.nan)), "gg must be .*; found nan"),
    (lambda: project(G, g, equality=np.ones(2, bool)), r"equality must be True, False or have shape \(3,\)"),
    (lambda: project(*TENSORS, out=INFERENCE), "out was made in inference mode"),
    (lambda: project(TENSORS[:1], TENSORS[:1], out=TENSORS[:1]), "out is an array of G, .*; pass a copy"),
    (lambda: combine(SQUARE, SQUARE, np.ones((3, 3, 3)), out=SQUARE), "out is an array of G"),
    (lambda: project(G, g[:4]), r"g must have shape \(5,\) or .*found \(4,\)"),
    (lambda: project(G[0], g), r"G must have shape \(..., t, d\).*found \(5,\)"),
    (lambda: project(np.stack([G, G]), np.stack([g] * 3)), "leading dimensions of G .* do not broadcast"),
    (lambda: project([G, G], [g]), "g has 1 blocks but G has 2"),
    (lambda: project({"a": G}, {"b": g}), "same keys; only in one of them: 'a', 'b'"),
    (lambda: project([], []), "G has no blocks.*Without any constraint, g is its own projection"),
    (lambda: project(g, G), r"G must have shape .*G and g seem to be exchanged"),
    (lambda: project([G, G[:2]], [g, g]), r"t = 3; G\[1\] has shape \(2, 5\), g\[1\] has shape"),
    (lambda: project({"w": G}, {"w": g[:2]}), r"Blocks must have .*g\['w'\] has shape \(2,\)"),
    (lambda: project(G, g, method="gem"), "method 'gem' is unknown; the names are 'exact'"),
    (lambda: project(G, g, margin=np.array([0.0, -1.0, 0.0])), "margin must be finite and .*; found -1"),
    (lambda: project(G, g, margin=np.ones(1)), r"margin must be .* \(3,\), .*found \(1,\)"),
    (lambda: project(G, g, h=1e300), r"h must be finite and below 1e280, .*; found 1e\+300"),
    (lambda: project(G, g, equality=True, method="agem"), "equality cannot be combined with method AGEM"),
    (lambda: project(G, g, h=np.ones(3), method="gem2017"), "h cannot be combined with method GEM2017"),
    (lambda: solve_gram(G, g), r"K must be a Gram matrix of shape \(..., t, t\); found \(3, 5\)"),
    (lambda: solve_gram(1.9 * np.eye(3) - 0.9, np.ones(3)), "K must be .* semidefinite.*negative eigenvalue"),
    (lambda: solve_gram(np.eye(3), g), r"b must have shape \(..., 3\), .*found \(5,\)"),
    (lambda: solve_gram(np.eye(2), np.ones((2, 2)), np.ones(3)), r"gg must have shape \(2,\)"),
    (lambda: project(G, g, margin=float("inf")), "margin must be finite and at least 0; found inf"),
    (lambda: project(G, g, penalty=-1.0), "penalty must be at least 0; found -1"),
    (lambda: project(G, g, margin=1e155), "margin is too large: the square of .* overflows"),
    (lambda: project(G, g, margin=2.0, penalty=1.0), "penalty must be at least margin"),
    (lambda: project(G, g, margin=0.5, method="gem2017"), "margin cannot be combined with.*GEM2017"),
    (lambda: project(G, g, penalty=1.0, method=lambda K, b, w: b), "penalty cannot be combined"),
    (lambda: project(G, g, warm_start=np.ones(2)), r"warm_start must have shape \(3,\).*found \(2,\)"),
    (lambda: project(G, g, out=np.empty(4)), r"out must have the shape and dtype of g, \(5,\) float64"),
    (lambda: project(G, g, out=np.empty(5, np.float32)), "found .* float32"),
    (lambda: project(G, g, metric=np.ones(4)), r"metric must have the shape of g, \(5,\)"),
    (lambda: project(G, g, metric=np.eye(5) + 1), r"found \(5, 5\). For a dense W .* solve_gram"),
    (lambda: project(G, g, metric=np.zeros(5)), "metric must be positive and finite everywhere"),
    (lambda: project(G, g, metric=np.full(5, np.inf)), "metric must be positive and finite"),
    (lambda: project([G, G], [g, g], out=[g, g[:2]]), r"out\[1\] must have the shape"),
    (lambda: project(G, g, out=READ_ONLY), "out is read-only"),
    (lambda: project([G, SCALARS], [g, SCALARS[0]], out=[g + 0.0, SCALARS[0]]), r"out\[1\] is read-only"),
    (lambda: project([G, G], [g, g], out=[OTHER, OTHER]), "out has one array for several blocks"),
    (lambda: project(G, g, metric=np.full(5, 1e-320)), r"G / sqrt\(metric\) is not finite: rows 0, 1, 2"),
    (lambda: project(*TENSORS, out=META), "out is on device meta but g is on cpu"),
    (lambda: project(G, g, method=lambda K, b, w: b * np.nan), "multipliers that are not finite"),
    (lambda: combine(G, g, np.ones(2)), r"multipliers must have shape \(3,\).*found \(2,\)"),
    (lambda: combine(G, g, np.array([1.0, np.nan, 0.0])), "multipliers must be finite; found .*nan"),
    (lambda: gram(TENSORS[0], META), "G is on device cpu but g is on meta"),
    (lambda: PGD(steps=np.int64(-3)), "steps must be at least 1; found -3"),
    (lambda: PGD(step_size="fast"), "step_size must be 'safe' or 'power'; found 'fast'"),
    (lambda: PGD(c=0.0), "c must be finite and above 0"),
    (lambda: FISTA(steps=0), "steps must be at least 1"),
    (lambda: Quadprog(ridge=-1.0), "ridge must be finite and at least 0"),
    (lambda: OSQP(eps=0.0), "eps must be finite and above 0"),
    (lambda: GEM2017(memory_strength=-0.1), "memory_strength must be finite and at least 0"),
]
WRONG_TYPES = [
    (lambda: project([G], [g], out=[None]), r"out\[0\] is None; pass an array to write to"),
    (lambda: project(G, g, method=lambda K, b, w: None), "found None"),
    (lambda: project(G, g, method=lambda K, b, w: b[:1]), "must return real multipliers of the type and"),
    (lambda: project(G, g, method=lambda K, b, w: np.ma.array(b)), "must return .*found MaskedArray"),
    (lambda: PGD(steps=1.5), "steps must be an integer; found 1.5"),
    (lambda: project(G, g, method=lambda K, b, w: b * 1j), "must return real multipliers .*complex128"),
    (lambda: PGD(power_iterations=True), "power_iterations must be an integer"),
    (lambda: OSQP(max_iter="many"), "max_iter must be an integer; found 'many'"),
    (lambda: GEM2017(eps="tiny"), "eps must be a number"),
    (lambda: project(G, g, h=MASKED), r"h must not be a masked array; pass h.filled\(0.0\)"),
    (lambda: project(G, g, h=1j * np.ones(3)), "h must be a number or an array .*; found array"),
    (lambda: project(G, g, h=[[0, 0], [0]]), "h must be a number or an array of one number per constraint"),
    (lambda: project(G, g, equality=None), "equality must be True, False or an array.*found None"),
    (lambda: project(TENSORS[0].to_sparse(), TENSORS[1]), "Tensors must be dense; found a sparse"),
    (lambda: project(SHARDED, TENSORS[1]), "Tensors must be local; found a DTensor"),
    (lambda: project(SHARDED, TENSORS[1].clone().requires_grad_()), "Tensors must be local; found a DTensor"),
    (lambda: project(TENSORS[0].to("meta"), META), "Tensors must be dense; .* meta tensor"),
    (lambda: project(TENSORS[0].to(torch.float8_e5m2), TENSORS[1]), "G must have a real floating.*float8"),
    (lambda: project(G.astype(int), g), "G must have a real floating-point dtype; found int64"),
    (lambda: project(G, g.astype(complex)), "g must have a real floating-point dtype; found complex"),
    (lambda: project([[1.0, 0.0]], [1.0]), r"G\[0\] must be an array.*found list.*numpy.asarray"),
    (lambda: project(3.0, g), "G must be an array.*found float"),
    (lambda: project(torch.eye(3, 5), g), "one library; found numpy.ndarray, torch.Tensor"),
    (lambda: project([G], iter([g])), "g must be an array .*, or a list, .* found list_iterator"),
    (lambda: project(G, g, method=PGD), r"write PGD\(\), not PGD"),
    (lambda: project(G, g, method=7), "method must be a name, a Method or a callable"),
    (lambda: solve_dual(G, g, steps=3), "steps"),
    (lambda: project(G, g, equality=np.ones(3)), "equality must be True, False or an array of one boolean"),
    (lambda: solve_gram([[1.0]], np.ones(1)), "K must be an array"),
    (lambda: project(G, g, warm_start=torch.ones(3)), "of the other arrays, numpy; found Tensor"),
    (lambda: project(G, g, warm_start=[1, 1, 1]), "warm_start must be an array.*found list"),
    (lambda: project(G, g, out=torch.empty(5)), "out must be of the library of g"),
    (lambda: project(np.ma.array(G), g), "G must not be a masked array"),
    (lambda: project(G, g, warm_start=np.ones(3, complex)), "warm_start must have a real"),
]


@pytest.mark.parametrize(
    ("error", "call", "text"),
    [*((ValueError, *case) for case in WRONG_VALUES), *((TypeError, *case) for case in WRONG_TYPES)],
)
def test_error_names_the_argument(error, call, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("library", ["np", "torch"])
def test_common_layouts_that_are_wrong_say_what_to_pass(library):
    xp = {"np": np, "torch": torch}[library]
    w, v, count = xp.ones((2, 3)), xp.ones(4), xp.ones((), dtype=xp.int64)
    for kind in (list, tuple):  # what torch.autograd.grad returns for each task
        tasks = kind([kind([w, v]), kind([-w, v])])
        advice = r"rows = \[" + library + r"\.stack\(b\) for b in zip\(\*G\)\]"
        with pytest.raises(TypeError, match=rf"G\[0\] is a {kind.__name__} of arrays.*{advice}"):
            project(tasks, kind([w, v]))
        x = project([xp.stack(b) for b in zip(*tasks, strict=True)], [w, v])
        assert [tuple(b.shape) for b in x] == [(2, 3), (4,)]
    rows, counts = [xp.stack([w, -w]), xp.stack([v, v])], xp.stack([count, count])
    named = {"w": w, "bn.count": count}
    for G, g, text in (
        (rows, [w, None], r"g\[1\] is None.*allow_unused=True, materialize_grads=True, or pass zeros"),
        (rows, {"w": w, "v": None}, r"g\['v'\] is None"),
        ([[w, None], [w, v]], [w, v], r"G\[0\]\[1\] is None"),
        ({"w": rows[0], "bn.count": counts}, named, r"G\['bn.count'\] .*int64.*leave it out"),
        ({"w": rows[0], "bn.count": rows[1]}, named, r"g\['bn.count'\] .*int64. Convert it first, or leave"),
        (rows, xp.ones(10), r"g must be a sequence .* Pass g in blocks, of the shapes of G\[k\]\[0\], or fl"),
        ([v, v], v, "g must be a sequence .* If G is a list of rows, stack them"),
        ([w, v], [w, v[:3]], r"here t = 2 and m = 2; G\[1\] has shape \(4,\), g\[1\]"),
        ([w, v], [w, v], r"G\[1\] has shape .* G needs a leading axis of size 1"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            project(G, g)


@pytest.mark.parametrize("library", ["np", "torch"])
def test_out_may_have_any_strides_without_overlap(library):
    memory = np.zeros(200)

    def cut(shape, strides, start=0):
        if library == "torch":
            return torch.from_numpy(memory).as_strided(shape, strides, start)
        return as_strided(memory[start:], shape, [8 * step for step in strides])

    G, g = np.eye(4)[:, None, :3] * np.ones((4, 3)), -np.ones((4, 3))  # four problems
    if library == "torch":
        G, g = map(torch.tensor, (G, g))
    exotic = [(5, 6), (4, 7), (5, 12)]  # refused, although no two entries share memory
    for strides in (*exotic, (3, 1), (1, 4), (20, 5), (1, 0), (0, 1), (2, 3), (1, 1), (2, 1)):
        places = np.add.outer(strides[0] * np.arange(4), strides[1] * np.arange(3))
        out = cut((4, 3), strides)
        if len(np.unique(places)) == 12 and strides not in exotic:
            assert project(G, g, out=out) is out
            assert_close(np.asarray(out), np.asarray(project(G, g)), atol=0)
        else:
            with pytest.raises(ValueError, match=r"out has entries that share memory.*pass a contiguous"):
                project(G, g, out=out)
    if library == "np":
        out = memory[11::-1].reshape(4, 3)[:, ::-1]
        assert_close(project(G, g, out=out), project(G, g), atol=0)
        empty = np.ones((2, 0)), np.ones(300)[:0:-100][:0]  # which shares no memory, whatever its strides are
        for G, out in (empty, (np.ones((0, 2, 3)), np.ones((5, 30))[:0, ::10])):
            assert project(G, np.ones(out.shape), out=out) is out


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite_are_named(host, value):
    bad = np.array(G)
    bad[1, 2] = value
    with pytest.raises(ValueError, match=r"G is not finite: row 1, which"):
        project(host.array(bad), host.array(g))
    batch = np.stack([G, bad])
    with pytest.raises(ValueError, match="row 1 of problem 1"):
        project(host.array(batch), host.array(np.stack([g, g])))
    vector = np.array(g)
    vector[0] = value
    with pytest.raises(ValueError, match="g is not finite"):
        project(host.array(G), host.array(vector))


@pytest.mark.parametrize("value", [np.inf, 1e200])
def test_what_is_too_large_far_apart_is_told_without_warnings(value, monkeypatch, any_size_in_threads):
    """Warnings are errors here: of sums over parts of the columns, in whichever thread."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    G, g = np.ones((2, 400_000)), np.ones(400_000)
    G[:, 10], G[0, 300_000], G[1, 300_000] = value, value, -value
    with pytest.raises(ValueError, match="rows 0, 1"):
        project(G, g)
    assert not np.isfinite(np.diagonal(gram(G, g).K)).any()


def test_gram_matrices_as_they_are_rounded(rng):
    """Repeated rows summed in float32, rows of length zero, no rows, and a penalty below margin where none is."""
    rows = rng.standard_normal((4, 200)).astype(np.float32)
    rows[3], rows[2] = rows[0], 0.0
    for K in ((rows @ rows.T).astype(float), np.zeros((0, 0))):
        assert float(solve_gram(K, -np.ones(len(K))).kkt_residual()) < 1e-9
    options = {"margin": np.array([2.0, 0.0, 0.0]), "penalty": 1.0}
    assert_close(project(G, g, equality=np.array([True, False, False]), **options)[:3], 0.0, atol=1e-15)


@pytest.mark.parametrize("size", [1e-141, 1e-160, 1e-200, 5e-324])
def test_rows_and_gradients_below_1e140_count_as_zero(host, size):
    """Their squares have lost digits."""
    rows, vector = np.array([[1.0, 2.0], [3.0, -1.0]]), np.array([-1.0, 0.5])
    tiny = np.array([[1.0], [size]]) * rows
    for G, g in ((tiny, vector), (np.stack([tiny, rows]), np.stack([vector, vector]))):
        kept = np.where(np.abs(G) > 1e-140, G, 0.0)
        sol, x = solve_dual(host.array(G), host.array(g)), host.project(G, g)
        assert_close(x, project(kept, g), atol=1e-15)
        assert float(np.max(host.numpy(sol.kkt_residual()))) < 1e-15
    for columns in (1, 2):  # no more of them than rows, or more
        G, g = np.tile(rows, columns), size * np.tile(vector, columns)
        np.testing.assert_array_equal(host.project(G, g), g)
    with pytest.raises(ValueError, match=r"h is infeasible.*row 1"):
        host.project(tiny, vector, h=host.array([0.0, 1.0]))


@pytest.mark.parametrize("solve", [solve_dual, solve_gram])
def test_a_solution_keeps_no_array_of_the_caller(host, solve):
    options = {"h": [-0.1, -0.2], "margin": [0.1, 0.0], "penalty": [5.0, 6.0]}
    options = {name: host.array(a) for name, a in options.items()}
    arrays = [host.array(a) for a in (np.eye(2), [-1.0, 1.0], 2.0)[: 3 if solve is solve_gram else 2]]
    sol, seen = solve(*arrays, **options), []
    for _ in range(2):
        values = sol.slack(), sol.kkt_residual(), sol.lower, sol.upper, sol.gram.K
        seen.append([host.numpy(a).copy() for a in values])
        for a in (*arrays, *options.values()):
            a *= 7
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)


def test_solutions_pickle_and_tell_how_they_ended():
    sol = solve_dual(np.eye(3), -np.ones(3))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_close(pickle.loads(pickle.dumps(sol, protocol)).slack(), 0.0, atol=1e-15)
    assert repr(sol).startswith("DualSolution(optimal, t=3, 3 of 3 active, KKT residual ")
    assert "2 of 2 problems optimal, t=3" in repr(solve_dual(np.eye(3), -np.ones((2, 3))))
    assert "approximate" in repr(solve_dual(np.eye(3), -np.ones(3), method=PGD(steps=1)))
    with pytest.raises(AttributeError):
        sol.multipliers = np.zeros(3)


def test_arrays_that_cannot_be_written_are_to_be_converted(monkeypatch):
    strict = pytest.importorskip("array_api_strict")
    monkeypatch.setattr("array_api_compat.is_jax_array", lambda a: True)
    G, g = strict.ones((2, 3)), strict.ones(3)
    with pytest.raises(TypeError, match=r"G must be an array \(NumPy, torch, CuPy, .*numpy\.asarray"):
        project(G, g)
    with pytest.raises(TypeError, match="K must be an array"):
        solve_gram(strict.eye(2), strict.ones(2))


def test_blocks_that_may_be_one_row_are_told():
    """The weight and the bias of a layer have the same leading axis, which then counts as that of rows."""
    row, gradient = [G, G[:, 0]], [-G, G[:, 0]]
    with pytest.warns(RuntimeWarning, match=r"g counts as 3 gradients.*\[b\[None\] for b in G\]"):
        project(row, gradient)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        project(row, row)
        project([b[None] for b in row], gradient)
        project([b[:1] for b in row], [b[:1] for b in gradient])  # both readings have the same answer
