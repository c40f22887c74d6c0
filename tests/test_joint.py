"""Rows of G that share a pass: those of a pass each, or a reason why not."""

from functools import partial

import pytest
import torch
from loops import begin, take
from models import EACH, SAID, Quantised, adapted, language_model, logits, loss, task
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from gemproj.torch import Promise
from gemproj.torch.data import divided
from gemproj.torch.joint import SharedPasses
from gemproj.torch.losses import CrossEntropy
from gemproj.torch.memory import Draw, KeptSet
from gemproj.torch.rows import Rows
from gemproj.torch.vector import ParameterVector


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def sets_of(draw, t=3, n=4, collate=default_collate):
    """Make t kept sets of n examples, which are drawn with labels of three classes."""
    examples = [draw(n) for _ in range(t)]
    if collate is default_collate:
        examples = [divided({"x": x, "y": torch.randint(3, (n,))}) for x in examples]
    made = enumerate(examples)
    return [KeptSet(k, Promise(), x, collate, [], torch.arange(n) + float(k)) for k, x in made]


def vectors(*shape, dtype=torch.float64):
    return sets_of(lambda n: torch.randn(n, *shape, dtype=dtype))


def tokens():
    return sets_of(lambda n: torch.randint(7, (n, 5)))


def padded(examples):
    ids = nn.utils.rnn.pad_sequence(examples, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in examples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def packed(examples):
    ids = torch.cat(examples)[None]
    places = torch.cat([torch.arange(len(x)) for x in examples])[None]
    return {"input_ids": ids, "position_ids": places, "labels": ids}


def texts(collate=padded, least=2, most=9, t=3):
    lengths = iter(torch.randint(least, most, (100,)).tolist())
    return sets_of(lambda n: [torch.randint(1, 20, (next(lengths),)) for _ in range(n)], t, 3, collate)


class Passes:
    """Computes rows of sets, and counts the calls of the model."""

    def __init__(self, model, loss=EACH, shared=True):
        self.model, self.loss = model, loss
        self.rows = Rows(ParameterVector(model.named_parameters()))
        self.rows.buffer = self.rows.buffer.new_full((3, self.rows.vector.d), torch.nan)  # seen if it stays
        self.joint = SharedPasses() if shared else None

    def __call__(self, sets, **options):
        calls = []
        handle = self.model.register_forward_hook(lambda *_: calls.append(1))
        draws = [Draw(kept, list(range(len(kept))), self.loss, k) for k, kept in enumerate(sets)]
        self.rows.fill(self.model, draws, range(len(draws)), joint=self.joint, **options)
        handle.remove()
        return len(calls)


def compared(model, sets, loss=EACH, rtol=1e-12, **options):
    """Compare rows that share passes, if they can, with those of a pass each; return the way and the reason."""
    before = [set(module.__dict__) for module in model.modules()], list(map(id, model.parameters()))
    alone, joint = Passes(model, loss, shared=False), Passes(model, loss)
    calls = alone(sets, **options)
    for _ in range(2):  # the first time compares some of the rows
        passes = joint(sets, **options)
        G, expected = joint.rows.G.double(), alone.rows.G.double()
        assert (expected.norm(dim=1) > 0).all()
        assert ((G - expected).norm(dim=1) <= rtol * expected.norm(dim=1)).all()
        torch.testing.assert_close(joint.rows.losses, alone.rows.losses, rtol=rtol, atol=0)
        assert torch.equal(joint.rows.stored, alone.rows.stored)
    (plan,) = joint.joint._plans.values()
    way = None if plan.way is None else plan.way.__name__
    assert passes == (calls if way is None else calls // len(sets))
    assert joint.rows.reached == alone.rows.reached
    assert before == ([set(module.__dict__) for module in model.modules()], list(map(id, model.parameters())))
    assert all(p.grad is None for p in model.parameters())
    return way, joint.joint.reason


@torch.no_grad()
def shift(model, size):
    """Move all weights at random."""
    for p in model.parameters():
        p.add_(size * torch.randn_like(p))


def mlp(middle=nn.Tanh, dtype=torch.float64):
    return nn.Sequential(nn.Linear(6, 5), middle(), nn.Linear(5, 3)).to(dtype)


class Ours(nn.Module):
    """Embeddings, normalised in three ways, with a tied head, a block that is called twice, and checkpoints."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 7, padding_idx=0), nn.Embedding(5, 7)
        self.first, self.second = nn.LayerNorm(7), nn.RMSNorm(7)
        self.up, self.down, self.spare = nn.Linear(7, 9), nn.Linear(9, 7), nn.Linear(2, 2)
        self.head = nn.Linear(7, 7, bias=False)
        self.head.weight = self.words.weight
        shift(self, 0.1)
        self.double()

    def block(self, x):
        x = x + self.down(F.relu_(self.up(self.first(x))))
        return x + self.down(F.gelu(self.up(self.second(x))))

    def forward(self, x):
        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device)[None])
        return self.head(checkpoint(self.block, x, use_reentrant=False)).mean(1)[:, :3]


def partly():
    model = Ours()
    model.first.weight.requires_grad_(False)
    model.up.requires_grad_(False)
    return model


def quantised():
    """Return a network whose middle layer is frozen and has no storage."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)).double().requires_grad_(False)
    model[1].weight = nn.Parameter(Quantised(model[1].weight), requires_grad=False)
    model[0].requires_grad_()
    return model


def deep():
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm((4, 5)), nn.Flatten(), nn.Linear(20, 3)).double()


def gpt2(**options):
    return language_model("gpt2", use_cache=False, **options).double()


def lora():
    model = adapted(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True).double()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def normed(name):
    """Return a model whose norms multiply by w, or by 1 + w, and compute in float32."""
    model = language_model(name, num_key_value_heads=1, head_dim=8, use_cache=False).double()
    model.get_input_embeddings().requires_grad_(False)  # Gemma's multiply by a constant
    return model


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x.flip(1))


def cnn():
    layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    return nn.Sequential(*layers).double().eval()


CAUSAL, HALF = CrossEntropy(shift=True), torch.autocast("cpu", torch.bfloat16)
BY_LAYERS = {
    "in place": (lambda: mlp(lambda: nn.ReLU(inplace=True)), lambda: vectors(6), EACH, 1e-12),
    "examples of more dimensions": (deep, lambda: vectors(4, 6), EACH, 1e-12),
    "frozen weights without storage": (quantised, lambda: vectors(6), EACH, 1e-12),
    "parts are tied, or not reached": (Ours, tokens, EACH, 1e-12),
    "parts are frozen": (partly, tokens, EACH, 1e-12),
    "autocast": (
        lambda: mlp(dtype=torch.float32), lambda: vectors(6, dtype=torch.float32), HALF(EACH), 0.02
    ),
    "CNN": (cnn, lambda: vectors(2, 6, 6), EACH, 1e-10),
    "a subclass": (lambda: Odd(6, 3).double(), lambda: vectors(6), EACH, 1e-12),
    "GPT-2": (gpt2, texts, CAUSAL, 1e-12),
    "LoRA, checkpointed": (lora, texts, CAUSAL, 1e-12),
    "norms of Llama": (lambda: normed("llama"), texts, CAUSAL, 1e-5),
    "norms of Gemma": (lambda: normed("gemma"), texts, CAUSAL, 1e-5),
}  # fmt: skip


class Around(nn.Module):
    """Uses a layer in some way, and a parameter of its own."""

    def __init__(self, use):
        super().__init__()
        self.inner, self.own, self.use = nn.Linear(6, 3).double(), nn.Parameter(torch.ones(3).double()), use

    def forward(self, x):
        return self.own * self.use(self.inner, x)


class Named(nn.Module):
    """A layer with two names, whose weight has two more."""

    def __init__(self):
        super().__init__()
        self.one, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.net, self.a, self.b = nn.Sequential(self.one, nn.Tanh(), self.head), *[self.one.weight] * 2
        self.double()

    def forward(self, x):
        return self.net(x + (x @ self.a).tanh() + x @ self.b)


class Spare(nn.Linear):
    """A layer with another one inside, which it does not use."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.spare = nn.Linear(2, 2)


def contrastive(model, batch):
    """Return losses that depend on the other examples of a row."""
    logits = model(batch["x"])
    return F.cross_entropy(logits - logits.mean(0), batch["y"], reduction="none")


def of_parts(model, batch):
    return F.cross_entropy(model.own * model.inner(batch["x"]), batch["y"]) + 0.0 * model(batch["x"]).sum()


BY_VMAP = {
    "a parameter of its own": (lambda: Around(lambda inner, x: inner(x)), lambda: vectors(6), EACH),
    "parts of a model": (lambda: Around(lambda inner, x: inner(x)), lambda: vectors(6), of_parts),
    "outside": (lambda: Around(lambda inner, x: F.linear(x, inner.weight)), lambda: vectors(6), EACH),
    "another dimension": (lambda: Around(lambda f, x: f(x.mT).mT.mean(2)), lambda: vectors(6, 3), EACH),
    "a layer that is not used": (lambda: Spare(6, 3).double(), lambda: vectors(6), EACH),
    "a mean": (mlp, lambda: vectors(6), loss),
    "names of one layer and weight": (Named, lambda: vectors(6), loss),
    "examples that depend on each other": (mlp, lambda: vectors(6), contrastive),
}


@pytest.mark.parametrize("name", BY_LAYERS | BY_VMAP)
def test_rows_share_a_pass(name):
    make, draw, loss, *rtol = (BY_LAYERS | BY_VMAP)[name]
    way = "_by_layers" if name in BY_LAYERS else "_by_vmap"
    assert compared(make(), draw(), loss, *(rtol or [1e-10])) == (way, None)


def looked_at(model, batch):
    return EACH(model, batch) * (1 + float(batch["x"].mean()))


class Twice(nn.Bilinear):
    def __init__(self):
        super().__init__(6, 6, 3)

    def forward(self, x):
        return super().forward(x, x)


def adversarial(model, batch):
    x = batch["x"].detach().requires_grad_()
    (direction,) = torch.autograd.grad(EACH(model, batch | {"x": x}).sum(), x)
    return EACH(model, batch | {"x": batch["x"] + 0.1 * direction.sign()})


def test_what_needs_a_pass_for_each_row(monkeypatch):
    half = mlp(dtype=torch.bfloat16), vectors(6, dtype=torch.bfloat16)
    for model, sets, function, reason in (
        (gpt2(attn_implementation="eager", n_positions=64), texts(packed), CAUSAL, "packed texts"),
        (mlp(), vectors(6), looked_at, "differ"),
        (mlp(), vectors(6), adversarial, "differ"),
        (*half, looked_at, "differ"),
        (Twice().double(), vectors(6), EACH, "performance drop"),  # torch would take the rows one by one
    ):
        way, found = compared(model, sets, function, 0.0)
        assert way is None
        assert reason in found
    monkeypatch.setattr("gemproj.torch.joint._CPU_ROW", 100)
    assert "MiB" in compared(mlp(), vectors(6), EACH, 0.0)[1]


@pytest.mark.parametrize("lengths", [(6, 6, 2), (6, 2, 6), (2, 6, 6)])
def test_a_loss_that_counts_padding_needs_a_pass_for_each_row(lengths):
    left = iter([length for length in lengths for _ in range(4)])
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    sets = sets_of(lambda n: [torch.randn(next(left), 6).double() for _ in range(n)], collate=pad)
    way, found = compared(mlp(), sets, lambda model, x: (model(x) - 1).square().mean((1, 2)), 0.0)
    assert way is None
    assert "differ" in found


def test_the_longest_rows_may_be_the_last_ones():
    lengths = iter([length for length in (3, 3, 3, 3, 3, 2, 4) for _ in range(3)])
    sets = sets_of(lambda n: [torch.randint(1, 20, (next(lengths),)) for _ in range(n)], 7, 3, padded)
    joint = Passes(gpt2(), CAUSAL)
    assert [joint(sets, microbatch=9) for _ in range(2)][1] == 3
    assert joint.joint.reason is None


def test_rows_whose_losses_were_zero_are_not_those_that_are_compared():
    model, sets = mlp(), vectors(6)
    for k, kept in enumerate(sets):
        for example in kept.examples:
            example["x"][0] = -9.0 if k < 2 else 9.0  # of a hinge loss, which is zero for two sets
        kept.losses *= k == 2

    def hinge(model, batch):
        return (model(batch["x"])[:, 0] + 9.0 * batch["x"][:, 0]).relu()

    joint = Passes(model, hinge)
    assert [joint(sets) for _ in range(2)][1] == 1
    assert joint.joint.reason is None


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize(("microbatch", "passes"), [(12, 1), (8, 2), (7, 3), (3, 6)])
@pytest.mark.parametrize("make", [mlp, lambda: Odd(6, 3).double(), lambda: Around(lambda inner, x: inner(x))])
def test_no_pass_has_more_examples_than_the_microbatch(make, microbatch, passes, scale):
    model, sets, sizes = make(), vectors(6), []

    def loss(model, batch):
        sizes.append(len(batch["y"]))
        return EACH(model, batch)

    alone, joint = Passes(model, shared=False), Passes(model, loss)
    alone(sets)
    counts = [joint(sets, microbatch=microbatch, scale=scale) for _ in range(2)]
    assert (counts[1], max(sizes) <= microbatch) == (passes, True)
    torch.testing.assert_close(joint.rows.G, alone.rows.G)
    torch.testing.assert_close(joint.rows.losses, alone.rows.losses)


def test_much_longer_texts_are_taken_in_more_passes():
    joint = Passes(gpt2(), CAUSAL)
    assert [joint(texts(least=2, most=3)) for _ in range(2)][1] == 1
    assert joint(texts(least=8, most=9)) == 3


def distilling(model, sets):
    """Store outputs, and look while rows are rounding; return the passes when the weights are others."""
    for kept in sets:
        kept.outputs = list(SAID.outputs(model, default_collate(kept.examples)))
    joint = Passes(model, SAID)
    joint(sets)
    assert "losses are zero" in joint.joint.reason
    shift(model, 0.3)
    return joint


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_stored_outputs_belong_to_their_rows_and_rounding_is_not_compared(dtype):
    model, sets = mlp(dtype=dtype), vectors(6, dtype=dtype)
    joint = distilling(model, sets)
    joint(sets)
    (plan,) = joint.joint._plans.values()
    assert plan.way is not None
    assert compared(model, sets, SAID, 1e-9 if dtype == torch.float64 else 1e-3) == ("_by_layers", None)


class TimeFirst(nn.Module):
    """A model whose layers see the time first; its length is the number of examples of all sets."""

    def __init__(self):
        super().__init__()
        self.layers = mlp()

    def forward(self, x):
        return self.layers(x.transpose(0, 1)).transpose(0, 1)


def test_rows_that_are_rounding_at_first_are_compared_later():
    model, sets = TimeFirst(), vectors(12, 6)
    joint, alone = distilling(model, sets), Passes(model, SAID, shared=False)
    for _ in range(2):
        joint(sets)
        alone(sets)
        torch.testing.assert_close(joint.rows.G, alone.rows.G)


def test_a_new_set_is_compared_again():
    """The losses of a set are those of one head for the whole batch, as in some incremental learners."""

    def examples(head=0.0):
        x, y = task(1, 4)
        return {"x": x, "y": y, "head": torch.full((4,), head)}

    of_head = lambda m, b: EACH(m, b) * (1 + b["head"].max())  # noqa: E731
    model, optimizer, keeper = begin(of_head, [examples()] * 3, model=mlp())
    for way in ("layers", "vmap"):
        for _ in range(2):
            take(model, optimizer, task(5))
            (plan,) = keeper._training.joint._plans.values()
            assert plan.way.__name__ == f"_by_{way}"
        keeper.keep([examples(1.0)], name=3)


def test_sets_with_equal_losses_that_were_made_one_by_one_share_a_pass():
    model, optimizer, keeper = begin()
    for k in range(3):
        keeper.keep([task(k)], Promise(CrossEntropy(logits, labels=1), tolerance=0.1))
    take(model, optimizer, task(5))
    (plan,) = keeper._training.joint._plans.values()
    assert plan.rows == 3


@pytest.mark.parametrize("when", [1, 3])
def test_errors_of_a_loss_are_raised_and_those_of_a_shared_pass_are_replaced(when):
    model, sets, most = mlp(), vectors(6), [100]

    def loss(model, batch):
        if len(batch["y"]) > most[0]:
            raise ZeroDivisionError("out of memory")
        return EACH(model, batch)

    alone, joint = Passes(model, shared=False), Passes(model, loss)
    alone(sets)
    for _ in range(when):
        joint(sets)
    most[0] = 1
    with pytest.raises(ZeroDivisionError, match="out of memory"):
        joint(sets)
    most[0] = 4  # of a single row
    assert joint(sets) == 3
    assert torch.equal(joint.rows.G, alone.rows.G)


class Telling(nn.Module):
    """It has a parameter beside a layer, so its rows share a pass by vmap; it stores what it has seen."""

    def __init__(self):
        super().__init__()
        self.scale, self.line, self.got = nn.Parameter(torch.ones(())), nn.Linear(6, 3), None
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        self.got, self.last = x * self.scale, x.mean(0)
        return self.line(self.got)


def test_what_a_shared_pass_has_stored_is_not_left_in_the_model():
    model, optimizer, keeper = begin(loss, [task(k) for k in range(4)], model=Telling().double())
    for _ in range(2):
        take(model, optimizer, task(7))
        assert {plan.way.__name__ for plan in keeper._training.joint._plans.values()} == {"_by_vmap"}
        assert (model.got.sum() + model.last.sum()).item() != 0.0  # what vmap has stored has no memory
    assert keeper.report().kept is not None
