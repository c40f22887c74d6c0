"""What GEM promises in every framework, tested with the drivers of frameworks.py: the steps of a plain loop first."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from frameworks import (  # noqa: E402
    CLIP,
    Accelerate,
    Avalanche,
    BreakingOff,
    ByHand,
    Lightning,
    LightningByHand,
    Net,
    Plain,
    Transformers,
    adamw,
    batches,
)
from models import (  # noqa: E402
    SAID,
    adapted,
    assert_same_weights,
    begin,
    flat,
    gradient,
    moved,
    perceptron,
    promises,
    rows,
    sgd,
    take,
    task,
)
from models import loss as mean_loss  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, Promise  # noqa: E402
from gemproj.torch.gem import Keeper  # noqa: E402
from gemproj.torch.losses import model_loss  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_state")

LOOPS = [Accelerate, Transformers, Lightning, LightningByHand]
CALLBACKS = [Transformers, Lightning]
loops = pytest.mark.parametrize("kind", LOOPS)


def numbers(last):
    """Return what is logged about a step."""
    names = {"num_violated": "violations", "num_active": "active"}
    names |= {name: name for name in ("cosine", "worst_cosine", "seconds")}
    found = {f"gem/{name}": getattr(last, attribute) for attribute, name in names.items() if last.constraints}
    bounded = last.constraints and last.excess is not None
    return found | {"gem/excess": float(last.excess.max())} if bounded else found


def compare(kind, folder, loss=model_loss, precision=None, make=Net, change=list, atol=1e-9, **options):
    """Learn three tasks in a framework and in a plain loop, which must come to the same; return both drivers."""
    plain = Plain(folder, loss, precision, make(precision), like=kind, **options)
    driver = kind(folder, loss, precision, make(precision), **options)
    dtype = next(plain.model.parameters()).dtype
    for k in range(3):
        data = batches(k, dtype=dtype)
        for one in (plain, driver):
            one.train(change(data))
            one.end_task(data)
        last = driver.object.last
        assert last.constraints == plain.object.last.constraints
        assert not driver.logged or driver.logged[-1] == pytest.approx(numbers(last), rel=1e-5, abs=1e-6)
    assert plain.active > 2  # or a loop without constraints would do the same
    assert_same_weights(driver.model, plain.model, atol)
    assert driver.object.memory.tasks == [0, 1, 2]
    assert driver.norms in ([], pytest.approx(plain.norms, rel=1e-4, nan_ok=True))
    return plain, driver


# --- steps --------------------------------------------------------------------------------------

OPTIONS = [
    {},
    {"on": "step", "every": 2},
    {"on": "both"},
    {"on": "both", "weight": 0.05, "every": 3},
    {"method": "fista"},
]


@pytest.mark.parametrize("kind", [ByHand, *LOOPS, Avalanche])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_steps_are_those_of_a_plain_loop(kind, options, tmp_path):
    compare(kind, tmp_path, **options)


@pytest.mark.parametrize(
    ("promise", "options"),
    [
        (model_loss, {"weight": 0.1, "method": "pgd"}),
        (model_loss, {"method": "agem", "per": "all", "examples": 15}),
        (Promise(model_loss, equal=True), {"on": "both", "every": 2}),
        (Promise(model_loss, penalty=0.05), {"on": "step"}),
    ],
)
def test_gem_takes_the_steps_of_a_loop_by_hand(promise, options, tmp_path):
    compare(ByHand, tmp_path, promise, **options)


@loops
@pytest.mark.parametrize(("loss", "options"), promises())
def test_promises_are_those_of_a_plain_loop(kind, loss, options, tmp_path):
    compare(kind, tmp_path, loss, **options)


@loops
@pytest.mark.parametrize("on", ["gradient", "both"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_constraints_have_the_precision_and_the_scale_of_training(kind, precision, on, tmp_path):
    def overflow(data):
        """Have the scaler skip the second of three steps."""
        return [*data[:2], data[2] | {"x": data[2]["x"] * float("inf")}, *data[3:]]

    change = overflow if precision == "fp16" else list
    plain, _ = compare(kind, tmp_path, precision=precision, change=change, on=on, atol=1e-5)
    assert sum(norm != norm for norm in plain.norms) == (3 if change is overflow else 0)


@loops
@pytest.mark.parametrize("options", [{}, {"on": "both"}, {"weight": 0.5}], ids=str)
def test_of_adapters_only_their_weights_are_projected(kind, options, tmp_path):
    def make(precision):
        torch.manual_seed(0)
        return adapted(Net(), target_modules=["net.0", "net.2"])

    _, driver = compare(kind, tmp_path, make=make, **options)
    assert driver.object.projector.constraints.shape[1] == 2 * (6 + 8 + 8 + 3)
    assert_same_weights(driver.model.get_base_model().net[0].base_layer, perceptron()[0])


@pytest.mark.parametrize("kind", [Plain, *LOOPS])
def test_a_margin_is_the_weight_of_replay_also_where_gradients_are_clipped(kind, tmp_path):
    driver, past, data = kind(tmp_path, weight=4.0), batches(0)[0], batches(1)
    driver.object.memory.add(past, 0)
    driver.train(data)
    assert driver.object.last.num_active == 0  # replay, and nothing else

    model, norms = perceptron(), []
    optimizer = adamw(model)
    for first, second in zip(data[::2], data[1::2], strict=True):
        optimizer.zero_grad()
        ((mean_loss(model, first) + mean_loss(model, second)) / 2).backward()
        norms.append(float(gradient(model).norm()))
        (4.0 * mean_loss(model, past)).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP) > CLIP
        optimizer.step()
    assert_same_weights(driver.model, model)
    assert driver.norms in ([], pytest.approx(norms))  # before clipping, as without GEM


# --- attached once, and removed -----------------------------------------------------------------


@loops
def test_it_is_attached_once_also_after_a_training_that_broke_off(kind, tmp_path):
    attached, counts = Plain(tmp_path).hooks(), set()

    def counting(model, batch):
        counts.add(driver.hooks())
        return model_loss(model, batch)

    driver = kind(tmp_path, counting)
    driver.object.memory.add(batches(0)[0], 0)
    with pytest.raises(ConnectionError, match="on purpose"):
        driver.train(BreakingOff(batches(1)))
    broken = driver.optimizer
    assert driver.hooks() == (0 if kind.tells else attached)
    driver.train(batches(1))
    assert counts == {attached}
    assert driver.hooks() == driver.hooks(broken) == (attached if kind.lasts else 0)
    driver.object.remove()
    assert driver.hooks() == 0


@loops
def test_a_task_that_is_excluded_has_no_constraint(kind, tmp_path):
    driver, seen = kind(tmp_path), []
    driver.object.memory.add(batches(0)[0], "now")
    for excluded in ("now", None):
        driver.object.exclude = excluded
        driver.train(batches(1))
        seen.append(driver.object.last.constraints)
    assert seen == [0, 1]


# --- checkpoints --------------------------------------------------------------------------------


@loops
@pytest.mark.parametrize(
    "options",
    [{"on": "both", "method": "pgd", "every": 5}, {"on": "both", "examples": 3}],
    ids=str,
)
def test_training_resumes_to_the_bit(kind, options, tmp_path):
    whole, half = (kind(tmp_path / name, **options) for name in ("whole", "half"))
    for driver in (whole, half):
        driver.train(batches(0))
        driver.end_task(batches(0))
    half.train(batches(1), save=True)
    whole.train(batches(1), epochs=2)
    resumed = kind(half.folder, **options)  # with a model, an optimizer and a memory that know nothing
    resumed.train(batches(1), epochs=2, resume=True)
    assert torch.equal(flat(resumed.model), flat(whole.model))
    assert torch.equal(resumed.object.projector.constraints, whole.object.projector.constraints)
    for logs, expected in zip(resumed.logged, whole.logged[1:], strict=True):
        assert logs | {"gem/seconds": 0.0} == expected | {"gem/seconds": 0.0}
    # Rows that would be computed again are not kept.
    kept = resumed.object.state_dict()["projector"]["constraints"]
    assert (kept is None) == ("every" not in options)
    for driver in (whole, resumed):
        driver.end_task(batches(1))  # which examples are stored
    stored = (tree_leaves(list(driver.object.memory.batches())) for driver in (whole, resumed))
    assert all(map(torch.equal, *stored))


# --- what is told -------------------------------------------------------------------------------


@loops
@pytest.mark.parametrize("protected", [False, True])
def test_a_training_without_a_stored_task_is_told_once(kind, protected, tmp_path, told):
    def train():
        driver = kind(tmp_path)
        for k in range(2):
            driver.train(batches(k))
            if protected:
                driver.end_task(batches(k))

    messages = [text for text in told(train) if "Nothing was protected: all 6 steps" in text]
    assert len(messages) == (not protected)


@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_copy_remembers_and_has_nothing_of_a_training(kind, tmp_path):
    copied = []

    def copying(model, batch):  # in the middle of a training, too
        memo = {}
        copy.deepcopy(driver.object, memo)
        copied.extend(map(type, memo.values()))
        return model_loss(model, batch)

    driver = kind(tmp_path, copying)
    for k in range(2):
        driver.train(batches(k))
        driver.end_task(batches(k))
    assert EpisodicMemory in copied
    assert torch.optim.AdamW not in copied
    other = copy.deepcopy(driver.object)
    assert other.projector is None
    assert str(list(other.memory.batches())) == str(list(driver.object.memory.batches()))


@pytest.mark.parametrize("kind", CALLBACKS)
@pytest.mark.parametrize("passed", [False, True])
def test_a_callback_that_no_trainer_was_given_is_told_once(kind, passed, tmp_path):
    driver, told = kind(tmp_path), []
    driver.passed = passed
    model = getattr(driver, "module", driver.model)
    for k in range(4):  # sets that are stored one after the other, a training, and another set
        if k == 2:
            driver.train(batches(9))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            driver.object.end_task(batches(k), model=model)
        told.append(
            any("step() of the optimizer that this GEMCallback" in str(warning.message) for warning in caught)
        )
    assert told == [False, False, not passed, False]


@pytest.mark.parametrize("kind", [Accelerate, *CALLBACKS])
@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([EpisodicMemory()], {}, "pass memory= for a memory"),
        ([], {"memory_strength": 1.0}, "^{0} has no keyword .*did you mean weight"),
        ([], {"repair": 1.0}, "^{0} .*did you mean a Promise with repair"),
        ([], {"eps": 1.0}, r"^{0} has no keyword 'eps'\.$"),
        ([], {"on": "all"}, "on must be one of"),
    ],
)
def test_mistakes_are_told_when_the_object_is_made(kind, given, options, message, tmp_path):
    driver = kind(tmp_path)
    driver.object.remove()
    with pytest.raises((TypeError, ValueError), match=message.format(type(driver.object).__name__)):
        driver.make(*given, **options)


# --- before training, without a framework -------------------------------------------------------


def test_a_state_that_is_saved_before_training_has_all_of_it():
    fresh = Keeper()
    fresh.exclude = "now"
    assert fresh.state_dict()["exclude"] == "now"
    model, _, gem = begin(every=4)
    gem.end_task([task(0)])
    gem.projector.recall(model, gem.memory.batches(), mean_loss)
    gem.exclude = "then"
    fresh.load_state_dict(gem.state_dict())
    state = fresh.state_dict()
    assert state.keys() == gem.state_dict().keys()
    assert (fresh.exclude, state["exclude"], state["projector"]["calls"]) == ("then", "then", 1)
    assert torch.equal(state["projector"]["constraints"]["rows"], gem.projector.constraints)
    with pytest.warns(UserWarning, match="no examples of 0, which are dropped"):
        fresh.load_state_dict(Keeper().state_dict())
    assert fresh.state_dict()["projector"] is None


def test_what_a_model_can_do_is_stored_before_training():
    model, sizes, batch = perceptron(), [], task(0, 24)
    model.register_forward_pre_hook(lambda model, given: sizes.append(len(given[0])))
    gem = Keeper(SAID, tolerance=0.1, microbatch=3, memory=EpisodicMemory(per_task=10, label=1))
    with pytest.raises(ValueError, match="model is needed"):
        copy.deepcopy(gem).end_task([batch])
    gem.end_task([batch], model=model)
    assert max(sizes) == 3
    stored = gem.memory.batch(0)
    torch.testing.assert_close(stored.outputs, SAID.outputs(model, stored.batch))
    torch.testing.assert_close(stored.losses, SAID(model, stored.batch, stored.outputs).detach())
    assert model.training
    # The examples again, with the model as it is by then.
    with torch.no_grad():
        model[2].bias.add_(torch.arange(3.0))
    with pytest.warns(UserWarning, match="not in step.*this Keeper is attached to"):  # which changed it
        gem.end_task([], 0, model=model)
    torch.testing.assert_close(gem.memory.batch(0).outputs, SAID.outputs(model, stored.batch))


# --- clipping, whatever the loop ----------------------------------------------------------------


def test_steps_have_the_margin_of_clipped_gradients():
    model, optimizer, gem = begin(on="step", weight=4.0)
    (past, *_), (batch, *_) = batches(0), batches(1)
    gem.end_task([past])
    (row,) = rows(model, [past])
    mean_loss(model, batch).backward()
    g = gradient(model)
    gem.clip_grad_norm_(CLIP)
    step = moved(model, optimizer.step)
    assert gem.last.num_active == 0
    torch.testing.assert_close(step, 0.1 * (g + 4.0 * row) * (CLIP / float(g.norm())))


def test_optimizers_that_share_a_model_have_their_gradients_clipped_at_once():
    model = perceptron()
    gem = GEM(model, [sgd(part.parameters()) for part in (model[0], model[2])], mean_loss, weight=4.0)
    mean_loss(model, batches(0)[0]).backward()
    gem.clip_grad_norm_(CLIP)
    assert float(gradient(model).norm()) == pytest.approx(CLIP, rel=1e-4)


def test_clipping_is_forgotten_with_the_gradients_of_a_dropped_batch():
    model, optimizer, gem = begin()
    mean_loss(model, batches(0)[0]).backward()
    gem.clip_grad_norm_(1e-3)
    g, step = take(model, optimizer, batches(1)[0])
    torch.testing.assert_close(step, 0.1 * g)


def test_gradients_that_are_made_finite_before_a_step_are_clipped():
    model, optimizer, gem = begin()
    mean_loss(model, batches(0)[0]).backward()
    p = next(model.parameters())
    p.grad[0, 0] = torch.inf
    gem.clip_grad_norm_(1e-3)
    p.grad.nan_to_num_(posinf=0.0)
    assert moved(model, optimizer.step).norm() < 1.01e-4
