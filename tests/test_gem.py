"""States of GEM: what is loaded, what is refused, and what is missed."""

import pytest

torch = pytest.importorskip("torch")

from models import EACH, begin, loss, perceptron, rival, task  # noqa: E402


def recalled(name=0, **options):
    """Return a model, its optimizer, and GEM with a task and its rows."""
    model, optimizer, gem = begin(**options)
    gem.end_task([task(1)], name)
    gem.projector.recall(model, gem.memory.batches(), lambda model, batch: model(batch[0]).mean())
    return model, optimizer, gem


def test_a_state_without_rows_has_constraints_from_the_first_step_on():
    gem = recalled()[2]
    state = gem.state_dict()
    assert state["projector"]["constraints"] is None
    seldom, optimizer, other = begin(every=4)
    other.load_state_dict(state)
    loss(seldom, rival(task(1))).backward()
    optimizer.step()
    assert other.last.constraints == 1


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (lambda: recalled(model=torch.nn.Linear(6, 3).double(), every=2)[2], "belongs to another model"),
        (lambda: recalled(per_task=5, every=2)[2], "state has per_task=5 but this memory has 100"),
        (perceptron, "state has no 'memory': it is not a GEM state"),
    ],
)
def test_a_state_of_something_else_changes_nothing(theirs, text):
    gem = recalled("ours", every=2)[2]
    G = gem.projector.constraints.clone()
    with pytest.raises(ValueError, match=text):
        gem.load_state_dict(theirs().state_dict())
    assert gem.memory.tasks == ["ours"]
    assert torch.equal(gem.projector.constraints, G)


def test_a_set_that_a_state_lacks_is_named():
    _, _, gem = begin(loss)
    gem.keep([task(1)], name="a")
    _, _, more = begin(loss)
    for name in "ab":
        more.keep([task(1)], name=name)
    with pytest.warns(UserWarning, match="no examples of 'b', which are dropped"):
        more.load_state_dict(gem.state_dict())


def test_rows_that_come_from_no_memory_have_no_names():
    model, _, gem = begin(EACH, every=2)
    gem.projector.recall(model, [task(1), task(2)])
    _, _, again = begin(EACH, every=2)
    again.load_state_dict(gem.state_dict())
    assert torch.equal(again.projector.constraints, gem.projector.constraints)
    gem.projector.constraints[1] = float("nan")
    loss(model, task(3)).backward()
    with pytest.raises(ValueError, match=r"row 1.*if it is finite\.$"):
        gem.projector.project_()
