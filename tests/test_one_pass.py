"""Rows of G that share a pass: those of a pass each, or a reason why not."""

import threading

import pytest

torch = pytest.importorskip("torch")

from models import EACH, SAID, Quantised, adapted, begin, language_model, loss, take  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gemproj.torch import EpisodicMemory, GradientProjector, Promise  # noqa: E402
from gemproj.torch.losses import CrossEntropy  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


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


def recalled(model, memory, loss=EACH, *, shared=True, per="task", **options):
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


def agree(model, memory, loss=EACH, *, rtol=1e-12, **options):
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


def refused(model, memory, loss=EACH, **options):
    """Compare rows that cannot share a pass, and return the reason."""
    before = [set(module.__dict__) for module in model.modules()]
    expected, _ = recalled(model, memory, loss, shared=False, **options)
    found, passes = recalled(model, memory, loss, **options)
    torch.testing.assert_close(found.constraints, expected.constraints, rtol=0, atol=0)
    assert before == [set(module.__dict__) for module in model.modules()]
    return found.why_row_by_row, passes - len(expected.constraints)


def mlp(middle=nn.Tanh, dtype=torch.float64):
    return nn.Sequential(nn.Linear(6, 5), middle(), nn.Linear(5, 3)).to(dtype)


def single():
    return mlp(dtype=torch.float32)


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


def quantised():
    """Return a network whose middle layer is frozen and has no storage."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)).double().requires_grad_(False)
    model[1].weight = nn.Parameter(Quantised(model[1].weight), requires_grad=False)
    model[0].requires_grad_()
    return model


def sparse():
    """Return a network that multiplies by a sparse matrix, as those for graphs."""
    graph = torch.randn(3, 3, dtype=torch.float64).to_sparse()
    return Around(lambda model, x: (graph @ model.inner(x).T).T)


def texts(lengths, collate):
    memory = EpisodicMemory(per_task=len(lengths[0]))
    for task, some in enumerate(lengths):
        memory.add([torch.randint(1, 20, (length,)) for length in some], task, collate=collate)
    return memory


def padded(examples):
    ids = nn.utils.rnn.pad_sequence(examples, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(x) for x in examples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def of_lengths(collate=padded):
    """Store texts of three tasks."""
    return texts([(5, 3, 7), (4, 9, 2), (6, 6, 6)], collate)


def gpt2(**options):
    return language_model("gpt2", use_cache=False, **options).double()


def lora(**options):
    return adapted(gpt2(), target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **options).double()


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model


def normed(name):
    model = language_model(name, num_key_value_heads=1, head_dim=8, use_cache=False).double()
    model.get_input_embeddings().requires_grad_(False)  # Gemma's multiply by a constant
    return model


CAUSAL = CrossEntropy(shift=True)
HALF = torch.autocast("cpu", torch.bfloat16)
CASES = {
    "perceptron": (mlp, lambda: vectors(6), EACH, {}),
    "in place": (lambda: mlp(lambda: nn.ReLU(inplace=True)), lambda: vectors(6), EACH, {}),
    "examples of more dimensions": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm((4, 5)), nn.Flatten(), nn.Linear(20, 3)).double(),
        lambda: vectors(4, 6), EACH, {},
    ),
    "tied": (lambda: Ours(tied=True), tokens, EACH, {}),
    "frozen weights without storage": (quantised, lambda: vectors(6), EACH, {}),
    "sparse": (sparse, lambda: vectors(6), EACH, {}),
    "twice": (lambda: Ours(twice=True), tokens, EACH, {}),
    "checkpointed": (lambda: Ours(checkpointed=True), tokens, EACH, {}),
    "parts are frozen, or not reached": (partly, tokens, EACH, {}),
    "all of that": (lambda: Ours(tied=True, twice=True, checkpointed=True), tokens, EACH, {}),
    "rows of another precision": (single, lambda: vectors(6, dtype=torch.float32), EACH, {"rows_dtype": torch.float64, "rtol": 1e-5}),
    "autocast": (single, lambda: vectors(6, dtype=torch.float32), HALF(EACH), {"rtol": 0.02}),
    "GPT-2": (gpt2, of_lengths, CAUSAL, {}),
    "GPT-2, checkpointed": (lambda: checkpointed(gpt2()), of_lengths, CAUSAL, {}),
    "LoRA": (lora, of_lengths, CAUSAL, {}),
    "LoRA, checkpointed": (lambda: checkpointed(lora()), of_lengths, CAUSAL, {}),
    # With weights w, and 1 + w; the norms compute in float32.
    "norms of Llama": (lambda: normed("llama"), of_lengths, CAUSAL, {"rtol": 1e-5}),
    "norms of Gemma": (lambda: normed("gemma"), of_lengths, CAUSAL, {"rtol": 1e-5}),
}  # fmt: skip


@pytest.mark.parametrize("per", ["task", "example"])
@pytest.mark.parametrize("name", CASES)
def test_rows_share_a_pass(name, per):
    make, draw, loss, options = CASES[name]
    agree(make(), draw(), loss, per=per, **options)


def test_autocast_of_the_caller():
    with HALF:
        agree(single(), vectors(6, dtype=torch.float32), rtol=0.02)


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize(("microbatch", "passes"), [(12, 1), (8, 2), (7, 3), (3, 6)])
def test_no_pass_has_more_examples_than_the_microbatch(microbatch, passes, scale):
    model, memory, sizes = mlp(), vectors(6), []
    expected, _ = recalled(model, memory)

    def loss(model, batch):
        sizes.append(len(batch["y"]))
        return EACH(model, batch)

    found, count = recalled(model, memory, loss, microbatch=microbatch, scale=scale)
    assert (count, max(sizes) <= microbatch) == (passes, True)
    torch.testing.assert_close(found.constraints, expected.constraints)
    torch.testing.assert_close(found._matrix.losses, expected._matrix.losses)


def remembering(dtype):
    """Return a model, and a memory with its outputs and some losses."""
    memory, model = vectors(6, dtype=dtype), mlp(dtype=dtype)
    for task in memory.tasks:
        losses = torch.arange(4.0) + task
        memory.record(task, outputs=SAID.outputs(model, memory.batch(task)), losses=losses)
    return model, memory


def shift(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))


def test_stored_losses_and_outputs_belong_to_their_rows():
    model, memory = remembering(torch.float64)
    shift(model)
    assert agree(model, memory, SAID)._matrix.stored.tolist() == [1.5, 2.5, 3.5]


@pytest.mark.filterwarnings("error::UserWarning")
def test_nothing_is_compared_while_gradients_are_rounding():
    model, memory = remembering(torch.float32)
    projector = GradientProjector(model.parameters(), Promise(SAID))
    projector.recall(model, memory.batches())
    assert projector.why_row_by_row is None
    shift(model)
    agree(model, memory, SAID, rtol=1e-3)


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


def examples(head=0.0):
    """Return examples whose losses are those of one head for the whole batch."""
    return {"x": torch.randn(4, 6).double(), "y": torch.randint(3, (4,)), "head": torch.full((4,), head)}


def test_other_examples_under_the_name_of_a_set_are_compared():
    model, optimizer, gem = begin(lambda m, batch: EACH(m, batch) * (1 + batch["head"].max()), model=mlp())
    for k in range(3):
        gem.keep([examples()], name=k)
    for _ in range(5):
        take(model, optimizer, examples())
    assert gem.projector.why_row_by_row is None
    gem.memory.remove(1)
    gem.keep([examples(1.0)], name=1)
    with pytest.warns(UserWarning, match="other examples of its batch"):
        take(model, optimizer, examples())


def test_a_set_that_joins_is_compared_in_its_first_pass():
    memory, model = EpisodicMemory(4), mlp()
    projector = GradientProjector(
        model.parameters(), Promise(lambda m, batch: EACH(m, batch) * (1 + batch["head"][0]))
    )
    for k in range(2):
        memory.add(examples(), k)
    for _ in range(5):
        projector.recall(model, memory.batches())
    assert projector.why_row_by_row is None
    memory.add(examples(1.0), 2)
    with pytest.warns(UserWarning, match="other examples of its batch"):
        projector.recall(model, memory.batches())  # the sixth pass


def test_rows_are_compared_now_and_then():
    model, memory, switched = mlp(), vectors(6), []

    def loss(model, batch):
        values = EACH(model, batch)
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


def contrastive(model, batch):
    logits = model(batch["x"])
    return F.cross_entropy(logits - logits.mean(0), batch["y"], reduction="none")


def scaled_by_all(model, batch):
    return EACH(model, batch).float() / (batch["y"] + 1).float().mean()


@pytest.mark.parametrize(("loss", "dtype"), [(contrastive, torch.float64), (scaled_by_all, torch.bfloat16)])
def test_losses_of_examples_that_depend_on_others(loss, dtype):
    with pytest.warns(UserWarning, match="depend on the other examples of its batch"):
        found, more = refused(mlp(dtype=dtype), vectors(6, dtype=dtype), loss)
    assert "differs" in found
    assert more == 0


def test_many_tokens_are_summed_before_they_are_stored_in_another_dtype():
    model = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 3))
    memory = memory_of(lambda n: torch.randint(4, (n, 300)), n=2)

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]).mean(1), batch["y"], reduction="none")

    rows = agree(model, memory, loss, rtol=2.0**-8, rows_dtype=torch.bfloat16).constraints.float()
    exact = recalled(model, memory, loss)[0].constraints
    assert ((rows - exact).abs() <= 2.0**-7 * exact.abs() + 1e-7).all()


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


class Around(nn.Module):
    """Uses a layer in some way, and a parameter of its own if it has one."""

    def __init__(self, use, own=None):
        super().__init__()
        self.inner, self.own, self.use = nn.Linear(6, 3).double(), own, use

    def forward(self, x):
        return self.use(self, x)


def scaling():
    own = nn.Parameter(torch.ones(6, dtype=torch.float64))
    return Around(lambda model, x: model.inner(model.own * x), own)


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


def adversarial(model, batch):
    x = batch["x"].clone().requires_grad_()
    (direction,) = torch.autograd.grad(EACH(model, batch | {"x": x}).sum(), x)
    return EACH(model, batch | {"x": batch["x"] + 0.1 * direction.sign()})


@pytest.mark.parametrize(
    ("make", "draw", "loss", "reason"),
    [
        (lambda: Around(lambda m, x: F.linear(x, m.inner.weight) + m.inner(x)), lambda: vectors(6), EACH, "outside of the layer"),
        (lambda: Around(lambda m, x: F.linear(x, m.inner.weight)), lambda: vectors(6), EACH, "outside of the layer"),
        (lambda: Around(lambda m, x: m.inner(x.transpose(0, 1)).mean(0)), lambda: vectors(2, 6), EACH, "do not count examples"),
        (scaling, lambda: vectors(6), EACH, "Around"),
        (lambda: Odd(6, 3).double(), lambda: vectors(6), EACH, "Odd"),
        (lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).double(), lambda: vectors(6), EACH, "BatchNorm1d"),
        (lambda: nn.Sequential(torch.compile(nn.Linear(6, 3).double(), backend="eager")), lambda: vectors(6), EACH, "compiled"),
        (hooked, lambda: vectors(6), EACH, "Linear"),
        (lambda: lora(use_dora=True), of_lengths, CAUSAL, "Dora"),
        (lambda: gpt2(attn_implementation="eager", n_positions=32), lambda: of_lengths(packed), CAUSAL, "packed texts"),
        (mlp, lambda: vectors(6), loss, "mean over examples"),
        (mlp, lambda: vectors(6), adversarial, "backward pass of its own"),
    ],
)  # fmt: skip
def test_what_needs_a_pass_for_each_row(make, draw, loss, reason):
    found, _ = refused(make(), draw(), loss)
    assert reason in found


def test_errors_of_a_loss_are_raised():
    def fails(model, batch):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        recalled(mlp(), vectors(6), fails)


def test_an_error_in_the_first_pass_is_raised_and_forgotten():
    model, memory, calls, faults = mlp(), vectors(6), [], [ZeroDivisionError("mine")]

    def loss(model, batch):
        calls.append(len(batch["y"]))
        if faults:
            raise faults.pop()
        return EACH(model, batch)

    projector = GradientProjector(model.parameters(), Promise(loss))
    with pytest.raises(ZeroDivisionError, match="mine"):
        projector.recall(model, memory.batches())
    assert calls == [4]
    for _ in range(3):
        calls.clear()
        projector.recall(model, memory.batches())
    assert (calls, projector.why_row_by_row) == ([12], None)


def test_a_pass_that_fails_later_is_replaced():
    calls = []

    def loss(model, batch):
        calls.append(len(batch["y"]))
        if len(calls) > 2 and len(batch["y"]) > 4:
            raise RuntimeError("out of memory")
        return EACH(model, batch)

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
