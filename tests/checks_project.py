"""What each process checks of `gemproj.torch.distributed.project`."""

import pytest
import torch
import torch.distributed as dist
from processes import all_reduces, check, expect, same_everywhere

import gemproj
from gemproj import PGD
from gemproj.torch.distributed import project

T, D = 3, 257


def problem(dtype=torch.float64):
    """Draw the whole problem, alike on every process, whose gradient violates constraints; which part is mine."""
    generator = torch.Generator().manual_seed(1)
    G = torch.randn(T, D, generator=generator, dtype=dtype)
    g = torch.randn(D, generator=generator, dtype=dtype) - 0.8 * G.sum(0)
    return G, g, torch.rand(D, generator=generator, dtype=dtype) + 0.5, mine()


def mine(d=D):
    """Return the columns of this process: an uneven part; process 1 has none."""
    edges = [0, d // 3, d // 3, d // 3 + 5, d]
    if dist.get_world_size() == 2:
        edges = [0, d, d]
    rank = dist.get_rank()
    return slice(edges[rank], edges[rank + 1])


def close(x, expected, dtype=torch.float64):
    atol = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype] * float(expected.norm())
    torch.testing.assert_close(x, expected, rtol=0, atol=atol)


@check(2)
def any_option():
    below = torch.tensor([-300.0, -0.2, -400.0], dtype=torch.float64)  # under and over G g
    for dtype in (torch.float64, torch.float32):
        G, g, w, at = problem(dtype)
        for options in (
            {},
            {"method": PGD(steps=3)},
            {"method": "agem"},
            {"method": "fista"},
            {"margin": 0.3},
            {"penalty": 0.2},
            {"metric": w},
            {"metric": w, "margin": 0.1, "penalty": 0.5},
            {"warm_start": torch.full((T,), 0.5, dtype=dtype)},
            {"h": torch.tensor([0.5, -0.2, 3.0], dtype=torch.float64)},
            {"equality": True, "h": below},
            {"equality": torch.tensor([True, False, True]), "h": below, "metric": w},
        ):
            expected = gemproj.project(G, g, **options)
            assert not torch.equal(expected, g)
            here = options | ({"metric": w[at]} if "metric" in options else {})
            x, sol = project(G[:, at], g[at], solution=True, **here)
            close(x, expected[at], dtype)
            assert x.dtype == dtype
            same_everywhere(sol.multipliers)
            same_everywhere(sol.error_bound())
            lam = gemproj.solve_dual(G, g, **options).multipliers
            close(sol.multipliers, lam, dtype)


@check(2)
def large_float32():
    """More columns than one tile; process 1 has none."""
    generator = torch.Generator().manual_seed(0)
    G = torch.randn(9, 500_000, generator=generator)
    g = torch.randn(500_000, generator=generator) - 0.1 * G.sum(0)
    at = mine(500_000)
    x, sol = project(G[:, at], g[at], solution=True)
    close(x, gemproj.project(G, g)[at], torch.float32)
    same_everywhere(sol.error_bound())


@check(2)
def blocks_out_and_rows_of_any_norm():
    G, g, w, at = problem()
    expected = gemproj.project(G, g, metric=w)[at]

    def blocks(a):
        return [a[..., at][..., :11], a[..., at][..., 11:]]

    x = project(blocks(G), blocks(g), metric=blocks(w))
    assert isinstance(x, list)
    close(torch.cat(x), expected)
    named = [dict(zip("ab", blocks(a), strict=True)) for a in (G, g, w)]
    close(torch.cat(list(project(named[0], named[1], metric=named[2]).values())), expected)
    out = torch.empty_like(g[at])
    version = out._version
    assert project(G[:, at], g[at], metric=w[at], out=out) is out
    assert out._version > version  # by which autograd refuses to use what was there before
    close(out, expected)
    own = g[at].clone()
    project(G[:, at], own, metric=w[at], out=own)
    close(own, expected)
    close(project(G[:0, at], g[at]), g[at])  # without constraints
    # Squares outside of the range of float64 are measured in units, as on one process, where they fit.
    for scale in (1e-60, 1e60):
        close(project(scale * G[:, at], g[at]), gemproj.project(G, g)[at])


@check(4)
def own_group():
    """A group of some processes; the others do something else."""
    G, g, *_ = problem()
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        at = slice(0, 100) if dist.get_rank() else slice(100, D)
        close(project(G[:, at], g[at], group=group), gemproj.project(G, g)[at])


@check(2, 4)
def exchanges_t_squared_numbers():
    G, g, _, at = problem()
    with all_reduces() as seen:
        project(G[:, at], g[at])
    assert [n for dtype, n in seen if dtype == torch.float64] == [T * T + T + 1], seen  # K, b and |g|^2
    assert sum(n for dtype, n in seen if dtype != torch.float64) <= 3, seen


@check(2)
def errors_on_every_process():
    G, g, w, at = problem()
    odd = dist.get_rank() == 0  # process 0 has columns, process 1 has none
    with pytest.raises(ValueError, match="disagree on the number of constraints"):
        project(G[odd:, at], g[at])
    bad = G.clone()
    for value in ("nan", "inf"):
        bad[1, 0] = float(value)
        with pytest.raises(ValueError, match="G is not finite: row 1"):
            project(bad[:, at], g[at])
    with expect(odd, ValueError, "g must have shape"):
        project(G[:, at], g[at][odd:])
    zero = w.clone()
    zero[0] = 0.0
    with expect(odd, ValueError, "metric must be pos"):
        project(G[:, at], g[at], metric=zero[at])
    with expect(odd, ValueError, "out must"):
        project(G[:, at], g[at], out=torch.empty(len(g[at]) + odd, dtype=g.dtype))
    with expect(odd, ValueError, "h must be a number or have shape"):
        project(G[:, at], g[at], h=torch.zeros(len(G) + odd))
    with pytest.raises(TypeError, match=r"group must be a .*ProcessGroup.*; found list"):
        project(G[:, at], g[at], group=[0, 1])
    with expect(odd, TypeError, r"G\[0\] must be an"):
        project([1.0] if odd else G[:, at], g[at])
    both, h = torch.cat([G, -2.0 * G[1:2]]), torch.tensor([0.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"h is infeasible: .* in rows 1, 3 at once"):
        project(both[:, at], g[at], h=h)
    with pytest.raises(ValueError, match=r"h is infeasible"):
        project(both[:, at].float(), g[at].float(), h=h)
    close(project(both[:, at], g[at], h=h, penalty=0.5), gemproj.project(both, g, h=h, penalty=0.5)[at])
    with pytest.raises(ValueError, match="one problem; found a batch"):
        project(G[None, :, at], g[None, at])
