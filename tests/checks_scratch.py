"""``python checks_scratch.py LIBRARY``: results of many sizes and of many threads beside plain NumPy.

A test runs this in a process where freed memory is overwritten or gone.
"""

import importlib
import sys
import threading

import numpy as np

from gemproj import combine, gram, project, solve_dual
from gemproj.backends.numba import backend


def convert(library, a):
    """Return an array of the library; a tensor shares memory and strides with a."""
    return a if library == "numpy" else importlib.import_module("torch").from_numpy(a)


def check_products(library, G, g, *, rounding=1e-12):
    """Compare all three stages with NumPy's sums in float64. G (t, d) or (m, t, d), g (d,) or (m, d)."""
    wide, eps = G.astype(np.float64), np.finfo(g.dtype).eps
    found = gram(convert(library, G), convert(library, g))
    K, b, gg = (np.asarray(a) for a in (found.K, found.b, found.gg))
    norms, size = np.linalg.norm(wide, axis=-1), np.linalg.norm(g.astype(np.float64), axis=-1)
    assert np.all(
        np.abs(K - wide @ wide.swapaxes(-1, -2)) <= rounding * norms[..., None] * norms[..., None, :]
    )
    assert np.all(
        np.abs(b - (wide @ g[..., None].astype(float))[..., 0]) <= rounding * norms * size[..., None]
    )
    assert np.all(np.abs(gg - size**2) <= rounding * size**2)
    lam = np.random.default_rng(1).random(b.shape) / norms
    x = np.asarray(combine(convert(library, G), convert(library, g), convert(library, lam)))
    expected = g + (lam[..., None, :] @ wide)[..., 0, :]
    assert np.abs(x - expected).max() <= 4 * eps * lam.shape[-1] * np.abs(expected).max()


def check_projection(library, G, g):
    """Check the optimality conditions of a projection in NumPy."""
    wide, eps = G.astype(np.float64), np.finfo(g.dtype).eps
    rows, vector = convert(library, G), convert(library, g)
    x, lam = (np.asarray(a) for a in (project(rows, vector), solve_dual(rows, vector).multipliers))
    norms = np.linalg.norm(wide, axis=1)
    size = np.linalg.norm(g) + lam @ norms
    slack = wide @ x / norms
    assert np.linalg.norm(x - (g + lam @ wide)) <= 10 * eps * size
    assert lam.min() >= 0
    assert slack.min() >= -10 * eps * size
    assert np.abs(lam * norms * slack).max() <= 10 * eps * size**2


def sizes(library):
    """Few and many rows, by rows and by columns, one and many gradients, batches and blocks."""
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        for t, d in ((1, 5), (2, 700), (3, 2100), (9, 1000), (40, 300), (100, 50), (204, 100), (300, 600)):
            G, g = rng.standard_normal((t, d)).astype(dtype), rng.standard_normal(d).astype(dtype)
            check_projection(library, G, g)
            for rows in (G, np.asfortranarray(G)):
                check_products(library, rows, g)
                for m in (3, 70):
                    check_products(library, rows, rng.standard_normal((m, d)).astype(dtype))
            check_products(library, rng.standard_normal((5, t, d)).astype(dtype), g - np.zeros((5, 1), dtype))
            places = [slice(0, d // 3), slice(d // 3, d)]
            parts = [[convert(library, a[..., at]) for at in places] for a in (G, g)]
            assert np.abs(np.asarray(gram(*parts).K) - G.astype(float) @ G.T).max() < 1e-10
        G, g = rng.standard_normal((1000, 2000)).astype(dtype), rng.standard_normal(2000).astype(dtype)
        check_products(library, G, g)
        check_products(library, G[:, :300], rng.standard_normal((6, 300)).astype(dtype))
    check_projection(library, G, g)
    # Sums of chunks in float32.
    G, g = rng.standard_normal((12, 1 << 17)).astype(np.float32), rng.standard_normal(1 << 17)
    check_products(library, G, g.astype(np.float32), rounding=1e-5)


def threads(library):
    """Many threads with problems of their own, and then one whose work is shared out among helpers."""
    rng = np.random.default_rng(0)
    G, g = rng.standard_normal((20, 12, 3000)), rng.standard_normal((20, 3000))
    failed, expected = (
        [],
        [project(convert(library, a), convert(library, b)) for a, b in zip(G, g, strict=True)],
    )

    def run(i):
        try:
            for _ in range(15):
                check_products(library, G[i], g[i])
                x = project(convert(library, G[i]), convert(library, g[i]))
                assert np.array_equal(np.asarray(x), np.asarray(expected[i]))
        except BaseException as error:
            failed.append(error)

    started = [threading.Thread(target=run, args=(i,)) for i in range(20)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    backend._WORTH_THREADS = 0
    for t, d in ((12, 200_000), (40, 20_000), (300, 20_000)):
        G, g = rng.standard_normal((t, d)), rng.standard_normal(d)
        check_products(library, G, g)
        check_products(library, G, rng.standard_normal((5, d)))
    if failed:
        raise failed[0]


if __name__ == "__main__":
    sizes(sys.argv[1])
    threads(sys.argv[1])
