"""Losses to promise: what they are for labels, tokens and stored outputs."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from gemproj.torch.chosen import chosen, drawn
from gemproj.torch.losses import CrossEntropy, Distillation, model_logits


def given(values, batch):
    """Return logits that stand for a model."""
    return values


def tokens(seed=0, dtype=torch.float64):
    """Return logits (3, 5, 7) with labels and a mask, as a model of tokens has them; the last example has no label."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(7, (3, 5), generator=generator)
    labels[0, 3:], labels[2] = -100, -100
    return values, {"labels": labels, "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [0] * 5])}


BEFORE, BATCH = tokens(0)
NOW = tokens(1)[0]


@pytest.mark.parametrize("shift", [False, True])
def test_cross_entropy_of_tokens_is_the_mean_over_those_with_a_label(shift):
    found = CrossEntropy(given, shift=shift)(BEFORE, BATCH)
    for i in range(2):
        x, y = (BEFORE[i, :-1], BATCH["labels"][i, 1:]) if shift else (BEFORE[i], BATCH["labels"][i])
        torch.testing.assert_close(found[i], functional.cross_entropy(x, y, ignore_index=-100))
    assert found[2] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_of_many_classes(dtype):
    logits = torch.randn(3, 5, 1001, dtype=dtype, requires_grad=True)
    labels = torch.randint(1001, (3, 5)).index_fill(1, torch.tensor([1]), -100)
    found = CrossEntropy(given, shift=True)(logits, {"labels": labels})
    wide = logits[:, :-1].float().movedim(-1, 1)
    expected = functional.cross_entropy(wide, labels[:, 1:], reduction="none").sum(1) / 3
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), logits)[0] for one in (found, expected)))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        CrossEntropy(given)(logits, {"labels": labels.index_fill(1, torch.tensor([2]), 1001)})


def test_the_first_label_of_several_axes_is_predicted_by_none():
    logits = torch.randn(2, 4, 3, 5)
    labels = torch.randint(5, (2, 4, 3), dtype=torch.uint8)
    found = CrossEntropy(given, shift=True)(logits, {"labels": labels})
    expected = functional.cross_entropy(logits[:, :-1].movedim(-1, 1), labels[:, 1:].long(), reduction="none")
    torch.testing.assert_close(found, expected.flatten(1).mean(1))


def test_every_label_of_uint8_is_a_class():
    """In uint8, -100 would be 156."""
    logits, each = torch.randn(3, 200), CrossEntropy(given, labels="y")
    found, expected = ({"y": torch.tensor([0, 156, 199], dtype=kind)} for kind in (torch.uint8, torch.int64))
    assert torch.equal(each(logits, found), each(logits, expected))
    assert each.labelled(found).all()


def test_the_default_is_a_model_of_transformers():
    model = lambda labels, attention_mask: SimpleNamespace(logits=BEFORE)  # noqa: E731
    assert CrossEntropy()(model, BATCH).shape == (3,)
    assert [len(one) for one in Distillation().outputs(model, BATCH)] == [3, 5, 0]
    pairs = lambda **batch: {"logits": BEFORE, "loss": None}  # noqa: E731
    assert model_logits(pairs, BATCH) is BEFORE
    with pytest.raises(TypeError, match=r"model\(\*\*batch\)\.logits; found list"):
        CrossEntropy()(model, [BEFORE])


def test_logits_of_a_model_of_transformers_are_those_of_its_tokens_without_its_loss():
    def model(input_ids):  # called with labels, it would raise
        return SimpleNamespace(logits=BEFORE)

    model.forward, model.config = model, SimpleNamespace(is_encoder_decoder=False)
    batch = {"input_ids": BATCH["labels"][:, 2:], "labels": BATCH["labels"]}
    assert model_logits(model, batch) is BEFORE
    model.active_peft_config = SimpleNamespace(is_prompt_learning=True)  # the prompt has two positions
    assert torch.equal(model_logits(model, batch), BEFORE[:, 2:])

    def needing(input_ids, labels):
        return SimpleNamespace(logits=labels)

    needing.forward, needing.config = needing, model.config
    assert model_logits(needing, batch) is BATCH["labels"]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_distillation_is_the_divergence_from_stored_outputs(temperature):
    now = NOW.clone().requires_grad_()
    loss = Distillation(given, temperature=temperature)
    found = loss(now, BATCH, loss.outputs(BEFORE, BATCH))
    p, q = (functional.log_softmax(v / temperature, -1) for v in (BEFORE, now))
    terms = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1) * temperature**2
    for i, n in enumerate((3, 5)):
        torch.testing.assert_close(found[i], terms[i, :n].mean())
    assert found[2] == 0.0
    # The gradient with respect to the logits is T (q - p), averaged over the positions that count.
    (gradient,) = torch.autograd.grad(found[1], now)
    torch.testing.assert_close(gradient[1], temperature * (q.exp() - p.exp())[1].detach() / 5)
    # Logits may be stored, too: a divergence does not change with their offset.
    if temperature == 1.0:
        torch.testing.assert_close(loss(now, BATCH, BEFORE + 3.0), found)


@pytest.mark.parametrize("top", [2, 3, 5, 6])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_classes_that_are_drawn_estimate_the_divergence_without_bias(temperature, top):
    before, now = BEFORE[:2].repeat(400, 1, 1), NOW[:2].repeat(400, 1, 1)
    full = Distillation(given, temperature=temperature)
    exact = full(NOW[:2], {}, full.outputs(BEFORE[:2], {}))
    loss = Distillation(given, top=top, temperature=temperature)
    found = loss(now, {}, loss.outputs(before, {})).view(400, 2)
    assert found.min() >= 0
    assert found.std(0).min() > 1e-3  # something is drawn
    assert torch.all((found.mean(0) - exact).abs() < 5 * found.std(0) / 400**0.5)


@pytest.mark.parametrize("top", [2, 3, 6, 7, 9])  # of 7
def test_the_divergence_and_its_gradient_are_zero_where_nothing_has_changed(top):
    now = BEFORE.clone().requires_grad_()
    loss = Distillation(given, top=top)
    found = loss(now, BATCH, loss.outputs(BEFORE, BATCH))
    assert found.abs().max() < 1e-12
    assert torch.autograd.grad(found.sum(), now)[0].abs().max() < 1e-12


@pytest.mark.parametrize("rest", [1e-9, 1e-5])
def test_little_that_is_left_is_estimated_closely(rest):
    """Of float16, too, and where the rest is below what one minus a sum can tell."""
    before, now = torch.zeros(2, 100, 1200)
    for logits, left in ((before, rest), (now, 3e-5)):
        logits[:, 0] = math.log(1199 / left)
    now[:, 5:50] += 0.1
    loss, full = Distillation(given), Distillation(given, top=1200, dtype=torch.float64)
    exact = full(now.double(), {}, full.outputs(before.double(), {}))
    found = loss(now, {}, loss.outputs(before, {}))
    assert torch.all((found - exact).abs() < 1e-5)


@pytest.mark.parametrize("least", [-8.0, -100.0])  # the exponential of 100 is too large for float32
def test_a_class_that_is_drawn_and_becomes_certain(least):
    logits = torch.zeros(1, 2000)
    loss = Distillation(given)
    values, classes = loss.outputs(logits, {})
    certain = logits.scatter(1, classes[:, -1:].long(), 200.0)
    values[:, -1] = least  # of a class that was unlikely
    found = loss(certain, {}, (values, classes))
    assert torch.isfinite(found).all()
    assert found > 5.0


def test_draws_do_not_depend_on_parts_and_positions_that_are_alike_have_others(monkeypatch):
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    whole = drawn(logits, None, 8, 1.0)
    monkeypatch.setattr("gemproj.torch.chosen._ON_CPU", 150)
    values, classes = drawn(logits, None, 8, 1.0)
    torch.testing.assert_close(values, whole[0])
    assert torch.equal(classes, whole[1])
    # Positions that are alike have other draws. So have texts of one position: the first of their four draws
    # is anywhere in the first quarter of the probabilities.
    same = drawn(logits[:1].repeat(40, 1), None, 8, 1.0)[1]
    assert len({tuple(row) for row in same[:, 4:].tolist()}) > 10
    first = [int(drawn(0.1 * row[None], None, 8, 1.0)[1][0, 4:].min()) for row in logits]
    assert max(first) - min(first) > 7


@pytest.mark.parametrize("left", ["much", "little", "nothing"])
@pytest.mark.parametrize("top", [2, 7, 8])
def test_half_of_the_classes_are_the_likeliest_and_others_are_drawn_from_the_rest(top, left):
    logits = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    if left != "much":
        logits[:, 0] += 20.0
    if left == "nothing":
        logits[:, 1:] = -float("inf")
    values, classes = drawn(logits, None, top, 1.0)
    first = top - top // 2
    torch.testing.assert_close(
        (values[:, :first], classes[:, :first]), tuple(logits.log_softmax(-1).topk(first))
    )
    if left != "nothing":
        assert not (classes[:, :first, None] == classes[:, None, first:]).any()
    if left == "much":
        rest = logits.scatter(1, classes[:, :first], -float("inf")).log_softmax(-1)
        torch.testing.assert_close(values[:, first:], rest.gather(1, classes[:, first:]))
    loss = Distillation(given, top=top)
    assert loss(logits, {}, loss.outputs(logits, {})).abs().max() < 1e-5
    assert torch.isfinite(loss(torch.zeros_like(logits), {}, loss.outputs(logits, {}))).all()


@pytest.mark.parametrize("classes", [1000, 1001])
def test_of_more_than_a_thousand_classes_some_are_stored_in_half_precision(classes):
    random = torch.Generator().manual_seed(0)
    before, now = (3 * torch.randn(4, classes, generator=random) for _ in range(2))
    loss, whole = Distillation(given), Distillation(given, top=classes, dtype=torch.float32)
    stored, few = loss.outputs(before, {}), classes > 1000
    assert isinstance(stored, tuple) is few
    leaf = stored[0] if few else stored
    assert leaf.shape == (4, 64 if few else classes)
    assert leaf.dtype == (torch.float16 if few else torch.float32)
    assert whole.outputs(before, {}).shape == (4, classes)
    assert Distillation(given, dtype=torch.float32).outputs(before, {})[0].dtype == torch.float32
    assert loss(before, {}, stored).abs().max() < 2e-3
    found, full = loss(now, {}, stored), whole(now, {}, whole.outputs(before, {}))
    assert ((found - full).abs() < (0.2 if few else 1e-5) * full).all()


@pytest.mark.parametrize("top", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_in_half_precision(dtype, top):
    before, batch = tokens(0, torch.float32)
    loss = Distillation(given, dtype=dtype, top=top)
    stored = loss.outputs(before, batch)
    assert (stored[0] if top is None else stored[0][0]).dtype == dtype
    same = loss(before, batch, stored)
    # Logarithms of probabilities are up to 8 here; a divergence is quadratic in what they are off.
    assert same.abs().max() < (8 * torch.finfo(dtype).eps) ** (2 if top is None else 1)


@pytest.mark.parametrize("some", [None, [0, 3, 4, 8], []])
@pytest.mark.parametrize("numbers", [1, 20, 1_000])  # one position at a time, a few, all
def test_log_probabilities_of_a_few_classes(monkeypatch, numbers, some):
    monkeypatch.setattr("gemproj.torch.chosen._ON_CPU", numbers)
    logits = BEFORE[:2].flatten(0, 1).clone().requires_grad_()
    at = None if some is None else torch.tensor(some, dtype=torch.long)
    whole = torch.log_softmax((logits if at is None else logits[at]) / 2.0, -1)
    values, classes = drawn(logits, at, 3, 2.0)
    rest = whole.scatter(1, classes[:, :2], -float("inf")).log_softmax(-1)
    torch.testing.assert_close((values[:, :2], classes[:, :2]), tuple(whole.topk(2)))
    torch.testing.assert_close(values[:, 2:], rest.gather(1, classes[:, 2:]))
    twice = classes.flip(1)[:, [0, 1, 0]]  # a class may be asked for twice
    torch.testing.assert_close(chosen(logits, at, twice, 2.0), whole.gather(1, twice))

    def fast(z):
        return chosen(z, at, twice, 2.0).sin().sum()

    def plain(z):
        z = torch.log_softmax((z if at is None else z[at]) / 2.0, -1)
        return z.gather(1, twice).sin().sum()

    assert torch.autograd.gradcheck(lambda z: chosen(z, at, twice, 2.0), logits, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda z: chosen(z, at, twice, 2.0), logits)
    many = torch.stack([logits.detach(), 2 * logits.detach()])
    for way in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        torch.testing.assert_close(torch.func.vmap(way(fast))(many), torch.func.vmap(way(plain))(many))


def test_classes_that_are_impossible():
    before, now, loss = BEFORE.clone(), NOW.clone().requires_grad_(), Distillation(given)
    before[..., 2] = -torch.inf
    value = loss(now, BATCH, loss.outputs(before, BATCH)).sum()
    assert value.isfinite()
    assert torch.autograd.grad(value, now)[0].isfinite().all()


def test_distillation_with_labels_is_a_sum():
    labels, alone = CrossEntropy(given), Distillation(given)
    loss = Distillation(given, labels=labels, weight=0.25)
    stored = loss.outputs(BEFORE, BATCH)
    now = NOW.clone().requires_grad_()
    both = loss(now, BATCH, stored), alone(now, BATCH, stored) + 0.25 * labels(now, BATCH)
    torch.testing.assert_close(*both)
    torch.testing.assert_close(*(torch.autograd.grad(one.sum(), now) for one in both))


def test_the_mask_may_be_anywhere():
    mask = (BATCH["labels"] != -100).long()
    by_key, default, by_place = (Distillation(given, **o) for o in ({"mask": "mask"}, {}, {"mask": 1}))
    stored = default.outputs(BEFORE, {})
    expected = by_key(NOW, {"mask": mask}, stored)
    of_positions = by_key.outputs(BEFORE, {"mask": mask})
    assert [len(one) for one in of_positions] == mask.sum(1).tolist()
    torch.testing.assert_close(by_key(NOW, {"mask": mask}, of_positions), expected)
    with pytest.raises(ValueError, match=r"now \[5, 5, 5\] count"):
        default(NOW, {}, of_positions)
    torch.testing.assert_close(default(NOW, {"attention_mask": mask}, stored), expected)
    torch.testing.assert_close(by_place(NOW, (BATCH["labels"], mask), stored), expected)
    assert not torch.allclose(expected, default(NOW, {}, stored))
    with pytest.raises(ValueError, match="mask 'mask' is not in the batch"):
        by_key(NOW, {}, stored)
    for loss, key in ((by_key, "mask"), (default, "attention_mask")):
        with pytest.raises(ValueError, match=r"mask must have the shape .*\(3, 5\); found \(3, 4\)"):
            loss(NOW, {key: mask[:, 1:]}, stored)


class Model(SimpleNamespace):
    """Returns its attributes, as a model of transformers does."""

    def __call__(self, **batch):
        return self


FEW, ONE_CLASS = Distillation(given, top=3), r"logits must have shape .* at least two classes; found"
CAUSAL = Model(config=SimpleNamespace(), can_generate=lambda: True, logits=BEFORE)
SEVERAL = Model(config=SimpleNamespace(problem_type="multi_label_classification"), logits=BEFORE[:, 0])
BOTH_WAYS = Model(config=SimpleNamespace(is_encoder_decoder=True), logits=BEFORE)
NUMBERS = Model(config=SimpleNamespace(problem_type="regression"), logits=BEFORE[:, 0])
DETECTOR = Model(logits=BEFORE, pred_boxes=BEFORE)


def first_labels(batch):
    return batch["labels"][:, 0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: CrossEntropy(given, labels="y")(BEFORE, BATCH), "labels 'y' is not in the batch; found keys"),
        (lambda: CrossEntropy(given, labels=first_labels)(BEFORE, BATCH), r"labels must be integers of shape \(3, 5\)"),
        (lambda: CrossEntropy(given, labels=lambda b: 0.7 * b["labels"])(BEFORE, BATCH), r"labels must be integers .*float32"),
        (lambda: CrossEntropy(given, labels=first_labels, shift=True)(BEFORE[:, 0], BATCH), r"shift=True is for logits of tokens, .* found \(3, 7\)"),
        (lambda: Distillation(given)(NOW[..., :6], BATCH, BEFORE), "stored for 7 classes, and the model has 6"),
        (lambda: FEW(NOW[..., :3], BATCH, FEW.outputs(BEFORE, BATCH)), "stored for at least . classes, and the model has 3"),
        # Of one class the probability is one.
        (lambda: Distillation(given).outputs(BEFORE[0, :, 0], {}), ONE_CLASS),
        (lambda: CrossEntropy(given)(BEFORE[..., :1], BATCH), ONE_CLASS),
        (lambda: Distillation().outputs(BOTH_WAYS, {}), "mask 'labels' is not in the batch"),
        (lambda: CrossEntropy()(CAUSAL, BATCH), r"causal language model.* CrossEntropy\(shift=True\)"),
        (lambda: Distillation(labels=CrossEntropy())(CAUSAL, BATCH, BEFORE), r"causal language model.* CrossEntropy\(shift=True\)"),
        (lambda: Distillation().outputs(SEVERAL, {}), "classes that exclude each other"),
        (lambda: Distillation().outputs(Model(logits=BEFORE[None]), {}), "classes that exclude each other"),
        (lambda: Distillation().outputs(NUMBERS, {}), "For numbers, .* your own loss, such as a squared difference"),
        (lambda: Distillation().outputs(Model(logits=BEFORE[:, 0]), {"labels": BEFORE[:, 0]}), "For numbers, .* your own loss"),
        (lambda: Distillation().outputs(DETECTOR, {}), "Model also returns pred_boxes, .* pass a loss of your own"),
        (lambda: Distillation(given)(NOW[:, 1:], {}, BEFORE), r"stored for \(3, 5\) positions, .* have \(3, 4\): .* Pass mask="),
        (lambda: Distillation().outputs(Model(), {}), r"model\(\*\*batch\) has no logits: Model"),
    ],
)  # fmt: skip
def test_what_losses_refuse(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_the_positions_of_an_encoder_decoder_model_are_those_with_a_label():
    batch = {"labels": torch.ones(3, 5).long(), "attention_mask": torch.ones(3, 2)}  # of the input
    batch["labels"][0, 2:] = -100
    explicit = Distillation(mask=lambda batch: batch["labels"] != -100)
    stored, expected = Distillation().outputs(BOTH_WAYS, batch), explicit.outputs(BOTH_WAYS, batch)
    assert [len(one) for one in stored] == [2, 5, 5]
    assert all(map(torch.equal, stored, expected))
    now = Model(config=BOTH_WAYS.config, logits=NOW)
    torch.testing.assert_close(Distillation()(now, batch, stored), explicit(now, batch, expected))
