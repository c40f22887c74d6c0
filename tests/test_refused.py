"""What is refused, and what is said about it: one table of calls."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from loops import begin, sgd
from models import EACH, SAID, logits, loss, perceptron, task

from gemproj import project
from gemproj.torch import Keeper, Promise, rows, write_references
from gemproj.torch.losses import CrossEntropy, Distillation, model_loss
from gemproj.torch.promise import as_promise

TABLE = torch.nn.Embedding(5, 3, sparse=True)
LOSS = torch.ones((), requires_grad=True)


def keeper(promise=loss, *, as_model=None, make=None, **options):
    """Make a keeper; an error leaves the optimizers alone."""
    model = perceptron()
    optimizers = (make or one)(model)
    try:
        return Keeper(as_model or model, optimizers, promise, **options)
    except Exception:
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            assert not getattr(optimizer, "_optimizer_step_pre_hooks", None)
        raise


def one(model):
    return sgd(model.parameters())


def halves(model):
    """Return an optimizer for each layer."""
    return [sgd(model[0].parameters()), sgd(model[2].parameters())]


def some(make, **options):
    """Make a keeper of an optimizer of all parameters."""
    return keeper(make=lambda model: make(model.parameters()), **options)


def keep(promise=None, name=None, *, make=one, given=loss, limit=None, hold_out=0.0, **options):
    """Promise something about a set; an error keeps nothing."""
    found = keeper(given, make=make, **options)
    try:
        found.keep([task(0)], promise, name=name, limit=limit, hold_out=hold_out)
    finally:
        assert found.sets == {}


def sparse():
    """Keep examples of an embedding with sparse gradients, and take a step."""
    _, optimizer, found = begin(lambda model, batch: model(batch).sum(), model=TABLE)
    found.keep([torch.zeros(2, dtype=torch.long)])
    try:
        optimizer.step()
    finally:
        found.remove()


def without_loss(model, batch):
    return model_loss(lambda **given: SimpleNamespace(loss=None), {"x": batch[0]})


SHAPE = "one number for each of these 12, .*found {}.*logits.*tokens"
CALLS = [
    # --- keepers and their options
    (lambda: keeper(as_model=[1]), TypeError, "model must be a torch.nn.Module; found list"),
    (lambda: keeper(torch.nn.CrossEntropyLoss()), TypeError, "called as .*batch.*, and CrossEntropyLoss"),
    (lambda: keeper(torch.nn.functional.mse_loss), TypeError, "called as .*batch.*, and mse_loss"),
    (lambda: keeper(True), TypeError, "promise must be a Promise, a loss, or a tolerance such as 0.05; found bool"),
    (lambda: keeper(look=0), ValueError, "look must be at least 1"),
    (lambda: keeper(look="sometimes"), (ValueError, TypeError), "^look must be"),
    (lambda: keeper(microbatch=0), ValueError, "microbatch must be at least 1"),
    (lambda: keeper(project=0), TypeError, "project must be True or False; found 0"),
    (lambda: keeper(on="update"), ValueError, "on must be one of 'gradient', 'step', 'both'; found 'update'"),
    (lambda: keeper(method="gem"), ValueError, "method 'gem' is unknown"),
    (lambda: keeper(method="gem2017"), ValueError, "made for gradients"),
    (lambda: keeper(SAID, method="gem2017", on="gradient"), ValueError, "tolerance cannot be combined with method"),
    (lambda: keeper(memory_strength=0.5), TypeError, r"weight is an option of Promise: pass promise=Promise\(\.\.\., weight="),
    (lambda: Promise(margin=0.5), TypeError, "margin is named weight here"),
    (lambda: project([[1.0]], [1.0], memory_strength=0.5), TypeError, "argument 'memory_strength'; GEM's memory strength is margin="),
    (lambda: project([[1.0]], [1.0], marign=0.5), TypeError, r"unexpected keyword argument 'marign'\.$"),
    (lambda: keeper(process_group=0), TypeError, "process_group must be a"),
    # --- what optimizers hold: what is trainable, once, and nothing else
    (lambda: keeper(make=lambda m: [halves(m)[0], sgd(m[2].parameters(), maximize=True)]), ValueError, "maximize=True"),
    (lambda: keeper(make=lambda m: halves(m)[1]), ValueError, r"lacks 2 of the 4 .*'0.weight'.*requires_grad_\(False\)"),
    (lambda: some(lambda p: sgd([*p, TABLE.weight])), ValueError, r"moves 1 parameters that are not the model's.*\(5, 3\)"),
    (lambda: some(lambda p: sgd([{"params": [one], "maximize": k == 3} for k, one in enumerate(p)])), ValueError, "maximize=True"),
    (lambda: some(lambda p: torch.optim.lr_scheduler.StepLR(sgd(p), 1)), TypeError, "must be.*found torch.*StepLR"),
    (lambda: some(torch.optim.LBFGS), ValueError, "LBFGS cannot be projected.*on='gradient'"),
    (lambda: some(torch.optim.LBFGS, on="gradient"), ValueError, "LBFGS takes up to max_iter steps in one.*max_iter=1"),
    (lambda: some(torch.optim.ASGD, on="step"), ValueError, "ASGD cannot be projected.*on='gradient'"),
    (lambda: some(type("AdamWScheduleFree", (torch.optim.AdamW,), {})), ValueError, "it averages weights.*on='gradient'"),
    (lambda: keeper(as_model=perceptron().requires_grad_(False)), ValueError, "no parameter that requires a gradient"),
    (sparse, TypeError, "must be dense.*sparse=False"),
    # --- a set, told at once
    (lambda: keeper().keep([task(0)], tolerance=0.02), TypeError, r"tolerance is an option of Promise: pass promise=Promise\(..., tolerance="),
    (lambda: keeper().keep([task(0)], policy="last"), TypeError, "keep got an unexpected keyword argument 'policy'"),
    (lambda: keep(name=Promise()), TypeError, r"name must be hashable, such as a string; found Promise"),
    (lambda: keep(name=["a"]), TypeError, r"name must be hashable.*found \['a'\]"),
    (lambda: keep(limit=0), ValueError, "limit must be at least 1"),
    (lambda: keep(hold_out=1.0), ValueError, "hold_out must be a share"),
    (lambda: keep(hold_out="0.2"), TypeError, "hold_out must be a number; found '0.2'"),
    (lambda: keep(Promise(EACH), hold_out=0.01), ValueError, "hold_out=0.01 of 12 examples leaves none"),
    (lambda: keep(hold_out=0.5), ValueError, "hold_out needs one loss for each example"),
    (lambda: keep(Promise(lambda *of: loss(*of)[None], tolerance=0.1)), ValueError, "tolerance needs one loss"),
    (lambda: keep(Promise(loss, examples=None, tolerance=0.1)), ValueError, r"one loss for each example, shape \(12,\); found \(\)"),
    (lambda: keep(lambda model: 0.0), TypeError, "positional argument"),
    (lambda: keep(lambda model, batch: loss(model, batch).item()), TypeError, "must return a tensor; found float"),
    (lambda: keep(torch.no_grad()(loss)), ValueError, r"has no gradient: .*torch.no_grad\(\)"),
    (lambda: keep(without_loss), ValueError, r"has no loss: SimpleNamespace, for a batch with x. .*if the batch has labels"),
    (lambda: keep(logits), ValueError, SHAPE.format(r"\(12, 3\)")),
    (lambda: keep(lambda model, batch: EACH(model, batch)[:, None]), ValueError, SHAPE.format(r"\(12, 1\)")),
    (lambda: keep(lambda model, batch: EACH(model, batch)[:5]), ValueError, SHAPE.format(r"\(5,\)")),
    (lambda: keep(Promise(EACH, tolerance=0.1), method="gem2017", on="gradient"), ValueError, "tolerance cannot be combined with method"),
    (lambda: keep(Promise(EACH, equal=True), method="agem"), ValueError, "equal cannot be combined with method"),
    # --- rows of losses at hand
    (lambda: rows([LOSS, LOSS.detach()], [LOSS]), ValueError, "loss 1 is a tensor of shape.*requires_grad=False"),
    (lambda: rows([LOSS.expand(2)], [LOSS]), ValueError, r"loss 0 is a tensor of shape \(2,\)"),
    (lambda: rows([1.0], [LOSS]), ValueError, "loss 0 is float"),
    (lambda: rows([LOSS], [LOSS + 0.0]), ValueError, "losses depend on none of the parameters. Pass"),
    (lambda: rows([], [LOSS]), ValueError, "holds no loss; an iterator can be read only once"),
    (lambda: rows([LOSS], []), ValueError, "parameters holds no parameter"),
    (lambda: rows([LOSS], [torch.ones(2)]), ValueError, r"parameter 0, of shape \(2,\), does not"),
    (lambda: rows([LOSS], ["weight"]), TypeError, "parameters must be tensors; parameter 0 is str"),
    (lambda: rows(LOSS, [LOSS]), TypeError, r"pass \[loss\]"),
    (lambda: rows([LOSS], TABLE), TypeError, r"found Embedding: pass .parameters\(\)"),
    # --- promises and losses
    (lambda: write_references(perceptron(), None), TypeError, "model must have a method generate; found Sequential"),
    (lambda: Promise(None), TypeError, "loss must be a function of model and batch; found NoneType"),
    (lambda: Promise(Distillation), TypeError, "class Distillation; pass an object of it"),
    (lambda: Promise(examples=0), ValueError, "examples must be at least 1"),
    (lambda: Promise(weight=[0.5]), TypeError, r"weight must be a number; found \[0.5\]"),
    (lambda: Promise(weight=float("inf")), ValueError, "weight must be finite"),
    (lambda: Promise(tolerance=-1.0), ValueError, "tolerance must be finite and at least 0"),
    (lambda: Promise(weight=2.0, penalty=1.0), ValueError, "penalty must be finite and at least 2; found 1"),
    (lambda: Promise(penalty="high"), TypeError, "penalty must be a number; found 'high'"),
    (lambda: Promise(repair=0.5), ValueError, "repair is for a tolerance"),
    (lambda: Promise(tolerance=0.0, repair=1.5), ValueError, "repair must be at most 1; found 1.5"),
    (lambda: Promise(tolerance=0.0, equal=True), ValueError, "tolerance and equal exclude each other"),
    (lambda: Promise(weight=1.0, equal=True), ValueError, "weight and equal exclude each other"),
    (lambda: Promise(SAID, equal=True), ValueError, "equal is not for Distillation"),
    (lambda: Promise(equal=1), TypeError, "equal must be True or False; found 1"),
    (lambda: Distillation(dtype=torch.int8), TypeError, "floating-point dtype.*int8"),
    (lambda: Distillation(dtype="fp16"), TypeError, "floating-point dtype.*'fp16'"),
    (lambda: Distillation(temperature=0.0), ValueError, "temperature"),
    (lambda: Distillation(weight=-1.0), ValueError, "weight"),
    (lambda: Distillation(top=1), ValueError, "top"),
    (lambda: Distillation(labels="labels"), TypeError, "labels must be a CrossEntropy"),
    (lambda: Distillation(labels=CrossEntropy(), teacher="base"), ValueError, "keep the labels as another set"),
    (lambda: Distillation(teacher="me"), ValueError, "teacher must be 'base' or None; found 'me'"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), CALLS)
def test_what_is_wrong_is_said(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_what_a_tolerance_is_by_default():
    assert (Promise(SAID).allowed, Promise(SAID, tolerance=0.0).allowed) == (0.05, 0.0)
    assert Promise(EACH).allowed is None
    apart = partial(lambda model, batch, outputs: logits(model, batch) - outputs)  # may rise or fall
    apart.outputs = logits
    assert (Promise(apart).allowed, Promise(apart, equal=True).allowed) == (0.05, None)
    assert Promise(SAID, repair=0.5).repair == 0.5
    assert as_promise(0, Promise(SAID)).allowed == 0.0
    with pytest.warns(UserWarning, match="tolerance of 5 nats for each token is nearly no limit"):
        as_promise(5, Promise(SAID))
