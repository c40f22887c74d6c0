"""`torch.compile` around a projection: one operation, no break in the graph, the same numbers and gradients."""

import numpy as np
import pytest

from gemproj import PGD, Exact, project

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

GradientProjector = pytest.importorskip("gemproj.torch").GradientProjector

# Not inductor, which needs a C++ compiler: what matters is the graph that reaches it.
BACKEND = "aot_eager"


@pytest.fixture
def problem():
    torch.manual_seed(0)
    G = torch.randn(3, 5, 10, dtype=torch.float64)
    return G, torch.randn(5, 10, dtype=torch.float64) - G.sum(0)


def flat(method, **options):
    """Return a call for arrays, between operations that are compiled with it."""
    return lambda G, g: 2.0 * project(G.reshape(3, 50) * 1.0, g.reshape(50) * 1.0, method=method, **options)


def one_block(G, g):  # not one array: (t, 5, 10) would be a batch
    weight, start = torch.linspace(0.1, 1.1, 50, dtype=g.dtype).reshape(5, 10), torch.ones(3, dtype=g.dtype)
    return project([G * 1.0], [g * 1.0], metric=[weight], warm_start=start)[0]


def named(G, g):
    x = project({"a": G[:, :2], "b": G[:, 2:]}, {"a": g[:2], "b": g[2:]})
    return torch.cat([x["a"], x["b"]])


def written(G, g):
    x = torch.empty_like(g)
    project((G,), (g,), out=(x,), margin=np.float64(0.5))
    return x


def lists(G, g):  # whose numbers are not rounded
    options = {"h": [-0.1, -0.2, -0.3], "margin": [0.1, 0.2, 0.3], "equality": [False, True, False]}
    return project(G[:, 0], g[0], **options)


CALLS = [flat("exact"), flat(Exact(refine=1), margin=0.1, penalty=0.2), flat("exact", equality=True)]
CALLS += [one_block, named, written, lists]


@pytest.mark.parametrize("call", CALLS)
def test_one_graph_with_the_numbers_of_eager_mode(problem, call):
    compiled = torch.compile(call, fullgraph=True, backend=BACKEND)
    for sign in (1.0, -1.0):  # with constraints active, and with none, where x is g
        assert torch.equal(compiled(problem[0], sign * problem[1]), call(problem[0], sign * problem[1]))


def by_diagonal(K, b, warm_start):
    return (-b / torch.diagonal(K)).clamp(min=0)


@pytest.mark.parametrize("method", ["agem", by_diagonal, "exact"])
def test_other_methods_break_the_graph(problem, method):
    torch.compiler.reset()
    call = flat(method, margin=0.1)
    assert torch.equal(torch.compile(call, backend=BACKEND)(*problem), call(*problem))


@pytest.mark.filterwarnings("ignore:Dynamo detected")  # it looks into the eager call that raises the error
def test_options_are_checked(problem):
    for bad, message in (
        (lambda G, g: project({"a": G, "b": G}, {"a": g}), "the same keys"),
        (lambda G, g: project([G], [g], margin=True), "must be a number"),
        (lambda G, g: project([G], [g], out=[g.float()]), "shape and dtype"),
        (lambda G, g: project([G, G], g), "as G is"),
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(bad, backend=BACKEND)(*problem)
    # After an error in `project` torch runs that as it is, and goes on to compile what it calls.
    call = flat(PGD(steps=4), margin=0.1)
    assert torch.equal(torch.compile(call, backend=BACKEND)(*problem), call(*problem))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch looks at where a graph breaks
def test_gradients_pass_through(problem):
    def loss(G, g):
        return (project([G * 1.0], [2.0 * g])[0] ** 3).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=BACKEND)):
        G, g = (a.clone().requires_grad_() for a in problem)
        function(G, g).backward()
        results.append((G.grad, g.grad))
    for eager, compiled in zip(*results, strict=True):
        np.testing.assert_allclose(compiled, eager, rtol=1e-13, atol=1e-14)
        assert eager.abs().max() > 1e-3

    def inexact(G, g):
        return project([G * 1.0], [g * 1.0], method="pgd")[0].sum()

    with pytest.raises(ValueError, match="Only method 'exact'"):
        torch.compile(inexact, backend=BACKEND)(problem[0].requires_grad_(), problem[1]).backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which opcheck of torch 2.14 looks at
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_operation_keeps_its_promises(contiguous):
    """opcheck compares strides, too: inductor, which takes seconds, asserts them."""
    from gemproj._operator import Form, _project, _project_backward

    G, g = torch.randn(3, 5, 10, dtype=torch.float64), torch.randn(5, 10, dtype=torch.float64)
    if not contiguous:
        G, g = (a.mT.contiguous().mT for a in (G, g))
    h, weight = torch.full((3,), 0.1, dtype=torch.float64), torch.rand(50, dtype=torch.float64) + 0.5
    form = Form(1, 1, 0, h=1, margin=0, penalty=0, equality=0, warm_start=0, alone=0, refine=0, recorded=1)
    rows = (G.flatten(1).T.contiguous().T, g.flatten())
    for tensors, one in (([G, g, h], form), ([*rows, weight, h], form._replace(metric=1, alone=1))):
        torch.library.opcheck(_project, (tensors, [*one]))
        found = _project(tensors, [*one])
        torch.library.opcheck(_project_backward, (tensors, found, found[:1], [*one]))
    leaves = [G.clone().requires_grad_(), g.clone().requires_grad_(), h]
    torch.library.opcheck(_project, (leaves, [*form]))


def test_a_training_step_with_a_projector_compiles():
    def train(compiler):
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        projector = GradientProjector(model.parameters())
        past, now = torch.randn(2, 8, 4), torch.randn(8, 4)
        projector.constrain(model(batch).square().mean() for batch in past)
        projector.attach(optimizer)

        def step():
            optimizer.zero_grad()
            (-model(now).mean()).backward()
            optimizer.step()

        step = compiler(step)
        for _ in range(3):
            step()
        assert projector.last.constraints == 2
        return [p.detach().clone() for p in model.parameters()]

    eager, compiled = train(lambda step: step), train(lambda step: torch.compile(step, backend=BACKEND))
    for a, b in zip(eager, compiled, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6)


def test_what_make_fx_records_is_right_for_other_numbers(problem):
    G, g = (a[..., 0, :] for a in problem)
    feasible = G.sum(0) * 10.0
    recorded = make_fx(lambda rows, vector: project(rows, vector))(G, feasible)
    assert torch.equal(recorded(G, g), project(G, g))


def test_other_arrays_are_projected_while_torch_is_tracing():
    seen = []

    def step(x):
        seen.append(project(np.eye(2), np.array([-1.0, 1.0])))
        return x + 1.0

    torch.jit.trace(step, torch.zeros(2), check_trace=False)
    assert seen[0].tolist() == [0.0, 1.0]
