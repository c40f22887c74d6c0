"""Trainings in which nothing is protected, though something was meant to be, are told; others are not."""

import copy
import io
import pickle
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

from models import begin, loss, perceptron, rival, sgd, task  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, GradientProjector  # noqa: E402

# Of torch's own pytree.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")


def steps(model, optimizer, k, n=3):
    for _ in range(n):
        optimizer.zero_grad()
        loss(model, rival(task(k))).backward()
        optimizer.step()


# What is done, word by word: train, store, or keep in some way what was made.
WAYS = {
    "state": lambda gem: gem.state_dict(),
    "copy": lambda gem: copy.deepcopy(gem.memory),
    "file": lambda gem: torch.save(gem.memory, io.BytesIO()),
    "pickle": pickle.dumps,
}


def script(words, fresh=False):
    """Do what is written; with `fresh` objects before each training, of which only the memory stays."""
    memory = EpisodicMemory()
    model, optimizer, gem = begin(memory=memory)
    for k, word in enumerate(words.split()):
        if word == "train":
            if fresh:
                model, optimizer, gem = begin(memory=memory)
            steps(model, optimizer, k)
        elif word == "store":
            gem.end_task([task(k)])
        else:
            WAYS[word](gem)


@pytest.mark.parametrize("words", ["train store", "train", "train state"])
def test_a_training_before_the_first_end_task_is_told_at_the_end(words, told):
    (message,) = told(lambda: script(words))
    assert "Nothing was protected: all 3 steps" in message
    assert "Call keep or end_task" in message
    assert "from a saved state" in message


@pytest.mark.parametrize(
    ("words", "fresh", "failed"),
    [
        *((words, False, False) for words in ("train store train store", "store train", "store")),
        *((f"train store {way}", False, False) for way in WAYS),
        ("train store train store", True, False),  # new objects with one memory are one stream
        ("train", False, True),  # after an error nothing else is told
    ],
)
def test_the_first_task_of_a_stream_is_not(words, fresh, failed, told, monkeypatch):
    if failed:
        monkeypatch.setattr(sys, "last_value", RuntimeError(), raising=False)
        monkeypatch.delattr(sys, "ps1", raising=False)
    assert not told(lambda: script(words, fresh))


@pytest.mark.parametrize("fused", [False, True])  # fused ones do not tell autograd that they write
@pytest.mark.parametrize("stepped", [False, True])
def test_another_optimizer_than_the_one_attached_to_is_told(stepped, fused):
    model, optimizer, gem = begin()
    if stepped:
        steps(model, optimizer, 0)
    gem.end_task([task(0)])
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused), 1)
    tell = (lambda: gem.end_task([task(1)])) if stepped else gem.report
    with pytest.warns(UserWarning, match=r"not in step\(\) of the optimizer.*memory=gem.memory"):
        tell()


@pytest.mark.parametrize("way", ["state", "an older state", "pickle"])
@pytest.mark.filterwarnings("error::UserWarning")
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
    other.end_task([task(1)])
    assert not other.state_dict()["stepped"]


@pytest.mark.filterwarnings("error::UserWarning")
def test_sets_that_are_stored_one_after_the_other_are_not():
    model, optimizer, gem = begin()
    steps(model, sgd(model.parameters()), 0)  # nothing was promised yet
    for k in range(3):
        gem.end_task([task(k)])
    steps(model, optimizer, 1)
    gem.end_task([task(3)])


# --- constraints that nothing uses ----------------------------------------------------------------

CONSTRAIN = {
    "constrain": lambda projector, model: projector.constrain([loss(model, task(0))]),
    "recall": lambda projector, model: projector.recall(model, [task(0)], loss),
}
constrained = pytest.mark.parametrize("constrain", CONSTRAIN.values(), ids=CONSTRAIN)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("fused", [False, True])
@constrained
def test_constraints_that_nothing_uses_are_told(constrain, fused):
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    projector = GradientProjector(model.parameters())
    constrain(projector, model)
    steps(model, optimizer, 0, 1)
    with pytest.warns(UserWarning, match=r"no gradient was projected.*project_\(\).*attach\(optimizer\)"):
        constrain(projector, model)
    constrain(projector, model)  # the same weights
    # They are used, or read, which may be all that is wanted, or an optimizer is attached to.
    uses = projector.project_, lambda: len(projector.constraints), lambda: projector.attach(optimizer)
    for use in uses:
        use()
        steps(model, optimizer, 0, 1)
        constrain(projector, model)


@constrained
def test_a_projector_that_is_attached_to_another_optimizer_is_told(constrain):
    model = perceptron()
    projector, former = GradientProjector(model.parameters()), sgd(model.parameters())
    projector.attach(former)
    constrain(projector, model)
    steps(model, sgd(model.parameters()), 0, 1)
    with pytest.warns(UserWarning, match="to the optimizer that takes the steps"):
        constrain(projector, model)


# What is done each time that constraints were computed; their repr is no use of them.
USES = {
    "never": [repr],
    "once": [GradientProjector.project_, repr],
    "read": [lambda projector: projector.constraints],
    "warned about": [repr, repr],
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.filterwarnings("ignore:.*no gradient was projected:UserWarning")
def test_the_last_constraints_are_told_at_the_end_if_none_was_used(name, told):
    def once():
        model = perceptron()
        optimizer, projector = sgd(model.parameters()), GradientProjector(model.parameters())
        for use in USES[name]:
            CONSTRAIN["constrain"](projector, model)
            loss(model, task(9)).backward()
            use(projector)
            steps(model, optimizer, 0)

    messages = told(once)
    assert len(messages) == (name == "never")
    assert all("no gradient was projected" in message for message in messages)


# --- an optimizer in another one --------------------------------------------------------------------


class Outer(torch.optim.Optimizer):
    """Takes its steps in another optimizer, by another name, as implementations of SAM do."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base_optimizer = sgd(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    def second_step(self):
        self.base_optimizer.step()
        self.zero_grad()


@pytest.mark.parametrize("inner", [False, True])
def test_an_optimizer_that_steps_in_another_one_is_told(inner):
    model = perceptron()
    optimizer = Outer(model.parameters())
    gem = GEM(model, optimizer.base_optimizer if inner else optimizer, loss)
    gem.end_task([task(0)])
    loss(model, rival(task(0))).backward()
    optimizer.second_step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gem.end_task([task(1)])
    messages = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert len(messages) == (not inner)
    assert all("as SAM does with its base_optimizer, pass the inner one" in message for message in messages)
    assert inner is (gem.last is not None and gem.last.worst_cosine > -1e-9)
