"""Gradients of all tasks in one pass: those of one pass per task, or a refusal."""

import itertools
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gemproj.torch.one_pass import NotPossible, Pass, one_pass  # noqa: E402
from gemproj.torch.one_pass.choice import Choice, kind_of  # noqa: E402

COUNTS = (3, 1, 4)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def each_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def tasks(*shape, counts=COUNTS, dtype=torch.float64, classes=3):
    return [{"x": torch.randn(n, *shape, dtype=dtype), "y": torch.randint(classes, (n,))} for n in counts]


def tokens(counts=COUNTS, length=5, vocabulary=7):
    return [{"x": torch.randint(vocabulary, (n, length)), "y": torch.randint(3, (n,))} for n in counts]


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def together(model, loss, batches, parameters=None):
    """The rows of one pass in a buffer full of nan, and what the pass says."""
    parameters = trainable(model) if parameters is None else parameters
    G = torch.full(
        (len(batches), 2 + sum(p.numel() for p in parameters)), torch.nan, dtype=parameters[0].dtype
    )
    parts = G[:, 1:-1].split([p.numel() for p in parameters], dim=1)
    found = one_pass(
        model,
        loss,
        batches,
        parameters,
        [v.unflatten(1, p.shape) for v, p in zip(parts, parameters, strict=True)],
    )
    assert G[:, [0, -1]].isnan().all()
    return G[:, 1:-1], found


def by_task(model, loss, batches, parameters=None):
    parameters = trainable(model) if parameters is None else parameters
    rows, reached = [], [False] * len(parameters)
    for batch in batches:
        found = torch.autograd.grad(loss(model, batch).mean(), parameters, allow_unused=True)
        reached = [old or v is not None for old, v in zip(reached, found, strict=True)]
        rows.append(
            torch.cat(
                [
                    (torch.zeros_like(p) if v is None else v).reshape(-1)
                    for v, p in zip(found, parameters, strict=True)
                ]
            )
        )
    return torch.stack(rows), reached


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def agrees(model, loss, batches, parameters=None, rtol=1e-12):
    before = hooks(model)
    expected, reached = by_task(model, loss, batches, parameters)
    G, found = together(model, loss, batches, parameters)
    assert found.reached == reached
    error = (G - expected).norm(dim=1)
    assert (error <= rtol * expected.norm(dim=1)).all(), error / expected.norm(dim=1)
    assert hooks(model) == before
    assert all(p.grad is None for p in model.parameters())
    return G


class Flip(nn.Module):
    """A leaf that owns parameters and is none of those with a formula."""

    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(n)), nn.Parameter(torch.randn(n))

    def forward(self, x, *, power=2):
        return self.a * x**power + torch.sin(self.b * x)


class Block(nn.Module):
    """A small transformer: embeddings of tokens and of positions, normalised, attending."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.words = nn.Embedding(7, 8, padding_idx=0)
        self.places = nn.Embedding(5, 8)
        self.first, self.last = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3, bias=False)
        self.to(dtype)

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(5)[None])
        y = self.first(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(self.last(x))))
        return self.head(x[:, -1])


def mlp(dtype=torch.float64):
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, groups=2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 3),
    ).double().eval()  # fmt: skip


@pytest.mark.parametrize("loss", [mean_loss, each_loss])
@pytest.mark.parametrize("counts", [(3, 1, 4), (2, 2, 2), (5,)])
def test_an_mlp(loss, counts):
    agrees(mlp(), loss, tasks(6, counts=counts))


@pytest.mark.parametrize("counts", [(3, 1, 4), (2, 2, 2)])
def test_convolutions_that_are_changed_in_place_after_the_call(counts):
    agrees(convolutional(), mean_loss, tasks(2, 6, 6, counts=counts))


@pytest.mark.parametrize("counts", [(3, 1, 4), (2, 2, 2)])
def test_a_transformer_block(counts):
    agrees(Block(), mean_loss, tokens(counts))
    agrees(Block().eval(), each_loss, tokens(counts))


def test_a_module_without_a_formula():
    agrees(nn.Sequential(nn.Linear(6, 5), Flip(5), nn.Linear(5, 3)).double(), mean_loss, tasks(6))


def test_a_recurrent_module_whose_last_state_is_not_used():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.cell(x)[0][:, -1])

    agrees(Recurrent().double(), mean_loss, tasks(6, 4))


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


@pytest.mark.parametrize("inner", [lambda: nn.Linear(6, 6), lambda: Flip(6), lambda: nn.LayerNorm(6)])
def test_modules_called_twice_and_under_two_names(inner):
    inner = inner()
    agrees(Twice(inner).double(), mean_loss, tasks(6))
    agrees(nn.Sequential(inner, nn.Tanh(), inner, nn.Linear(6, 3)).double(), mean_loss, tasks(6))


def test_weights_that_modules_share():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.out.weight = self.words.weight

        def forward(self, ids):
            return self.out(torch.tanh(self.words(ids)).mean(1))

    agrees(Tied().double(), mean_loss, tokens())


def test_parts_that_are_frozen_and_parts_that_are_not_reached():
    model = nn.ModuleDict({"body": mlp(), "aside": nn.Linear(3, 3), "never": nn.Linear(2, 2)}).double()
    model["body"][0].bias.requires_grad_(False)
    model["body"][2].weight.requires_grad_(False)
    model["never"].bias.requires_grad_(False)

    def loss(model, batch):
        logits = model["body"](batch["x"])
        model["aside"](logits)  # called, and without effect
        return F.cross_entropy(logits, batch["y"])

    G = agrees(model, loss, tasks(6))
    _, found = together(model, loss, tasks(6))
    assert found.reached == [True, True, False, False, False]
    assert not G[:, 33:].any()


def test_some_of_the_parameters():
    model = mlp()
    agrees(model, mean_loss, tasks(6), [model[2].bias, model[0].weight])


def test_batches_of_any_nesting():
    model = mlp()
    batches = [
        (b["x"], [b["y"], {"weights": torch.rand(len(b["y"]), dtype=torch.float64)}]) for b in tasks(6)
    ]

    def loss(model, batch):
        return batch[1][1]["weights"] * F.cross_entropy(model(batch[0]), batch[1][0], reduction="none")

    agrees(model, loss, batches)


def test_low_rank_adapters_of_gpt2():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=16, n_layer=2, n_head=2, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=1)  # fmt: skip
    model = transformers.GPT2ForSequenceClassification(config)
    adapters = peft.LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=["c_attn", "c_proj"],
        modules_to_save=["score"],
        fan_in_fan_out=True,
    )
    model = peft.get_peft_model(model, adapters).double().eval()
    with torch.no_grad():  # adapters start at zero, with gradients of zero
        for p in trainable(model):
            p.add_(0.3 * torch.randn_like(p))

    def loss(model, batch):
        return model(input_ids=batch["x"], attention_mask=(batch["x"] > 0).long(), labels=batch["y"]).loss

    batches = [{"x": b["x"] + 1, "y": b["y"]} for b in tokens(vocabulary=18)]
    batches[1]["x"][:, 3:] = 0
    agrees(model, loss, batches)


@pytest.mark.parametrize("counts", [(3, 1, 4), (2, 2, 2)])
def test_all_of_gpt2(counts):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=7, n_positions=8, n_embd=16, n_layer=2, n_head=2, num_labels=3, pad_token_id=0, bos_token_id=1, eos_token_id=1)  # fmt: skip
    model = transformers.GPT2ForSequenceClassification(config).double().eval()

    def loss(model, batch):
        return model(input_ids=batch["x"], labels=batch["y"]).loss

    agrees(model, loss, tokens(counts))


@pytest.mark.parametrize("inside", [True, False])
def test_autocast(inside):
    """What autocast rounds, one pass rounds too: both are off by the same order."""
    model, batches = Block(torch.float32).eval(), tokens((4, 4, 4))

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
            return mean_loss(model, batch)

    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        expected, reached = by_task(model, loss, batches)
        G, found = together(model, loss, batches)
    exact, _ = by_task(model, mean_loss, batches)
    assert found.reached == reached
    assert found.tolerance == 3e-2
    size = exact.norm(dim=1)
    off = ((expected - exact).norm(dim=1) / size).max()
    assert 1e-4 < off < 0.1
    assert ((G - exact).norm(dim=1) / size).max() < 2 * off


def test_rows_of_a_wider_type_than_the_parameters():
    model, batches = mlp(torch.bfloat16), tasks(6, dtype=torch.bfloat16)
    out = [torch.empty(len(COUNTS), *p.shape) for p in model.parameters()]
    assert one_pass(model, mean_loss, batches, trainable(model), out).tolerance == 3e-2
    expected, _ = by_task(model.double(), mean_loss, [{**b, "x": b["x"].double()} for b in batches])
    G = torch.cat([part.flatten(1) for part in out], dim=1)
    assert ((G - expected).norm(dim=1) < 0.02 * expected.norm(dim=1)).all()


def test_checkpointed_segments():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Flip(6)), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    agrees(Checkpointed().double(), mean_loss, tasks(6))


def test_hooks_of_others_may_change_inputs_and_outputs():
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: output.sin())
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    agrees(model, mean_loss, tasks(6))


def test_parametrizations_count_as_part_of_a_module_that_owns_a_bias():
    agrees(parametrized(), mean_loss, tasks(6))


def test_inference_code_inside_the_loss():
    model = mlp()

    def loss(model, batch):
        with torch.no_grad():
            teacher = model(batch["x"] + 1)
        return (model(batch["x"]) - teacher).square().mean()

    agrees(model, loss, tasks(6))


# What is refused.


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(F.linear(torch.tanh(self.inner(x)), self.inner.weight))


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.scale * x)


class Borrowing(nn.Module):
    """A module that uses the weight of another one inside of its forward."""

    class Inner(nn.Linear):
        def forward(self, x, other):
            return super().forward(x) @ other.weight

    def __init__(self):
        super().__init__()
        self.inner, self.other, self.head = Borrowing.Inner(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.inner(self.other(x), self.other))


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.inner(x.transpose(0, 1)).mean(0))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.places, self.head = nn.Embedding(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x + self.places(torch.arange(6)).mean(0))


class ChangesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(6, 3), nn.Linear(6, 3)
        self.inner.weight.requires_grad_(False)

    def forward(self, x):
        x = x.clone()
        y = self.inner(x)
        x.mul_(2)
        return y + self.head(x)


def parametrized(bias=True):
    model = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Linear(5, 3))
    nn.utils.parametrizations.weight_norm(model[0])
    return model.double()


def weight_normed():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[0])
    return model


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, 0.1, batch_first=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


def compiled():
    model = mlp()
    model[0].compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("make", "shape", "why"),
    [
        (Functional, (6,), "inner.weight is used outside of the forward"),
        (OwnParameter, (6,), "the model itself"),
        (Borrowing, (6,), "other.weight is used in the forward of another"),
        (TimeFirst, (5, 6), "dimension 0"),
        (Positions, (6,), "dimension 0"),
        (ChangesItsInput, (6,), "changed in place"),
        (lambda: parametrized(bias=False), (6,), "dimension 0"),
        (weight_normed, (6,), "hooks before"),
        (Dropping, (5, 6), "drops out"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), (6,), "statistics"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval(), (6,), "statistics"),
        (compiled, (6,), "compiled"),
    ],
)  # fmt: skip
def test_refuses(make, shape, why):
    model = make().double()
    before = hooks(model)
    with pytest.raises(NotPossible, match=why):
        together(model, mean_loss, tasks(*shape))
    assert hooks(model) == before
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["lengths", "structure", "dtype", "text", "empty", "none"])
def test_refuses_batches_that_do_not_fit(kind):
    batches = tasks(6)
    if kind == "lengths":
        batches[1]["x"] = batches[1]["x"][:, :5]
    elif kind == "structure":
        batches[1] = (batches[1]["x"], batches[1]["y"])
    elif kind == "dtype":
        batches[1]["x"] = batches[1]["x"].float()
    elif kind == "text":
        batches[1]["x"] = "text"
    elif kind == "empty":
        batches[1] = {key: value[:0] for key, value in batches[1].items()}
    else:
        batches = []
    with pytest.raises(NotPossible):
        together(mlp(), mean_loss, batches)


def test_refuses_losses_that_are_not_one_or_one_per_example():
    for loss in (
        lambda model, batch: model(batch["x"]),
        lambda model, batch: model(batch["x"]).mean().detach(),
        lambda model, batch: 1.0,
        lambda model, batch: model(batch["x"])[:2, 0],
    ):
        with pytest.raises(NotPossible, match="loss"):
            together(mlp(), loss, tasks(6))


def test_refuses_adapters_that_use_weights_directly():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0"], use_dora=True)
    model = peft.get_peft_model(mlp(torch.float32), config).double()
    batches = tasks(6)
    try:
        G, _ = together(model, mean_loss, batches)
    except NotPossible:
        return
    torch.testing.assert_close(G, by_task(model, mean_loss, batches)[0])


class Scaled(nn.Module):
    """Owns a parameter, and has a child that owns some."""

    def __init__(self, child):
        super().__init__()
        self.scale, self.child = nn.Parameter(torch.randn(6)), child

    def forward(self, x):
        return self.scale * self.child(x)


def test_modules_with_parameters_and_children_count_as_one():
    agrees(nn.Sequential(Scaled(nn.Linear(6, 6)), nn.Linear(6, 3)).double(), mean_loss, tasks(6))
    agrees(nn.Sequential(Scaled(Scaled(nn.Linear(6, 6))), nn.Linear(6, 3)).double(), mean_loss, tasks(6))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_refuses_children_of_theirs_that_are_also_elsewhere(order):
    child = nn.Linear(6, 6)
    parts = [Scaled(child), child]
    model = nn.Sequential(*(parts[i] for i in order), nn.Linear(6, 3)).double()
    with pytest.raises(NotPossible, match="part of"):
        together(model, mean_loss, tasks(6))


def test_refuses_parameters_whose_gradients_are_hooked():
    model = mlp()
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(NotPossible, match="hooks"):
        together(model, mean_loss, tasks(6))


def test_no_hooks_stay_after_an_error():
    model = mlp()

    def fails(model, batch):
        model(batch["x"])
        raise RuntimeError("a mistake of the caller's")

    with pytest.raises(RuntimeError, match="caller"):
        together(model, fails, tasks(6))
    assert hooks(model) == 0


# Random architectures.

LAYERS = {
    "linear": lambda: nn.Linear(6, 6),
    "no bias": lambda: nn.Linear(6, 6, bias=False),
    "norm": lambda: nn.LayerNorm(6),
    "flip": lambda: Flip(6),
    "tanh": lambda: nn.Tanh(),
    "relu": lambda: nn.ReLU(inplace=True),
}


class Random(nn.Module):
    def __init__(self, names, residual):
        super().__init__()
        self.layers = nn.ModuleList(LAYERS[name]() for name in names)
        self.order = [*range(len(names)), 0]
        self.residual = residual
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = x.clone()
        for i in self.order:
            y = self.layers[i](x.clone())
            x = x + y if self.residual else y
        return self.head(x.flatten(1, -2).mean(1) if x.ndim > 2 else x)


@given(
    names=st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=5),
    residual=st.booleans(),
    middle=st.sampled_from([(), (2,), (2, 3)]),
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    loss=st.sampled_from([mean_loss, each_loss]),
    frozen=st.integers(0, 2**12 - 1),
)
def test_random_architectures(names, residual, middle, counts, loss, frozen):
    model = Random(names, residual).double()
    for j, p in enumerate(model.parameters()):
        p.requires_grad_(not frozen >> j & 1)
    if not trainable(model):
        return
    agrees(model, loss, tasks(*middle, 6, counts=counts), rtol=1e-11)


# The choice.


class Clocked:
    """Two ways to the same rows, counted; a clock that says how long each takes."""

    def __init__(self, monkeypatch, slow, error=0.0):
        self.now, self.taken = 0.0, []
        self.rows = torch.zeros(2, 4)
        self.slow, self.error = slow, error
        monkeypatch.setattr("gemproj.torch.one_pass.choice.time.perf_counter", lambda: self.now)

    def work(self, way, off=0.0):
        self.taken.append(way)
        self.now += 2.0 if way == self.slow else 1.0
        self.rows.copy_(torch.arange(8.0).view(2, 4) * (1 + off))

    def by_task(self):
        self.work("by task")
        return [True]

    def together(self):
        self.work("one pass", self.error)
        return Pass([True], 1e-3)

    def fill(self, choice, kind="a"):
        self.taken = []
        assert choice.fill(kind, self.rows, self.by_task, self.together) == [True]
        return self.taken


@pytest.mark.parametrize(("slow", "fast"), [("by task", "one pass"), ("one pass", "by task")])
def test_the_faster_way_is_taken_after_one_comparison(monkeypatch, slow, fast):
    ways, choice = Clocked(monkeypatch, slow, error=1e-4), Choice()
    assert ways.fill(choice) == ["one pass", "by task"]
    assert list(itertools.chain(*(ways.fill(choice) for _ in range(4)))) == ["by task", "one pass"] * 2
    assert [ways.fill(choice) for _ in range(3)] == [[fast]] * 3
    assert ways.fill(choice, "another kind") == ["one pass", "by task"]
    assert choice.reason is None


def test_rows_that_differ_are_not_used(monkeypatch):
    ways, choice = Clocked(monkeypatch, "by task", error=1e-2), Choice()
    ways.fill(choice)
    assert ways.rows[0, 1] == 1
    assert "1.0e-02" in choice.reason
    assert ways.fill(choice) == ways.fill(choice, "another kind") == ["by task"]


def test_what_is_not_possible_or_fails_is_done_by_task(monkeypatch):
    for error in (NotPossible("because"), RuntimeError("because")):
        ways, choice = Clocked(monkeypatch, "by task"), Choice()

        def together(error=error):
            raise error

        ways.together = together
        assert ways.fill(choice) == ways.fill(choice) == ["by task"]
        assert "because" in choice.reason
        with pytest.raises(type(error), match="because"):
            ways.fill(Choice(True))


def test_a_wish_is_followed(monkeypatch):
    ways = Clocked(monkeypatch, "by task", error=1.0)
    assert [ways.fill(choice) for choice in [Choice(True)] * 3] == [["one pass"]] * 3
    assert [ways.fill(choice) for choice in [Choice(False)] * 3] == [["by task"]] * 3
    with pytest.raises(ValueError, match="one_pass"):
        Choice("yes")


def test_times_do_not_decide_where_algorithms_are_to_be_deterministic(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    ways, choice = Clocked(monkeypatch, "by task"), Choice()
    assert [ways.fill(choice) for _ in range(7)] == [["by task"]] * 7


def test_one_row_and_rows_that_are_not_finite_decide_nothing(monkeypatch):
    ways, choice = Clocked(monkeypatch, "by task"), Choice()
    ways.rows = torch.zeros(1, 4)
    ways.work = lambda way, off=0.0: ways.taken.append(way)
    assert ways.fill(choice) == ["by task"]
    ways.rows = torch.full((2, 4), torch.nan)
    assert ways.fill(choice) == ways.fill(choice) == ["one pass", "by task"]
    assert choice.reason is None


def test_a_mean_over_something_else_than_examples_is_found_out():
    """Tokens that are not ignored, say: the one way weighs tasks otherwise than the other one."""
    model, batches = mlp(), tasks(6)
    batches[0]["y"][0] = -100
    parameters = trainable(model)
    G = torch.empty(3, sum(p.numel() for p in parameters), dtype=torch.float64)

    def write_by_task():
        rows, reached = by_task(model, mean_loss, batches)
        G.copy_(rows)
        return reached

    def write_together():
        rows, found = together(model, mean_loss, batches)
        G.copy_(rows)
        return found

    choice = Choice()
    choice.fill(kind_of(model, batches), G, write_by_task, write_together)
    assert "mean over examples" in choice.reason
    assert torch.equal(G, by_task(model, mean_loss, batches)[0])


def test_kinds_differ_by_tasks_by_size_and_by_mode():
    model, batches = mlp(), tasks(6, counts=(4, 4))
    kind = kind_of(model, batches)
    assert kind == kind_of(model, tasks(6, counts=(4, 5)))
    assert kind != kind_of(model, tasks(6, counts=(40, 40)))
    assert kind != kind_of(model, [*batches, *batches])
    assert kind != kind_of(model.eval(), batches)
