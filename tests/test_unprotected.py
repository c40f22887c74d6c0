"""Trainings in which nothing is protected, though something was meant to be, are told; others are not."""

import copy
import gc
import io
import pickle
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

from models import begin, loss, perceptron, rival, task  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, GradientProjector  # noqa: E402


def steps(model, optimizer, k, n=3):
    for _ in range(n):
        optimizer.zero_grad()
        loss(model, rival(task(k))).backward()
        optimizer.step()


def once_and_store():
    """Fine-tune once, with `end_task` after it."""
    model, optimizer, gem = begin()
    steps(model, optimizer, 0)
    gem.end_task([task(0)])


def once():
    model, optimizer, _ = begin()
    steps(model, optimizer, 0)


def saved_before_anything_is_stored():
    model, optimizer, gem = begin()
    steps(model, optimizer, 0)
    gem.state_dict()


def a_stream():
    model, optimizer, gem = begin()
    for k in range(2):
        steps(model, optimizer, k)
        gem.end_task([task(k)])


def stored_before():
    model, optimizer, gem = begin()
    gem.end_task([task(0)])
    steps(model, optimizer, 0)


def new_objects_with_one_memory():
    memory = EpisodicMemory()
    for k in range(2):
        model, optimizer, gem = begin(memory=memory)
        steps(model, optimizer, k)
        gem.end_task([task(k)])


def another_process_goes_on():
    model, optimizer, gem = begin()
    steps(model, optimizer, 0)
    gem.end_task([task(0)])
    gem.state_dict()


def copied(save):
    def train():
        model, optimizer, gem = begin()
        steps(model, optimizer, 0)
        gem.end_task([task(0)])
        save(gem)

    return train


def no_training():
    begin()[2].end_task([task(0)])


@pytest.fixture
def told(caplog, monkeypatch):
    """Return what is told of memories that a function has made and dropped."""
    monkeypatch.delattr(sys, "last_value", raising=False)
    gc.collect()  # memories of earlier tests are told now, not in this one

    def told(train):
        with caplog.at_level("WARNING", "gemproj"):
            train()
            gc.collect()
        messages = [record.getMessage() for record in caplog.records]
        return [message for message in messages if "Compiling" not in message]

    return told


@pytest.mark.parametrize("train", [once_and_store, once, saved_before_anything_is_stored])
def test_a_training_before_the_first_end_task_is_told_at_the_end(train, told):
    (message,) = told(train)
    assert "Nothing was protected: all 3 steps" in message
    assert "Call end_task(batches)" in message


@pytest.mark.parametrize(
    "train",
    [
        a_stream,
        stored_before,
        new_objects_with_one_memory,
        another_process_goes_on,
        no_training,
        copied(lambda gem: copy.deepcopy(gem.memory)),
        copied(lambda gem: torch.save(gem.memory, io.BytesIO())),
        copied(pickle.dumps),
    ],
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own pytree
def test_the_first_task_of_a_stream_is_not(train, told):
    assert not told(train)


def test_after_an_error_nothing_else_is_told(told, monkeypatch):
    monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    assert not told(once)


@pytest.mark.parametrize("fused", [False, True])  # fused ones do not tell autograd that they write
def test_a_new_optimizer_for_each_task_is_told_by_end_task(fused):
    model, optimizer, gem = begin()
    steps(model, optimizer, 0)
    gem.end_task([task(0)])
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), 1)
    with pytest.warns(UserWarning, match=r"not in step\(\) of the optimizer.*memory=gem.memory"):
        gem.end_task([task(1)])


@pytest.mark.parametrize("way", ["state", "an older state", "pickle"])
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own pytree
def test_a_training_that_is_resumed_between_its_last_step_and_end_task_is_not(way):
    model, optimizer, gem = begin()
    gem.end_task([task(0)])
    steps(model, optimizer, 1)
    if way == "pickle":
        other = pickle.loads(pickle.dumps(gem))
    else:
        resumed, _, other = begin()
        state = gem.state_dict()
        assert state["stepped"] is True
        if way == "an older state":
            del state["stepped"]
        other.load_state_dict(state)
        resumed.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other.end_task([task(1)])
    assert not other.state_dict()["stepped"]


def test_sets_that_are_stored_one_after_the_other_are_not():
    model, optimizer, gem = begin()
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)  # nothing was promised yet
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(3):
            gem.end_task([task(k)])
        steps(model, optimizer, 1)
        gem.end_task([task(3)])


def by_constrain(projector, model):
    projector.constrain([loss(model, task(0))])


def by_recall(projector, model):
    projector.recall(model, [task(0)], loss)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("constrain", [by_constrain, by_recall])
def test_constraints_that_nothing_uses_are_told(constrain, fused):
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    projector = GradientProjector(model.parameters())
    constrain(projector, model)
    steps(model, optimizer, 0, 1)
    with pytest.warns(UserWarning, match=r"no gradient was projected.*project_\(\).*attach\(optimizer\)"):
        constrain(projector, model)
    constrain(projector, model)  # the same weights
    projector.project_()
    steps(model, optimizer, 0, 1)
    constrain(projector, model)
    assert len(projector.constraints) == 1  # they may be what is wanted
    steps(model, optimizer, 0, 1)
    constrain(projector, model)
    projector.attach(optimizer)
    steps(model, optimizer, 0, 1)
    constrain(projector, model)


def without_a_use(projector, model, optimizer):
    projector.constrain([loss(model, task(0))])
    steps(model, optimizer, 0)


def with_a_use(projector, model, optimizer):
    for _ in range(2):  # of the constraints before
        optimizer.zero_grad()
        loss(model, task(9)).backward()
        projector.project_()
        projector.constrain([loss(model, task(0))])
        optimizer.step()


def warned(projector, model, optimizer):
    without_a_use(projector, model, optimizer)
    with pytest.warns(UserWarning, match="no gradient was projected"):
        without_a_use(projector, model, optimizer)


def read_by_hand(projector, model, optimizer):
    without_a_use(projector, model, optimizer)
    assert len(projector.constraints) == 1


@pytest.mark.parametrize(
    ("train", "unused"),
    [(without_a_use, True), (with_a_use, False), (warned, False), (read_by_hand, False)],
)
def test_the_last_constraints_are_told_at_the_end_if_none_was_used(train, unused, told):
    def once():
        model = perceptron()
        train(GradientProjector(model.parameters()), model, torch.optim.SGD(model.parameters(), lr=0.1))

    messages = told(once)
    assert len(messages) == unused
    assert all("no gradient was projected" in message for message in messages)


@pytest.mark.parametrize("constrain", [by_constrain, by_recall])
def test_a_projector_that_is_attached_to_another_optimizer_is_told(constrain):
    model = perceptron()
    projector, former = GradientProjector(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    projector.attach(former)
    constrain(projector, model)
    steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 0, 1)
    with pytest.warns(UserWarning, match="to the optimizer that takes the steps"):
        constrain(projector, model)


class SharpnessAware(torch.optim.Optimizer):
    """SAM in its usual form: two steps by other names, the second one taken by an inner optimizer."""

    def __init__(self, parameters, base, **options):
        super().__init__(parameters, options)
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["up"] = 0.05 * p.grad
            p.add_(self.state[p]["up"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["up"])
        self.base_optimizer.step()
        self.zero_grad()


@pytest.mark.parametrize("inner", [False, True])
def test_an_optimizer_that_steps_in_another_one_is_told(inner):
    model = perceptron()
    optimizer = SharpnessAware(model.parameters(), torch.optim.SGD, lr=0.1)
    gem = GEM(model, optimizer.base_optimizer if inner else optimizer, loss)
    gem.end_task([task(0)])
    for step in (optimizer.first_step, optimizer.second_step):
        loss(model, rival(task(0))).backward()
        step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gem.end_task([task(1)])
    messages = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert len(messages) == (not inner)
    assert all("as SAM does in its base_optimizer, pass the inner one" in message for message in messages)
    assert inner is (gem.last is not None and gem.last.worst_cosine > -1e-9)
