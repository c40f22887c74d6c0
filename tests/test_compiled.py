"""Compiled loops in every layout of memory, bit for bit between thread counts, and the threads themselves."""

import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from problems import assert_close

import gemproj
from gemproj import Exact, Status, combine, gram, project, solve_dual, solve_gram
from gemproj._problem import check_problem
from gemproj.backends import select
from gemproj.backends.numba import installed

if not installed() or os.environ.get("GEMPROJ_BACKEND", "numba") != "numba":
    pytest.skip("numba is missing or switched off", allow_module_level=True)

from gemproj.backends.numba.threads import share


def located(G, g):
    return select(check_problem(G, g)).name == "numba"


def layouts(rng, t, d, dtype):
    """Yield ways in which t rows of d columns, and g, can lie in memory."""
    G, g = rng.standard_normal((t, d)).astype(dtype), rng.standard_normal(d).astype(dtype)
    yield "contiguous", G, g
    wide = np.zeros((2 * t, d + 5), dtype)
    wide[::2, 3 : d + 3] = G
    yield "padded and strided", wide[::2, 3 : d + 3], g
    yield "reversed", G[::-1], g
    yield "columns", np.asfortranarray(G), g
    tall = np.zeros((d, t + 3), dtype)
    tall[:, 2 : t + 2] = G.T
    yield "padded columns", tall[:, 2 : t + 2].T, g
    yield "every second entry", np.repeat(G, 2, axis=1)[:, ::2], g
    yield "repeated", np.broadcast_to(G[:1], (t, d)), g
    yield "repeated columns", np.broadcast_to(G[:, :1], (t, d)), g
    many = rng.standard_normal((*((7, 13) if t * d < 30_000 else (6,)), d)).astype(dtype)
    yield "many gradients", G, many
    yield "many gradients, columns", np.asfortranarray(G), many
    cuts = sorted({0, d // 3, d // 2, d})
    parts = list(itertools.pairwise(cuts))
    yield "blocks", [G[:, a:b, None] for a, b in parts], [g[a:b, None] for a, b in parts]
    batch = np.stack([G, 2 * G, -G])[::2]
    yield "batch of columns", np.stack([G.T, -G.T]).swapaxes(-1, -2), np.stack([g, g])
    yield "batch", batch, np.stack([g, g, g, g])[::3]
    yield "batch of two dimensions", batch[:, None], np.stack([g, g])[:, None]
    pieces = np.array_split(np.arange(d), 9) if d > 40 else []
    if len({len(columns) for columns in pieces}) > 1:  # some of one shape, read together
        yield "small blocks", [G[:, c, None] for c in pieces], [g[c, None] for c in pieces]
    yield "one g for all", batch, np.broadcast_to(g, (2, d))


def tensors(host, rng, t, d, dtype):
    """Yield tensors with one constraint per column, as GEM's memories are, and one per row."""
    memories, g = host.array(rng.standard_normal((d, t)), dtype), host.array(rng.standard_normal(d), dtype)
    yield "tensors of columns", memories.t(), g
    yield "tensors of rows", memories.t().contiguous(), g


def check_formulas(host, G, g, dtype, rng, name=None):
    """Sums are in float64; x is rounded once, for bfloat16 to float32 first."""

    def wide(a):
        if isinstance(a, list):
            return np.concatenate([block[..., 0] for block in a], axis=-1).astype(float)
        return host.numpy(a)

    assert located(G, g), name
    rows, vector, K, b, gg = map(wide, (G, g, *gram(G, g)))
    t, tolerance = rows.shape[-2], 1e-13
    n, size = np.linalg.norm(rows, axis=-1), np.linalg.norm(vector, axis=-1)
    products = rows @ np.swapaxes(rows, -1, -2), np.einsum("...td,...d->...t", rows, vector)
    assert np.abs((K - products[0]) / n[..., None, :] / n[..., :, None]).max() < tolerance, name
    assert np.abs((b - products[1]) / n / size[..., None]).max() < tolerance, name
    assert_close(gg, size**2, rtol=tolerance, err_msg=name)
    np.testing.assert_array_equal(K, np.swapaxes(K, -1, -2))
    lam = rng.random(b.shape) * (rng.random(b.shape) < 0.6)
    x = combine(G, g, host.array(lam))
    if isinstance(G, np.ndarray) and G.flags.writeable and lam.ndim < G.ndim:
        unused, G[lam == 0] = G[lam == 0], np.nan  # rows of multiplier zero are not read
        np.testing.assert_array_equal(combine(G, g, lam), x, err_msg=name)
        G[lam == 0] = unused  # other layouts are made from the same memory
    assert (x[0] if isinstance(x, list) else x).dtype == (g[0] if isinstance(g, list) else g).dtype
    exact = vector + np.einsum("...t,...td->...d", lam, rows)
    nearest = host.numpy(host.array(exact, dtype))
    rounding = (t + 2) * 2.0**-52 * (np.abs(vector) + np.einsum("...t,...td->...d", lam, np.abs(rows)))
    assert np.all(np.abs(wide(x) - exact) <= np.abs(nearest - exact) + rounding), name


SMALL = [(1, 1), (2, 7), (3, 1025), (4, 3000), (7, 333), (10, 2049), (11, 999), (12, 500), (300, 600)]
LARGE = [(5, 70_001), (14, 17_610), (13, 150_000)]
FORMS = [("numpy", "float32"), ("numpy", "float64")]
FORMS += [("torch", dtype) for dtype in ("float32", "float64", "bfloat16")]


@pytest.mark.parametrize(("host", "dtype"), FORMS, indirect=["host"])
@pytest.mark.parametrize(("t", "d"), [*SMALL, *LARGE])
def test_formulas(host, t, d, dtype, rng):
    for name, G, g in layouts(rng, t, d, dtype) if host.name == "numpy" else tensors(host, rng, t, d, dtype):
        check_formulas(host, G, g, dtype, rng, name)


@pytest.mark.parametrize("host", ["numpy", "torch"], indirect=True)
@pytest.mark.parametrize("m", [(), (14,)])
@pytest.mark.parametrize(
    "shapes", [[(4, 3, 5), (7,), (), (4, 3, 5), (0, 2), (9, 31)], [(50, 60, 70)], [(2, 9000)] * 3]
)
def test_blocks_in_any_order_of_memory(host, shapes, m, rng):
    """Also some blocks that are read together, many gradients, and x in another order."""
    t = 3
    Gs, gs = ([rng.standard_normal((*lead, *shape)) for shape in shapes] for lead in ((t,), m))
    lam = np.broadcast_to(np.array([0.5, 0.0, 2.0]), (*m, t))
    both = ((Gs, (t,)), (gs, m))
    rows, g = (np.concatenate([a.reshape(*lead, -1) for a in some], -1) for some, lead in both)
    x = g + lam @ rows

    def seen(a, lead):
        """Return the array with the axes after `lead` in the opposite order of memory."""
        axes = [*range(lead), *reversed(range(lead, a.ndim))]
        made = host.array(a.transpose(axes).copy())
        return made.transpose(axes) if host.name == "numpy" else made.permute(axes)

    one = [seen(a, 1) for a in Gs], [seen(a, len(m)) for a in gs]
    assert located(*one)
    for some in (one, ([host.array(a) for a in Gs], one[1]), (one[0], [host.array(a) for a in gs])):
        K, b, gg = map(host.numpy, gram(*some))
        assert_close(K, rows @ rows.T, rtol=1e-12, atol=1e-9)
        assert_close(b, g @ rows.T, rtol=1e-12, atol=1e-9)
        assert_close(gg, np.sum(g * g, axis=-1), rtol=1e-12)
        for out in (None, [seen(np.zeros_like(a), len(m)) for a in gs], some[1]):
            found = combine(*some, host.array(lam), out=out)
            found = [host.numpy(a).reshape(*m, -1) for a in found]
            assert_close(np.concatenate(found, axis=-1), x, atol=1e-14)
        for block, a in zip(some[1], gs, strict=True):
            block[...] = host.array(a)


def test_not_a_number_stays_in_its_row(rng):
    G, g = rng.standard_normal((7, 3000)), rng.standard_normal(3000)
    clean = gram(G, g)
    G[3, 1234] = np.nan
    K, b, gg = gram(G, g)
    bad = np.arange(7) == 3
    np.testing.assert_array_equal(np.isnan(K), bad[:, None] | bad)
    np.testing.assert_array_equal(np.isnan(b), bad)
    np.testing.assert_array_equal(K[~bad][:, ~bad], clean.K[~bad][:, ~bad])
    assert gg == clean.gg


@pytest.mark.parametrize("host", ["torch"], indirect=True)
@pytest.mark.parametrize("scale", [1e-3, 1e30, 1e-39, 2e37])
def test_bfloat16_of_any_size(host, scale, rng):
    G, g = (host.array(scale * rng.standard_normal(shape), "bfloat16") for shape in ((3, 5000), 5000))
    check_formulas(host, G, g, "bfloat16", rng)
    g[:3] = host.array([np.nan, np.inf, -np.inf])
    np.testing.assert_array_equal(combine(G, g, host.array(rng.random(3)))[:3].float(), g[:3].float())


def unaligned(G, g):
    memory = np.zeros(G.nbytes + 1, np.uint8)
    memory[1:] = np.frombuffer(G.tobytes(), np.uint8)
    return memory[1:].view(np.float64).reshape(G.shape), g


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [
        (lambda G, g: (G, g, np.ones(60)), 1e-13),  # a metric
        (lambda G, g: (G.astype("f4"), g), 1e-6),
        (lambda G, g: (G.astype("f2"), g.astype("f2")), 1e-2),
        (lambda G, g: (G.astype(">f8"), g.astype(">f8")), 1e-13),
        (lambda G, g: (G.astype("longdouble"), g.astype("longdouble")), 1e-13),
        (lambda G, g: (G[:, ::-1].copy()[:, ::-1], g), 1e-13),
        (lambda G, g: unaligned(G, g), 1e-13),
    ],
)
def test_what_the_loops_cannot_read_is_read_portably(change, tolerance, rng):
    G, g = rng.standard_normal((3, 60)) - 0.3, rng.standard_normal(60) + 0.3
    rows, vector, metric = (*change(G, g), None)[:3]
    assert select(check_problem(rows, vector, metric)).name == "portable"
    assert_close(project(rows, vector, metric=metric), project(G, g), atol=tolerance)


@pytest.mark.parametrize("change", [lambda G, g: (G, g), unaligned, lambda G, g: (G[:, ::-1], g[::-1])])
def test_of_blocks_that_the_loops_cannot_read_only_g_is_copied(change, rng):
    rows, vector = rng.standard_normal((3, 60)) - 0.3, rng.standard_normal(60) + 0.3
    G, g = change(rows, vector)
    Gs, gs = ([a[..., i::3] for i in range(3)] for a in (G, g))
    assert located(Gs, gs) == (G is rows)
    for i, x in enumerate(project(Gs, gs)):
        assert_close(x, project(G.copy(), g.copy())[i::3], atol=1e-13)
    other = np.repeat(vector, 2)[::2]
    assert located(rows, other)
    np.testing.assert_array_equal(project(rows, other), project(rows, vector))


AHEAD = """
import numpy as np
from gemproj import combine, gram, project, solve_gram
from gemproj._selfcheck import check
from gemproj.backends.numba import loops, search

check()
functions = [loops.sum_products, loops.write_combinations, search._solve]
before = [len(function.signatures) for function in functions]
rng = np.random.default_rng(0)
for dtype in (np.float32, np.float64):
    for t, d in ((1, 50), (3, 50), (9, 140_000)):
        G, g = rng.standard_normal((t, d)).astype(dtype), rng.standard_normal(d).astype(dtype)
        ones = np.broadcast_to(1.0, t)  # cannot be written
        project(G, g)
        project(G.T.copy().T, g, penalty=0.5, warm_start=ones)
        project(G.reshape(1, t, d), g, equality=np.arange(t) > 1)
        project([G.reshape(t, 2, 1, -1)] * 2, [g.reshape(2, 1, -1)] * 2)
        project(np.repeat(G, 2, axis=1)[:, ::2], np.repeat(g, 2)[::2], out=np.repeat(g, 2)[1::2])
        gram(G, np.stack([g] * 3))
        for a in (G, g):
            a.flags.writeable = False
        project(G, g, margin=ones)
        combine(G, g, ones)
        K = G @ G.T
        K.flags.writeable = False
        solve_gram(K, G @ g)
assert [len(function.signatures) for function in functions] == before, (before, functions)
"""


COPIED = """
import sys
from gemproj.backends.numba import jit
import small
compiled = jit.compile_module(small, {"scale": lambda: 10.0})
assert (compiled.run(2.0), small.run(2.0)) == (float(sys.argv[1]), 2.0 * small.FACTOR)
hits, misses = (sum(counter.values()) for counter in compiled.run.stats[1:])
print(hits, misses, len(compiled.helper.signatures))
"""
SMALL_MODULE = """
FACTOR = 3.0
ENTRIES = ("run",)
def scale():
    return 1.0
def helper(x):
    return FACTOR * x * scale()
def run(x):
    return helper(x)
"""


def test_a_module_is_compiled_whole_and_cached_until_any_source_changes(tmp_path):
    package = tmp_path / "gemproj"
    shutil.copytree(Path(gemproj.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    small = tmp_path / "small.py"
    small.write_text(SMALL_MODULE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run(expected):
        command = [sys.executable, "-c", COPIED, str(expected)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return tuple(map(int, done.stdout.split()))

    assert run(60.0) == (0, 1, 1)  # compiled, with the function that it calls
    assert run(60.0) == (1, 0, 0)  # read from the disk
    # Another source that the loops may be compiled from, at the same time to the nanosecond and equally long.
    block = package / "backends" / "numba" / "block.py"
    before = block.stat()
    block.write_text(block.read_text().replace("_BUSY = 8", "_BUSY = 9"))
    os.utime(block, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert block.stat().st_size == before.st_size
    assert run(60.0) == (0, 1, 1)


def test_without_a_folder_for_the_cache_functions_are_compiled(monkeypatch):
    import numba

    from gemproj.backends.numba import jit

    made = numba.njit

    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return made(**options)

    monkeypatch.setattr(numba, "njit", njit)
    add = jit.entry(lambda a: a + 1)
    assert add(1) == 2
    assert add.stats.cache_path is None


def test_many_threads_may_project_at_once(rng, monkeypatch, any_size_in_threads):
    """And share out their work among others."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    G, g = rng.standard_normal((12, 12, 3000)), rng.standard_normal((12, 3000))
    alone = [project(rows, vector) for rows, vector in zip(G, g, strict=True)]
    with ThreadPoolExecutor(12) as pool:
        for i, found in enumerate(pool.map(lambda i: [project(G[i], g[i]) for _ in range(15)], range(12))):
            for x in found:
                np.testing.assert_array_equal(x, alone[i])


FORKED = """
import atexit, os
os.environ["OMP_NUM_THREADS"] = "3"
import numpy as np
from gemproj import project
G, g = np.ones((2, 1_000_000)), -np.ones(1_000_000)
x = project(G, g)
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(project(G, g), x) else 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
atexit.register(lambda: print(abs(project(G, g)).max()))
"""


@pytest.mark.parametrize("script", [AHEAD, FORKED])
def test_in_a_process_of_its_own(script):
    """Loops that are compiled ahead are those that are called, where nothing else has been compiled.

    A forked child has none of its parent's threads and must not wait for them; at the end Python starts none.
    """
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert script is AHEAD or float(done.stdout) < 1e-12


def test_autograd_learns_of_what_was_written():
    torch = pytest.importorskip("torch")
    w, g = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([-1.0, -1.0])
    y = (w * g).sum()
    project(torch.eye(2), g, out=g)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        g = -torch.ones(2)
        assert project(torch.eye(2), g, out=g).tolist() == [0.0, 0.0]


def test_outputs_that_are_not_plain_arrays(tmp_path, rng):
    G, g, gaps = rng.standard_normal((3, 60)) - 0.3, rng.standard_normal(60) + 0.3, np.zeros((60, 2))
    project(G, g, out=gaps[:, 1])
    assert_close(gaps[:, 1], project(G, g), atol=1e-15)
    assert not gaps[:, 0].any()
    mapped = np.memmap(tmp_path / "x", "f8", "w+", shape=(2,))
    assert project(np.eye(2), -np.ones(2), out=mapped) is mapped
    assert not mapped.any()
    x = project([np.ones((1, 2)), np.ones((1,))], [-np.ones(2), np.float64(-1.0)])
    assert_close(x[1], 0.0, atol=1e-15)


@pytest.mark.parametrize("host", ["numpy", "torch"], indirect=True)
def test_whoever_asks_the_exact_method_gets_the_compiled_search(host, rng, monkeypatch):
    """Which is that of `solve_gram`; and a method that derives from it is called."""
    monkeypatch.setattr("gemproj._search.search", None)  # in the form that Python runs

    class Handing(Exact):
        def solve(self, K, b, *given):
            found.append(b)
            return super().solve(K, b, *given)

    for t in (3, 12):
        rows, found = rng.standard_normal((2, t, 30)), []
        K, b = host.array(rows @ rows.swapaxes(1, 2)), host.array(rng.standard_normal((16, 2, t)))
        for one in ((K[0], b[0, 0]), (K[0], b[:, 0]), (K, b[0]), (K, b), (K, b[0, 0])):
            sol = solve_gram(*one)
            for lam in (Exact()(*one), solve_gram(*one, method=Handing()).multipliers):
                np.testing.assert_array_equal(lam, sol.multipliers)
        assert len(found) == 5


def test_search_tells_what_it_cannot_solve():
    def run(K, b, start=None):
        return Exact().solve(K, b, warm_start=start)

    assert run(np.eye(2), np.array([np.inf, -1.0])).status & Status.STALLED
    assert run(np.diag([np.inf, 1.0]), np.array([-1.0, -1.0])).status & Status.STALLED
    far = run(1e20 * np.eye(2), -1e-10 * np.ones(2), np.full(2, 1e300))  # overflows when scaled
    assert far.status == Status.OPTIMAL
    assert_close(far.multipliers, [1e-30, 1e-30], atol=0.0, rtol=1e-12)


def test_threads_make_each_call_once_and_stop_before_an_error_is_raised():
    """The caller may give up the arrays that threads still write to."""
    seen = []
    share(seen.append, 100, 4)
    assert sorted(seen) == list(range(100))
    running = threading.Semaphore(0)
    states = []

    def work(i):
        if i == 0:
            running.acquire()  # until another thread is at work
            raise KeyboardInterrupt
        states.append("began")
        running.release()
        time.sleep(0.05)
        states.append("ended")

    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            share(work, 50, 3)
        assert states.count("began") == states.count("ended") < 40


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers that send signals")
@pytest.mark.parametrize("name", ["at_every_instruction", "at_random"])
def test_interrupts_and_signal_handlers(name):
    """Neither an interrupt nor a signal handler that projects hangs."""
    command = [sys.executable, Path(__file__).with_name("checks_threads.py"), name]
    subprocess.run(command, check=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "3"})


@pytest.mark.parametrize("host", ["numpy", "torch"], indirect=True)
def test_nothing_of_a_problem_stays_in_memory(host, rng):
    gc.collect()
    gc.disable()
    try:
        for call in (gram, project, solve_dual):
            g = host.array(rng.standard_normal(9))
            G = host.array(rng.standard_normal((3, 9)))
            gone = weakref.ref(G)
            call(G, g)
            del G
            assert gone() is None, call
    finally:
        gc.enable()


def test_results_do_not_depend_on_freed_memory():
    # Freed memory is overwritten, large blocks of it are gone at once, and all threads share it.
    poisoned = {"MALLOC_PERTURB_": "165", "MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
    formulas = "formulas and (numpy-float64 or bfloat16) and not 70001 and not 17610"
    chosen = f"{formulas} or many_threads or number_of_threads"
    command = [sys.executable, "-m", "pytest", "-xqp", "no:cacheprovider", "-k", chosen]
    files = [Path(__file__).with_name(f"test_{name}.py") for name in ("compiled", "exact")]
    own = {"env": os.environ | poisoned, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([*command, *files], **own)
    assert done.returncode == 0, done.stdout
