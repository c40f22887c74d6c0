"""Losses to promise: what they are for labels, tokens and stored outputs."""

import pytest

torch = pytest.importorskip("torch")

from models import perceptron, task  # noqa: E402
from torch.nn import functional  # noqa: E402

from gemproj.torch.losses import CrossEntropy, Distillation  # noqa: E402


class Output:
    def __init__(self, logits):
        self.logits = logits


def logits(model, batch):
    return model(batch[0])


def tokens(seed=0, dtype=torch.float64):
    """Logits (3, 5, 7) with labels and a mask, as a model of tokens has them; the last example has no label."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(7, (3, 5), generator=generator)
    labels[0, 3:], labels[2] = -100, -100
    return values, {"labels": labels, "attention_mask": torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [0] * 5])}


def test_cross_entropy_of_each_example():
    model, batch = perceptron(), task(1)
    expected = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    torch.testing.assert_close(CrossEntropy(logits, labels=1)(model, batch), expected)
    named = {"x": batch[0], "labels": batch[1]}
    by_name = CrossEntropy(lambda model, b: model(b["x"]), labels=lambda b: b["labels"])
    torch.testing.assert_close(by_name(model, named), expected)


@pytest.mark.parametrize("shift", [False, True])
def test_cross_entropy_of_tokens_is_the_mean_over_those_with_a_label(shift):
    values, batch = tokens()
    found = CrossEntropy(lambda model, b: values, shift=shift)(None, batch)
    for i in range(2):
        x, y = (values[i, :-1], batch["labels"][i, 1:]) if shift else (values[i], batch["labels"][i])
        torch.testing.assert_close(found[i], functional.cross_entropy(x, y, ignore_index=-100))
    assert found[2] == 0.0


def test_the_default_is_a_model_of_transformers():
    values, batch = tokens()
    model = lambda labels, attention_mask: Output(values)  # noqa: E731
    assert CrossEntropy()(model, batch).shape == (3,)
    assert [len(one) for one in Distillation().outputs(model, batch)] == [3, 5, 0]
    with pytest.raises(TypeError, match=r"model\(\*\*batch\)\.logits; found list"):
        CrossEntropy()(model, [values])


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_distillation_is_the_divergence_from_stored_outputs(temperature):
    before, batch = tokens(0)
    now, _ = tokens(1)
    now.requires_grad_()
    loss = Distillation(lambda values, b: values, temperature=temperature)
    found = loss(now, batch, loss.outputs(before, batch))
    p, q = (functional.log_softmax(v / temperature, -1) for v in (before, now))
    terms = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1) * temperature**2
    for i, n in enumerate((3, 5)):
        torch.testing.assert_close(found[i], terms[i, :n].mean())
    assert found[2] == 0.0
    # The gradient with respect to the logits is T (q - p), averaged over the positions that count.
    (gradient,) = torch.autograd.grad(found[1], now)
    torch.testing.assert_close(gradient[1], temperature * (q.exp() - p.exp())[1].detach() / 5)
    # Logits may be stored, too: a divergence does not change with their offset.
    if temperature == 1.0:
        torch.testing.assert_close(loss(now, batch, before + 3.0), found)


def test_the_most_probable_classes_bound_the_divergence_from_below():
    before, batch = tokens(0)
    now, _ = tokens(1)
    full = Distillation(lambda values, b: values)
    whole = full(now, batch, full.outputs(before, batch))
    last = torch.zeros(3, dtype=torch.float64)
    for top in range(1, 7):
        loss = Distillation(lambda values, b: values, top=top)
        found = loss(now, batch, loss.outputs(before, batch))
        assert torch.all(found >= last - 1e-12)
        assert torch.all(found <= whole + 1e-12)
        last = found
    torch.testing.assert_close(last, whole)  # six of seven classes, and the rest
    with pytest.raises(ValueError, match="top must be below the number of classes, 7; found 7"):
        Distillation(lambda values, b: values, top=7).outputs(before, batch)


@pytest.mark.parametrize("top", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_in_half_precision(dtype, top):
    before, batch = tokens(0, torch.float32)
    loss = Distillation(lambda values, b: values, dtype=dtype, top=top)
    stored = loss.outputs(before, batch)
    assert (stored[0] if top is None else stored[0][0]).dtype == dtype
    same = loss(before, batch, stored)
    # Logarithms of probabilities are up to 8 here; a divergence is quadratic in what they are off.
    assert same.abs().max() < (8 * torch.finfo(dtype).eps) ** (2 if top is None else 1)


def test_classes_that_are_impossible():
    before, batch = tokens(0)
    before[..., 2] = -torch.inf
    now = tokens(1)[0].requires_grad_()
    loss = Distillation(lambda values, b: values)
    value = loss(now, batch, loss.outputs(before, batch)).sum()
    assert value.isfinite()
    assert torch.autograd.grad(value, now)[0].isfinite().all()


def test_distillation_with_labels_is_a_sum():
    before, batch = tokens(0)
    now, _ = tokens(1)
    labels = CrossEntropy(lambda values, b: values)
    loss = Distillation(lambda values, b: values, labels=labels, weight=0.25)
    alone = Distillation(lambda values, b: values)
    stored = loss.outputs(before, batch)
    torch.testing.assert_close(
        loss(now, batch, stored), alone(now, batch, stored) + 0.25 * labels(now, batch)
    )


def test_the_mask_may_be_a_place_in_a_tuple():
    before, batch = tokens(0)
    now, _ = tokens(1)
    mask = (batch["labels"] != -100).long()
    by_key = Distillation(lambda values, b: values, mask="mask")
    default = Distillation(lambda values, b: values)
    by_place = Distillation(lambda values, b: values, mask=1)
    stored = default.outputs(before, {})
    expected = by_key(now, {"mask": mask}, stored)
    of_positions = by_key.outputs(before, {"mask": mask})
    assert [len(one) for one in of_positions] == mask.sum(1).tolist()
    torch.testing.assert_close(by_key(now, {"mask": mask}, of_positions), expected)
    with pytest.raises(ValueError, match=r"now \[5, 5, 5\] count"):
        default(now, {}, of_positions)
    torch.testing.assert_close(default(now, {"attention_mask": mask}, stored), expected)
    assert not torch.allclose(expected, default(now, {}, stored))
    with pytest.raises(ValueError, match="mask 'mask' is not in the batch"):
        by_key(now, {}, stored)
    for loss, key in ((by_key, "mask"), (default, "attention_mask")):
        with pytest.raises(ValueError, match=r"mask must have the shape .*\(3, 5\); found \(3, 4\)"):
            loss(now, {key: mask[:, 1:]}, stored)
    torch.testing.assert_close(by_place(now, (batch["labels"], mask), stored), expected)


def test_what_losses_refuse():
    values, batch = tokens()
    with pytest.raises(ValueError, match="labels 'y' is not in the batch; found keys"):
        CrossEntropy(lambda model, b: values, labels="y")(None, batch)
    with pytest.raises(ValueError, match=r"labels must have shape \(3, 5\)"):
        CrossEntropy(lambda model, b: values, labels=lambda b: b["labels"][:, 0])(None, batch)
    for name, wrong in (("temperature", 0.0), ("weight", -1.0), ("top", 0)):
        with pytest.raises(ValueError, match=name):
            Distillation(**{name: wrong})
    with pytest.raises(TypeError, match="labels must be a CrossEntropy"):
        Distillation(labels="labels")
