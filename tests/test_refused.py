"""What is refused, and what is said about it: one table of calls."""

import pytest

torch = pytest.importorskip("torch")

from models import EACH, begin, loss, perceptron, projector_of, sgd, task  # noqa: E402

from gemproj import GEM2017  # noqa: E402
from gemproj.torch import GEM, EpisodicMemory, GradientProjector, Promise  # noqa: E402
from gemproj.torch.losses import Distillation  # noqa: E402

LABELS = torch.zeros(2, dtype=torch.long)
TASKS = [task(1), task(2)]
TABLE = torch.nn.Embedding(5, 3, sparse=True)


def gem(**given):
    """Make a GEM; an error leaves the optimizers alone."""
    model = perceptron()
    optimizers = given.pop("make", one)(model)
    try:
        made = GEM(given.pop("as_model", model), optimizers, **({"loss": loss} | given))
    except Exception:
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            assert not optimizer._optimizer_step_pre_hooks
        raise
    return made


def one(model):
    return sgd(model.parameters())


def halves(model):
    """Return an optimizer for each layer."""
    return [sgd(model[0].parameters()), sgd(model[2].parameters())]


def keep(promise=None, name=None, *, make=one, **options):
    """Promise something about a set; an error stores nothing."""
    keeper = gem(make=make, **options)
    try:
        keeper.keep([task(0)], promise, name=name)
    finally:
        assert (keeper.memory.tasks, keeper.promises) == ([], {})


def attach(make=sgd, **options):
    model = perceptron()
    projector_of(model.parameters(), **options).attach(make(model.parameters()))


def projector(parameters=None, **options):
    return GradientProjector(perceptron().parameters() if parameters is None else parameters, **options)


def recall(*given, **options):
    model = perceptron()
    projector(model.parameters()).recall(model, *given, **options)


def memory():
    """Return a memory with two examples of a task."""
    found = EpisodicMemory(per_task=4, label="y")
    found.add({"x": torch.zeros(2, 3), "y": LABELS}, task="now")
    return found


def add(**leaves):
    """Add a batch to a memory that holds another one, which stays as it was."""
    found = memory()
    try:
        found.add(leaves, task="now")
    finally:
        assert len(next(found.batches())["y"]) == 2


CALLS = [
    # --- GEM and its options
    (lambda: gem(as_model=[1]), TypeError, "model must be a torch.nn.Module; found list"),
    (lambda: gem(loss=torch.nn.CrossEntropyLoss()), TypeError, "called as .*batch.*, and CrossEntropyLoss"),
    (lambda: gem(loss=torch.nn.functional.mse_loss), TypeError, "called as .*batch.*, and mse_loss"),
    (lambda: gem(per_task=0), ValueError, "per_task must be at least 1"),
    (lambda: gem(memory={}), TypeError, "memory must be an EpisodicMemory; found dict"),
    (lambda: gem(weight=[0.5]), TypeError, r"weight must be a number; found \[0.5\]"),
    (lambda: gem(tolerance=-1.0), ValueError, "tolerance must be finite and at least 0"),
    (lambda: gem(per="label"), ValueError, "per='label' needs labels"),
    (lambda: gem(loss=Promise(), weight=0.5), ValueError, "weight is given beside a Promise"),
    (lambda: gem(loss=EpisodicMemory()), TypeError, "pass memory= for a memory"),
    (lambda: gem(microbatch=0), ValueError, "microbatch must be at least 1"),
    (lambda: gem(project=0), TypeError, "project must be True or False; found 0"),
    (lambda: gem(method="gem2017", on="both"), ValueError, "made for gradients"),
    (lambda: gem(method="gem2017", tolerance=0.1), ValueError, "tolerance cannot be combined with method"),
    (lambda: gem(margin=0.5), TypeError, "GEM has no keyword 'margin'; did you mean weight"),
    (lambda: gem(scaler="cuda"), TypeError, "scaler must be the torch.amp.GradScaler of training; found str"),
    (lambda: gem(process_group=0), TypeError, "process_group must be a"),
    # --- what optimizers hold: what is trainable, once, and nothing else
    (lambda: gem(make=lambda m: [sgd(m.parameters()), *halves(m)[1:]]), ValueError, "in several optimizers"),
    (lambda: gem(make=lambda m: [sgd(m.parameters())] * 2), ValueError, "in several optimizers"),
    (lambda: gem(make=lambda m: [halves(m)[0], sgd(m[2].parameters(), maximize=True)]), ValueError, "maximize=True"),
    (lambda: gem(make=halves, loss=EACH, tolerance=0.0), ValueError, "tolerance is about a whole step"),
    (lambda: gem(make=lambda m: halves(m)[1]), ValueError, r"lacks 2 of the 4 .*'0.weight'.*requires_grad_\(False\)"),
    (lambda: gem(make=lambda m: sgd([*m.parameters(), TABLE.weight])), ValueError, "moves 1 parameters that are not projected"),
    # --- a promise of a set, told at once
    (lambda: keep(Promise(EACH, tolerance=0.1), method="gem2017"), ValueError, "tolerance cannot be combined with method"),
    (lambda: keep(Promise(EACH, tolerance=0.1), make=halves), ValueError, "tolerance is about a whole step"),
    (lambda: keep(Promise(EACH, equal=True), method="agem"), ValueError, "equal cannot be combined with method"),
    (lambda: keep(Promise(EACH, per="label")), ValueError, "needs labels"),
    (lambda: keep(Promise), TypeError, "class Promise; pass an object of it"),
    (lambda: keep(name=["a"]), TypeError, r"name must be hashable.*found \['a'\]"),
    (lambda: begin()[2].load_state_dict(None), ValueError, "state has no 'memory'"),
    (lambda: begin()[2].clip_grad_norm_(iter(()), 1.0), TypeError, "max_norm must be a number; found"),
    # --- promises and losses
    (lambda: Promise(None), TypeError, "loss must be a function of model and batch; found NoneType"),
    (lambda: Promise(Distillation), TypeError, "class Distillation; pass an object of it"),
    (lambda: Promise(per="class"), ValueError, "per must be one of 'task', .*'all'; found 'class'"),
    (lambda: Promise(examples=0), ValueError, "examples must be at least 1"),
    (lambda: Promise(weight=-1.0), ValueError, "weight must be finite and at least 0"),
    (lambda: Promise(weight=float("inf")), ValueError, "weight must be finite"),
    (lambda: Promise(weight=2.0, penalty=1.0), ValueError, "penalty must be finite and at least 2; found 1"),
    (lambda: Promise(penalty="high"), TypeError, "penalty must be a number; found 'high'"),
    (lambda: Promise(repair=0.5), ValueError, "repair is for a tolerance"),
    (lambda: Promise(tolerance=0.0, repair=1.5), ValueError, "repair must be at most 1; found 1.5"),
    (lambda: Promise(tolerance=0.0, equal=True), ValueError, "tolerance and equal exclude each other"),
    (lambda: Promise(weight=1.0, equal=True), ValueError, "weight and equal exclude each other"),
    (lambda: Promise(equal=1), TypeError, "equal must be True or False; found 1"),
    (lambda: Distillation(dtype=torch.int8), TypeError, "floating-point dtype.*int8"),
    (lambda: Distillation(dtype="fp16"), TypeError, "floating-point dtype.*'fp16'"),
    (lambda: Distillation(temperature=0.0), ValueError, "temperature"),
    (lambda: Distillation(weight=-1.0), ValueError, "weight"),
    (lambda: Distillation(top=0), ValueError, "top"),
    (lambda: Distillation(labels="labels"), TypeError, "labels must be a CrossEntropy"),
    # --- projectors
    (lambda: projector([torch.ones(3)]), ValueError, "holds none that requires a gradient"),
    (lambda: projector(perceptron()), TypeError, r"pass module.parameters\(\)"),
    (lambda: projector([1.0]), TypeError, "iterable of real tensors; found float"),
    (lambda: projector(promise=loss), TypeError, "promise must be a gemproj.torch.Promise; found function"),
    (lambda: projector(every=0), ValueError, "every must be at least 1"),
    (lambda: projector(rows_dtype=torch.int8), TypeError, "rows_dtype must be a floating-point dtype"),
    (lambda: projector(on="update"), ValueError, "on must be one of 'gradient', 'step', 'both'; found 'update'"),
    (lambda: projector(on="both", method=GEM2017()), ValueError, "made for gradients"),
    (lambda: projector(metric="adamw"), ValueError, "metric must be 'euclidean', 'adam' or None; found 'adamw'"),
    (lambda: setattr(projector(), "metric", "Adam"), ValueError, "metric must be.*found 'Adam'"),
    (lambda: projector(on="step").project_(), ValueError, r"attach\(optimizer\)"),
    (lambda: projector().constrain([torch.ones(3)]), ValueError, r"scalars.*loss 0 .* of shape \(3,\)"),
    (lambda: projector().constrain([1.0]), ValueError, "losses must be scalars.*loss 0 is float"),
    (lambda: projector(TABLE.parameters()).constrain([TABLE(LABELS).sum()]), TypeError, "must be dense"),
    (lambda: projector().load_state_dict({}), ValueError, "no 'calls': it is not a Gradient"),
    # --- their optimizers
    (lambda: attach(on="both", metric="adam"), ValueError, "metric='adam' needs.*second moments.*found SGD"),
    (lambda: attach(torch.optim.Adamax, on="step", metric="adam"), ValueError, "second moments.*found Adamax"),
    (lambda: attach(lambda p: sgd(p, maximize=True)), ValueError, "maximize=True"),
    (lambda: attach(lambda p: sgd(p, maximize=True), on="step"), ValueError, "maximize=True"),
    (lambda: attach(lambda p: sgd(perceptron().parameters())), ValueError, "none of the parameters"),
    (lambda: attach(lambda p: torch.optim.lr_scheduler.StepLR(sgd(p), 1)), TypeError, "must be.*found StepLR"),
    (lambda: attach(torch.optim.LBFGS, on="both"), ValueError, "LBFGS cannot be projected.*on='gradient'"),
    (lambda: attach(torch.optim.ASGD, on="step"), ValueError, "ASGD cannot be projected.*on='gradient'"),
    # --- batches whose rows are computed
    (lambda: recall(TASKS, loss, microbatch=0), ValueError, "microbatch must be at least 1"),
    (lambda: recall([*TASKS, task(3, 0)], loss), ValueError, r"examples of every past task; found \[12, 12, 0\]"),
    (lambda: recall([task(1), (torch.ones(3, 6), LABELS)], loss), ValueError, r"batches\[1\]: All tensors"),
    (lambda: recall(TASKS, lambda model, batch: 1.0), TypeError, "loss.* must return a tensor.*found float"),
    (lambda: recall(TASKS, lambda model, batch: torch.ones(())), ValueError, "require a gradient"),
    (lambda: recall(TASKS, torch.ones(())), TypeError, "loss must be a function of model and batch; found Tensor"),
    (lambda: recall({"x": task(1)[0]}, loss), TypeError, r"memory.batches\(\).*found dict"),
    (lambda: recall(EpisodicMemory(), loss), TypeError, r"memory.batches\(\).*found EpisodicMemory"),
    (lambda: recall([list(task(1))]), TypeError, "batches must be mappings.*found list.*Pass loss"),
    # --- memories
    (lambda: add(x=torch.zeros(3), y=LABELS), ValueError, "same leading dimension"),
    (lambda: add(x=[1, 2], y=LABELS), TypeError, "tensors only, .*; found int"),
    (lambda: add(x=torch.zeros(2)), ValueError, r"label 'y' is not in the batch; found keys \['x'\]"),
    (lambda: add(x=torch.zeros(2), y=LABELS[:, None]), ValueError, r"labels must be integers of shape \(2,\)"),
    (lambda: add(x=torch.zeros(2, 5), y=LABELS), ValueError, "differ in length pass the loader itself"),
    (lambda: add(z=torch.zeros(2), y=LABELS), ValueError, "nested differently"),
    (lambda: EpisodicMemory().add(torch.eye(3).to_sparse(), 0), TypeError, r"found torch\.sparse_coo: call to_dense"),
    (lambda: EpisodicMemory().add(torch.zeros(3), None), ValueError, "task must not be None"),
    (lambda: EpisodicMemory().add(torch.zeros(3), torch.tensor(1)), TypeError, r"use task\.item\(\)"),
    (lambda: EpisodicMemory().batch(1), ValueError, r"No examples of task 1; the memory holds tasks \[\]"),
    (lambda: EpisodicMemory().remove(1), ValueError, "No examples of task 1"),
    (lambda: EpisodicMemory().sample(3), ValueError, "memory is empty"),
    (lambda: memory().sample(3, exclude="now"), ValueError, "nothing to draw from but task 'now'"),
    (lambda: EpisodicMemory().batches(per="class"), ValueError, "per must be one of 'task', .*, 'all'; found 'class'"),
    (lambda: EpisodicMemory().batches(per="label"), ValueError, "per='label' needs labels"),
    (lambda: EpisodicMemory().batches(n=0), ValueError, "n must be at least 1"),
    (lambda: EpisodicMemory(0), ValueError, "per_task must be at least 1"),
    (lambda: EpisodicMemory(seed="a"), TypeError, "seed must be an integer"),
    (lambda: EpisodicMemory(collate=3), TypeError, "collate must be a function"),
    (lambda: EpisodicMemory().load_state_dict(None), TypeError, "state must be what state_dict returned"),
    (lambda: EpisodicMemory(policy="fifo"), ValueError, "policy must be one of reservoir, balanced, ring; found 'fifo'"),
    (lambda: EpisodicMemory(policy=["ring"]), ValueError, "policy must be one of"),
    (lambda: EpisodicMemory(policy="balanced"), ValueError, "policy='balanced' needs label"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), CALLS)
def test_what_is_wrong_is_said(call, error, text):
    with pytest.raises(error, match=text):
        call()
