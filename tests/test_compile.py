"""`torch.compile` around a projection: one graph, any shape, the same numbers and gradients."""

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from gemproj import PGD, project, solve_dual
from gemproj.torch import Keeper

BACKEND = "aot_eager"  # not inductor, which needs a C++ compiler: what matters is the graph that reaches it


def problem(d=10):
    torch.manual_seed(0)
    G = torch.randn(3, 5, d, dtype=torch.float64)
    return G, torch.randn(5, d, dtype=torch.float64) - G.sum(0)


def flat(method="exact", **options):
    """Return a call for arrays, between operations that are compiled with it."""
    return lambda G, g: 2.0 * project(G.flatten(1) * 1.0, g.flatten() * 1.0, method=method, **options)


def one_block(G, g):  # not one array: (t, 5, d) would be a batch
    metric, start = [torch.ones_like(g).cumsum(1)], torch.ones(3, dtype=g.dtype)
    return project([G * 1.0], [g * 1.0], metric=metric, warm_start=start)[0]


def named(G, g):  # with lists of numbers, which are not rounded
    options = {"h": [-0.1, -0.2, -0.3], "margin": [0.1, 0.2, 0.3], "equality": [False, True, False]}
    x = project({"a": G[:, :2], "b": G[:, 2:]}, {"a": g[:2], "b": g[2:]}, **options)
    return torch.cat([x["a"], x["b"]])


def written(G, g):
    x = torch.empty_like(g)
    project((G,), (g,), out=(x,), margin=np.float64(0.5))
    return x


CALLS = [flat(penalty=0.2, equality=True), one_block, named, written]


@pytest.mark.parametrize("call", CALLS)
def test_one_graph_with_the_numbers_and_gradients_of_eager_mode(call):
    compiled = torch.compile(call, fullgraph=True, backend=BACKEND, dynamic=True)
    for d, sign in ((10, 1.0), (10, -1.0), (12, 1.0)):  # with constraints active, and with none, where x is g
        G, g = problem(d)
        expected, found = call(G, sign * g), compiled(G, sign * g)
        # Blocks are put side by side, so their products are summed in another order.
        assert torch.equal(found, expected) or (call is named and torch.allclose(found, expected, rtol=1e-13))
    if call is not written:
        leaves = [a.requires_grad_() for a in problem()]
        expected, found = (torch.autograd.grad(f(*leaves).pow(3).sum(), leaves) for f in (call, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
        assert all(a.abs().max() > 1e-3 for a in found)


def test_a_start_that_requires_a_gradient_is_a_constant():
    start, factor = (torch.ones(n, dtype=torch.float64, requires_grad=True) for n in (3, 1))
    call = torch.compile(lambda G, g, start: project([G], [g], warm_start=start)[0], backend=BACKEND)
    (call(*problem(), start) * factor).sum().backward()
    assert start.grad is None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch looks at where a graph breaks
def test_other_methods_break_the_graph():
    torch.compiler.reset()
    call = flat(lambda K, b, warm_start: (-b / torch.diagonal(K)).clamp(min=0), margin=0.1)
    assert torch.equal(torch.compile(call, backend=BACKEND)(*problem()), call(*problem()))
    with pytest.raises(ValueError, match="Only method 'exact'"):
        torch.compile(call, backend=BACKEND)(*(a.requires_grad_() for a in problem()))


@pytest.mark.filterwarnings("ignore:Dynamo")  # it looks into caches
def test_solutions_compile():
    def call(G, g):
        sol = solve_dual(G, g)
        return sol.multipliers, sol.kkt_residual(), sol.error_bound()

    given = [a.flatten(-2) for a in problem()]
    found = torch.compile(call, backend=BACKEND)(*given)
    torch.testing.assert_close(found, call(*given), rtol=0, atol=1e-14)
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:Dynamo detected")  # it looks into the eager call that raises the error
def test_options_are_checked():
    for bad, message in (
        (lambda G, g: project({"a": G, "b": G}, {"a": g}), "the same keys"),
        (lambda G, g: project([G], [g], margin=True), "must be a number"),
        (lambda G, g: project([G], [g], out=[g.float()]), "shape and dtype"),
        (lambda G, g: project([G, G], g), "both be one array"),
        (lambda G, g: project([G[..., :1], G[..., 1:]], [g, g]), r"shapes \(t, \*shape\) in G"),
        (lambda G, g: project([G], [g], metric=[torch.ones(10, 5)]), r"shapes \(t, \*shape\) in G"),
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(bad, backend=BACKEND)(*problem())
    # After an error in `project` torch runs that as it is, and goes on to compile what it calls.
    call = flat(PGD(steps=4), margin=0.1)
    assert torch.equal(torch.compile(call, backend=BACKEND)(*problem()), call(*problem()))
    torch.compiler.reset()


def test_the_operator_keeps_its_promises():
    """opcheck compares strides, too: inductor, which takes seconds, asserts them."""
    G, g = (a.flatten(-2) for a in problem())
    h, many = torch.full((3,), 0.1, dtype=torch.float64), torch.stack([g, -g])
    for rows, vector, metric in ((G, g, None), (G.T.contiguous().T, many, None), (G, many, many.abs())):
        torch.library.opcheck(torch.ops.gemproj.project, (rows, vector, metric, h, None, None, None, None))


def test_a_training_step_with_a_keeper_compiles():
    def train(compiler):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        keeper = Keeper(model, optimizer := torch.optim.SGD(model.parameters()))
        for batch in torch.randn(2, 8, 4):
            keeper.keep([batch], lambda model, x: model(x).square().mean())

        def step(now):
            optimizer.zero_grad()
            (-model(now).mean()).backward()
            optimizer.step()

        step = compiler(step)
        for now in torch.randn(3, 8, 4):
            step(now)
        assert len(keeper.last.names) == 2
        return [p.detach().clone() for p in model.parameters()]

    eager, compiled = train(lambda step: step), train(lambda step: torch.compile(step, backend=BACKEND))
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=0)


def test_graphs_that_others_record_are_right_for_other_numbers():
    G, g = (a[..., 0, :] for a in problem())
    given, expected = (G, G.sum(0) * 10.0), project(G, g)
    module = torch.nn.Module()
    module.forward = project
    for graph in (
        make_fx(lambda rows, v: project(rows, v), tracing_mode="real")(*given),
        make_fx(lambda rows, v: project(rows, v), tracing_mode="symbolic")(*given),
        torch.export.export(module, given).module(),
        torch.compile(lambda G, g: torch.func.vmap(project, (None, 0))(G, g[None])[0], backend=BACKEND),
        torch.compile(lambda G, g: torch.func.jvp(lambda g: project(G, g), (g,), (g,))[1], backend=BACKEND),
        torch.compile(torch.func.grad(lambda G, g: project(G, g).square().sum() / 2, 1), backend=BACKEND),
    ):  # x is positively homogeneous in g: its derivative along g, and of half its square, is x
        torch.testing.assert_close(graph(G, g), expected, rtol=1e-13, atol=1e-13)
    seen = []

    def step(x):  # other arrays are projected while torch is tracing
        seen.append(project(np.eye(2), np.array([-1.0, 1.0])))
        return x + 1.0

    torch.jit.trace(step, torch.zeros(2), check_trace=False)
    assert seen[0].tolist() == [0.0, 1.0]
