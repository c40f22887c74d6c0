"""Rows of G that share a pass: those of a pass each, or a reason why not."""

import threading
import warnings
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

from models import adapted, begin, language_model, take  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gemproj.torch import EpisodicMemory, GradientProjector, Promise  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def each(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def memory_of(draw, tasks=3, n=4):
    """Store what is drawn for each task, with labels of three classes."""
    memory = EpisodicMemory(per_task=n)
    for task in range(tasks):
        memory.add({"x": draw(n), "y": torch.randint(3, (n,))}, task)
    return memory


def vectors(*shape, dtype=torch.float64):
    return memory_of(lambda n: torch.randn(n, *shape, dtype=dtype))


def tokens():
    return memory_of(lambda n: torch.randint(7, (n, 5)))


def recalled(model, memory, loss=each, *, shared=True, per="task", **options):
    """Return a projector with its rows, and how often the model was called for them.

    Batches that are given in a list have a pass each.
    """
    limit = {name: options.pop(name) for name in ("microbatch", "scale") if name in options}
    projector = GradientProjector(
        (p for p in model.parameters() if p.requires_grad), Promise(loss), **options
    )
    calls = []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):  # the first two compare some of the rows
        calls.clear()
        batches = memory.batches(per=per)
        projector.recall(model, batches if shared else list(batches), **limit)
    handle.remove()
    return projector, len(calls)


def agree(model, memory, loss=each, *, rtol=1e-12, **options):
    """Compare rows that share a pass with those of a pass each."""
    alone, passes = recalled(model, memory, loss, shared=False, **options)
    assert passes == len(alone.constraints)
    together, passes = recalled(model, memory, loss, **options)
    assert (passes, together.why_row_by_row) == (1, None)
    G, expected = together.constraints.double(), alone.constraints.double()
    assert (expected.norm(dim=1) > 0).all()
    assert ((G - expected).norm(dim=1) <= rtol * expected.norm(dim=1)).all()
    assert together._matrix.reached == alone._matrix.reached
    torch.testing.assert_close(together._matrix.losses, alone._matrix.losses, rtol=rtol, atol=0)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    return together


def refused(model, memory, loss=each, **options):
    """Compare rows that cannot share a pass, and return the reason."""
    before = [set(module.__dict__) for module in model.modules()]
    expected, _ = recalled(model, memory, loss, shared=False, **options)
    found, passes = recalled(model, memory, loss, **options)
    torch.testing.assert_close(found.constraints, expected.constraints, rtol=0, atol=0)
    assert before == [set(module.__dict__) for module in model.modules()]
    return found.why_row_by_row, passes - len(expected.constraints)


def mlp(middle=nn.Tanh, dtype=torch.float64):
    return nn.Sequential(nn.Linear(6, 5), middle(), nn.Linear(5, 3)).to(dtype)


class Ours(nn.Module):
    """Embeddings of tokens and of positions, normalised in three ways, and a head that may be tied."""

    def __init__(self, tied=False, twice=False, checkpointed=False):
        super().__init__()
        self.words, self.places = nn.Embedding(7, 7, padding_idx=0), nn.Embedding(5, 7)
        self.first, self.second = nn.LayerNorm(7), nn.RMSNorm(7)
        self.up, self.down = nn.Linear(7, 9), nn.Linear(9, 7)
        self.head = nn.Linear(7, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight
        self.twice, self.checkpointed = twice, checkpointed
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.1 * torch.randn_like(p))
        self.double()

    def block(self, x):
        x = x + self.down(F.relu_(self.up(self.first(x))))
        return x + self.down(F.gelu(self.up(self.second(x)))) if self.twice else self.second(x)

    def forward(self, x):
        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device)[None])
        x = checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        return self.head(x).mean(1)[:, :3]


def partly():
    model = Ours()
    model.first.weight.requires_grad_(False)
    model.up.requires_grad_(False)
    model.spare = nn.Linear(2, 2).double()
    return model


MODELS = {
    "perceptron": (mlp, vectors, (6,)),
    "in place": (lambda: mlp(lambda: nn.ReLU(inplace=True)), vectors, (6,)),
    "examples of more dimensions": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm((4, 5)), nn.Flatten(), nn.Linear(20, 3)).double(),
        vectors,
        (4, 6),
    ),
    "tied": (lambda: Ours(tied=True), tokens, ()),
    "twice": (lambda: Ours(twice=True), tokens, ()),
    "checkpointed": (lambda: Ours(checkpointed=True), tokens, ()),
    "parts are frozen, or not reached": (partly, tokens, ()),
    "all of that": (lambda: Ours(tied=True, twice=True, checkpointed=True), tokens, ()),
}


@pytest.mark.parametrize("per", ["task", "example"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_share_a_pass(name, per):
    make, draw, shape = MODELS[name]
    agree(make(), draw(*shape), per=per)


def test_rows_of_another_precision():
    agree(mlp(dtype=torch.float32), vectors(6, dtype=torch.float32), rows_dtype=torch.float64, rtol=1e-5)


@pytest.mark.parametrize("outside", [False, True])
def test_autocast(outside):
    half = torch.autocast("cpu", torch.bfloat16)
    model, memory = mlp(dtype=torch.float32), vectors(6, dtype=torch.float32)
    with half if outside else nullcontext():
        agree(model, memory, each if outside else half(each), rtol=0.02)


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize(("microbatch", "passes"), [(12, 1), (8, 2), (7, 3), (3, 6)])
def test_no_pass_has_more_examples_than_the_microbatch(microbatch, passes, scale):
    model, memory, sizes = mlp(), vectors(6), []
    expected, _ = recalled(model, memory)

    def loss(model, batch):
        sizes.append(len(batch["y"]))
        return each(model, batch)

    found, count = recalled(model, memory, loss, microbatch=microbatch, scale=scale)
    assert (count, max(sizes) <= microbatch) == (passes, True)
    torch.testing.assert_close(found.constraints, expected.constraints)
    torch.testing.assert_close(found._matrix.losses, expected._matrix.losses)


def test_stored_losses_and_outputs_belong_to_their_rows():
    memory, model = vectors(6), mlp()
    said = Distillation(lambda model, batch: model(batch["x"]))
    for task in memory.tasks:
        batch = memory.batch(task)
        memory.record(task, outputs=said.outputs(model, batch), losses=torch.arange(4.0) + task)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    projector = agree(model, memory, said)
    assert projector._matrix.stored.tolist() == [1.5, 2.5, 3.5]


def test_nothing_is_compared_while_gradients_are_rounding():
    memory, model = vectors(6, dtype=torch.float32), mlp(dtype=torch.float32)
    said = Distillation(lambda model, batch: model(batch["x"]))
    for task in memory.tasks:
        memory.record(task, outputs=said.outputs(model, memory.batch(task)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        projector = GradientProjector(model.parameters(), Promise(said))
        projector.recall(model, memory.batches())
        assert projector.why_row_by_row is None
        with torch.no_grad():
            model[0].weight.add_(0.1)
        agree(model, memory, said, rtol=1e-3)


def heads(model, batch):
    """Return losses that are those of one head for the whole batch."""
    return each(model, batch) * (1 + batch["head"].max())


def classes_so_far(model, batch):
    """Return losses over the classes up to the largest in the batch, as of some incremental learners."""
    count = int(batch["y"].max()) + 1
    return F.cross_entropy(model(batch["x"])[:, :count], batch["y"], reduction="none")


@pytest.mark.parametrize("per", ["task", "label", "example"])
def test_each_set_is_compared_when_it_comes(per):
    memory, model = EpisodicMemory(4, label="y"), mlp()
    projector = GradientProjector(model.parameters(), Promise(classes_so_far))

    def go_on():
        for task in range(3):
            memory.add({"x": torch.randn(4, 6).double(), "y": torch.full((4,), task)}, task)
            for _ in range(3):
                projector.recall(model, memory.batches(per=per))

    with pytest.warns(UserWarning, match="other examples of its batch"):
        go_on()
    alone, _ = recalled(model, memory, classes_so_far, shared=False, per=per)
    torch.testing.assert_close(projector.constraints, alone.constraints, rtol=1e-9, atol=0)


def test_other_examples_under_the_name_of_a_set_are_compared():
    model, optimizer, gem = begin(lambda model, batch: heads(model, batch), model=mlp())
    for k in range(3):
        gem.keep(
            [{"x": torch.randn(4, 6).double(), "y": torch.randint(3, (4,)), "head": torch.zeros(4)}], name=k
        )
    for _ in range(5):
        take(model, optimizer, {"x": torch.randn(4, 6).double(), "y": torch.randint(3, (4,))})
    assert gem.projector.why_row_by_row is None
    gem.memory.remove(1)
    gem.keep([{"x": torch.randn(4, 6).double(), "y": torch.randint(3, (4,)), "head": torch.ones(4)}], name=1)
    with pytest.warns(UserWarning, match="other examples of its batch"):
        take(model, optimizer, {"x": torch.randn(4, 6).double(), "y": torch.randint(3, (4,))})


def test_a_set_that_joins_is_compared_in_its_first_pass():
    def first_head(model, batch):
        return each(model, batch) * (1 + batch["head"][0])

    memory, model = EpisodicMemory(4), mlp()
    projector = GradientProjector(model.parameters(), Promise(first_head))
    for k in range(2):
        memory.add({"x": torch.randn(4, 6).double(), "y": torch.randint(3, (4,)), "head": torch.zeros(4)}, k)
    for _ in range(5):
        projector.recall(model, memory.batches())
    assert projector.why_row_by_row is None
    memory.add({"x": torch.randn(4, 6).double(), "y": torch.randint(3, (4,)), "head": torch.ones(4)}, 2)
    with pytest.warns(UserWarning, match="other examples of its batch"):
        projector.recall(model, memory.batches())  # the sixth pass


def test_rows_are_compared_now_and_then():
    model, memory, switched = mlp(), vectors(6), []

    def loss(model, batch):
        values = each(model, batch)
        return values / values.detach().mean() if switched else values

    projector = GradientProjector(model.parameters(), Promise(loss))
    for _ in range(5):
        projector.recall(model, memory.batches())
    switched.append(True)
    projector.recall(model, memory.batches())
    projector.recall(model, memory.batches())
    with pytest.warns(UserWarning, match="other examples of its batch"):
        projector.recall(model, memory.batches())  # the eighth
    alone, _ = recalled(model, memory, loss, shared=False)
    torch.testing.assert_close(projector.constraints, alone.constraints, rtol=1e-9, atol=0)


def test_a_gradient_inside_of_the_loss_is_no_part_of_the_rows():
    def adversarial(model, batch):
        x = batch["x"].clone().requires_grad_()
        (direction,) = torch.autograd.grad(each(model, batch | {"x": x}).sum(), x)
        return each(model, batch | {"x": batch["x"] + 0.1 * direction.sign()})

    why, _ = refused(mlp(), vectors(6), adversarial)
    assert "backward pass of its own" in why


def test_half_precision_hides_no_dependence_on_other_examples():
    def shared(model, batch):
        values = each(model, batch).float()
        return values / (batch["y"] + 1).float().mean()

    with pytest.warns(UserWarning, match="other examples of its batch"):
        refused(mlp(dtype=torch.bfloat16), vectors(6, dtype=torch.bfloat16), shared)


def test_many_tokens_are_summed_before_they_are_stored_in_another_dtype():
    model = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 3))
    memory = memory_of(lambda n: torch.randint(4, (n, 300)), n=2)

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]).mean(1), batch["y"], reduction="none")

    rows = agree(model, memory, loss, rtol=2.0**-8, rows_dtype=torch.bfloat16).constraints.float()
    exact = recalled(model, memory, loss)[0].constraints
    assert ((rows - exact).abs() <= 2.0**-7 * exact.abs() + 1e-7).all()


def texts(lengths, collate):
    memory = EpisodicMemory(per_task=len(lengths[0]))
    for task, some in enumerate(lengths):
        memory.add([torch.randint(1, 20, (length,)) for length in some], task, collate=collate)
    return memory


def padded(examples):
    ids = nn.utils.rnn.pad_sequence(examples, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in examples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gpt2(**options):
    return language_model("gpt2", use_cache=False, **options).double()


def lora(**options):
    return adapted(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **options).double()


LENGTHS = [(5, 3, 7), (4, 9, 2), (6, 6, 6)]
CAUSAL = CrossEntropy(shift=True)


@pytest.mark.parametrize("per", ["task", "example"])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("make", [gpt2, lora])
def test_gpt2_on_texts_of_different_lengths(make, checkpointed, per):
    model = make()
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if make is lora:
            model.enable_input_require_grads()
    agree(model, texts(LENGTHS, padded), CAUSAL, per=per)


@pytest.mark.parametrize("name", ["llama", "gemma"])  # with weights w, and 1 + w
def test_norms_of_transformers(name):
    model = language_model(name, num_key_value_heads=1, head_dim=8, use_cache=False).double()
    model.get_input_embeddings().requires_grad_(False)  # Gemma's multiply by a constant
    # The norms compute in float32.
    agree(model, texts(LENGTHS, padded), CAUSAL, rtol=1e-5)


def test_longer_examples_than_at_first_share_smaller_passes(monkeypatch):
    model, memory, calls = gpt2(), texts([(2, 2)] * 6, padded), []
    monkeypatch.setattr("gemproj.torch.one_pass._CPU_PASS", 2**18)
    projector = GradientProjector(model.parameters(), Promise(CAUSAL))
    model.register_forward_hook(lambda *_: calls.append(1))

    def passes():
        calls.clear()
        projector.recall(model, memory.batches())
        return len(calls)

    before = min(passes(), passes())  # the first time finds out what is possible
    for task in range(6):
        memory.remove(task)
        memory.add([torch.randint(1, 20, (11,)) for _ in range(2)], task, collate=padded)
    assert before < passes()
    expected, _ = recalled(model, memory, CAUSAL, shared=False)
    torch.testing.assert_close(projector.constraints, expected.constraints)


def test_large_rows_have_passes_of_their_own(monkeypatch):
    monkeypatch.setattr("gemproj.torch.one_pass._CPU_ROW", 100)
    reason, more = refused(mlp(), vectors(6))
    assert "MiB" in reason
    assert more == 0


class Direct(nn.Module):
    """Uses the weight of a layer that it does not call, or calls, too."""

    def __init__(self, called):
        super().__init__()
        self.inner, self.called = nn.Linear(6, 3).double(), called

    def forward(self, x):
        return F.linear(x, self.inner.weight) + (self.inner(x) if self.called else 0.0)


class First(nn.Module):
    """Has examples in the second dimension."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 3).double()

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).mean(0)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
        self.inner = nn.Linear(6, 3).double()

    def forward(self, x):
        return self.inner(self.scale * x)


class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x.flip(1))


def hooked():
    model = nn.Sequential(nn.Linear(6, 3).double())
    model[0].forward = lambda x: F.linear(x, model[0].weight)
    return model


def packed(examples):
    ids = torch.cat(examples)[None]
    places = torch.cat([torch.arange(len(x)) for x in examples])[None]
    return {"input_ids": ids, "position_ids": places, "labels": ids}


def mean(model, batch):
    return each(model, batch).mean()


@pytest.mark.parametrize(
    ("make", "draw", "loss", "reason"),
    [
        (lambda: Direct(True), lambda: vectors(6), each, "outside of the layer"),
        (lambda: Direct(False), lambda: vectors(6), each, "outside of the layer"),
        (First, lambda: vectors(2, 6), each, "do not count examples"),
        (Own, lambda: vectors(6), each, "Own"),
        (lambda: Odd(6, 3).double(), lambda: vectors(6), each, "Odd"),
        (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double(), lambda: vectors(6), each, "BatchNorm1d"),
        (lambda: nn.Sequential(torch.compile(nn.Linear(6, 3).double(), backend="eager")), lambda: vectors(6), each, "compiled"),
        (hooked, lambda: vectors(6), each, "Linear"),
        (lambda: lora(use_dora=True), lambda: texts(LENGTHS, padded), CAUSAL, "Dora"),
        (lambda: gpt2(attn_implementation="eager", n_positions=32), lambda: texts(LENGTHS, packed), CAUSAL, "packed texts"),
        (mlp, lambda: vectors(6), mean, "mean over examples"),
    ],
)  # fmt: skip
def test_what_needs_a_pass_for_each_row(make, draw, loss, reason):
    found, _ = refused(make(), draw(), loss)
    assert reason in found


def test_losses_of_examples_that_depend_on_others():
    def contrastive(model, batch):
        logits = model(batch["x"])
        return F.cross_entropy(logits - logits.mean(0), batch["y"], reduction="none")

    with pytest.warns(UserWarning, match="depend on the other examples"):
        found, more = refused(mlp(), vectors(6), contrastive)
    assert "differs" in found
    assert more == 0


def test_errors_of_a_loss_are_raised():
    def fails(model, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        recalled(mlp(), vectors(6), fails)


def test_a_pass_that_fails_later_is_replaced():
    calls = []

    def loss(model, batch):
        calls.append(len(batch["y"]))
        if len(calls) > 2 and len(batch["y"]) > 4:
            raise RuntimeError("out of memory")
        return each(model, batch)

    model, memory = mlp(), vectors(6)
    expected, _ = recalled(model, memory)
    found, _ = recalled(model, memory, loss)
    assert found.why_row_by_row == "out of memory"
    torch.testing.assert_close(found.constraints, expected.constraints)


def test_other_threads_may_compute_with_the_model():
    model, memory = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double(), vectors(6)
    x, ended, wrong = torch.randn(12, 6).double(), threading.Event(), []  # as many as in a pass of all rows
    expected, own = model(x).detach(), [dict(layer._parameters) for layer in model]

    def evaluate():
        while not ended.is_set():
            with torch.no_grad():
                wrong.extend([1] * (not torch.equal(model(x), expected)))

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for _ in range(100):
            projector, _ = recalled(model, memory)
    finally:
        ended.set()
        thread.join()
    assert (wrong, projector.why_row_by_row) == ([], None)
    assert all(layer._parameters == held for layer, held in zip(model, own, strict=True))
