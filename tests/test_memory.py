"""A kept set: copies of its examples, draws of them, and what survives a file."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loops import begin, take, through_a_file
from models import EACH, perceptron, task
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from gemproj.torch import Promise
from gemproj.torch.data import owned
from gemproj.torch.memory import KeptSet


def set_of(examples, n=None):
    """Return a kept set, of which a step draws n examples."""
    promise, losses = Promise(lambda model, batch: model(batch), examples=n), torch.zeros(len(examples))
    return KeptSet("a", promise, owned(examples), default_collate, [], losses.double())


def keep(examples, collate=None, keeper=None, name="a"):
    """Keep examples with a loss that looks at none."""
    keeper = keeper or begin(lambda model, batch: model[0].bias.sum(), model=perceptron())[2]
    keeper.keep(examples, name=name, collate=collate)
    return keeper


# --- draws ----------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 5))
def test_none_is_drawn_again_before_all_were(have, n, seed):
    kept, random = set_of(torch.arange(have), n), torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(7):
        at = kept.draw(random)
        assert len(at) == len(set(at)) == min(n, have)
        drawn += at
        counts = [drawn.count(i) for i in range(have)]
        assert max(counts) - min(counts) <= 1


def test_without_a_number_all_are_drawn_and_in_order():
    kept, random = set_of(torch.arange(5)), torch.Generator()
    before = random.get_state()
    assert [kept.draw(random) for _ in range(2)] == [[0, 1, 2, 3, 4]] * 2
    assert torch.equal(random.get_state(), before)


def test_draws_are_the_same_on_any_default_device():
    sets, (one, two) = [set_of(torch.arange(9), 4) for _ in "ab"], map(torch.Generator, ["cpu"] * 2)
    for _ in range(5):
        at = sets[0].draw(one.manual_seed(3))
        with torch.device("meta"):
            assert sets[1].draw(two.manual_seed(3)) == at
            assert sets[1].fetch(at, None)[0].tolist() == at


def test_examples_are_kept_on_any_default_device():
    (model, optimizer, keeper), batch = begin(EACH, tolerance=0.1), task(0)
    with torch.device("meta"):
        keeper.keep([batch], hold_out=0.25)
    take(model, optimizer, task(1))
    assert keeper.sets[0].losses.device.type == keeper.rows.losses.device.type == "cpu"


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [False, True])
def test_dataclasses(slots):
    Pair = dataclasses.make_dataclass("Pair", ["ids", "label"], frozen=True, slots=slots)

    def collate(some):
        return Pair(torch.stack([one.ids for one in some]), torch.tensor([one.label for one in some]))

    big = torch.arange(1000.0)
    kept = keep([Pair(big[k : k + 2], k) for k in range(3)], collate).sets["a"]
    assert kept.fetch([0, 2], None)[0].ids.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    moved = kept.fetch([0, 1], "meta")[0]
    assert (moved.ids.device.type, moved.label.device.type) == ("meta", "meta")


@pytest.mark.parametrize("loaded", [False, True])
def test_no_view_holds_a_data_set_and_no_draw_changes_what_is_kept(loaded):
    seen = []

    def spoiling(some):
        for one in some:
            one["tokens"].append(len(one["tokens"]))
            assert one["tokens"] == [0]
            seen.append(one["x"].untyped_storage().nbytes())
            one["x"] += 7.0
        xs, ys = [one["x"] for one in some], [one.pop("a") for one in some]
        return {"x": torch.stack(xs), "a": torch.stack(ys)}

    big, table = torch.zeros(1000, 4), np.zeros((1000, 4), np.float32)
    data = [{"x": big[k], "a": table[k], "tokens": []} for k in range(20)]
    data = DataLoader(data, batch_size=5, collate_fn=spoiling) if loaded else data
    kept = keep(data, None if loaded else spoiling).sets["a"]
    big += 1.0
    table += 1.0
    for _ in range(2):
        batch = kept.fetch([3, 5], None)[0]
        assert torch.equal(batch["x"], torch.full((2, 4), 7.0))
        assert torch.equal(batch["a"], torch.zeros(2, 4))
    assert set(seen) == {16}


def test_batches_are_copies_without_what_a_view_does_not_show():
    big = torch.zeros(1000, 1000)
    batch = {"view": big[:2, ::500], "expanded": torch.zeros(1, 1).expand(2, 256), "half": big[:2, 0].half()}
    batch["again"] = batch["half"]
    keeper = keep([batch])
    big += 1.0
    for _ in range(2):
        kept = keeper.sets["a"]
        sizes = {name: leaf.untyped_storage().nbytes() for name, leaf in kept.examples[1].items()}
        assert sizes == {"view": 2 * 4, "expanded": 256 * 4, "half": 2, "again": 2}
        for _ in range(2):
            drawn = kept.fetch([0, 1], None)[0]
            assert not drawn["view"].any()
            drawn["view"] += 7.0
        # Views of one tensor would each be pickled with all of it.
        keeper.load_state_dict(through_a_file(keeper.state_dict()))


# --- through a file ---------------------------------------------------------------------------------


def test_any_example_survives_a_file():
    examples = [
        {
            "tensor": torch.arange(k + 1.0).bfloat16(),
            "arrays": [np.arange(k + 1, dtype=np.int16), np.float32(k / 3)],
            ("a", 1): (k, k / 3, 1j * k, True, None, "text", np.str_("more")),
            "tokens": list(range(k)),
            "none": np.zeros((0, 3)),
        }
        for k in range(6)
    ]
    keeper, other = keep(examples, list), keep(examples[:1], list)
    state = keeper.state_dict()
    other.load_state_dict(through_a_file(state))
    found, expected = other.sets["a"].fetch([0, 5, 3], None)[0], [examples[k] for k in (0, 5, 3)]
    for one, two in zip(found, expected, strict=True):
        pairs = zip(*map(tree_leaves, (one, two)), strict=True)
        assert all(np.array_equal(*(x.float() if torch.is_tensor(x) else x for x in pair)) for pair in pairs)
        assert (one["tensor"].dtype, one["arrays"][0].dtype) == (torch.bfloat16, torch.int16)


def test_any_nesting_of_a_batch_and_any_name_survive():
    wide = torch.arange(48.0).reshape(6, 8) / 7
    batch = {
        "ids": [torch.arange(6), (torch.arange(12).reshape(2, 6).T,)],
        7: {"mask": torch.arange(6) > 2, "half": wide.bfloat16(), "same": wide[:, ::2]},
        "none": torch.zeros(6, 0),
    }
    names, keeper = ["news", 3, -1, "3", 2.5, True, ("a", 1)], None
    for name in names:
        keeper = keep([batch], keeper=keeper, name=name)
    other = begin(keeper.promise)[2]
    other.load_state_dict(through_a_file(keeper.state_dict()))
    assert [(name, type(name)) for name in other.sets] == [(name, type(name)) for name in names]
    for kept in other.sets.values():
        found, expected = (one.fetch(list(range(6)), None)[0] for one in (kept, keeper.sets[3]))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        torch.testing.assert_close(found[7]["same"], wide[:, ::2], rtol=0, atol=0)


@pytest.mark.parametrize("label", [lambda k: k, str])
def test_a_state_has_a_batch_where_torch_makes_one_that_can_be_divided(label):
    kept = set_of([(torch.full((2,), float(k)), label(k)) for k in range(5)])
    state = through_a_file(kept.state_dict())
    assert [*state["packed"]] == (["examples"] if label(0) == 0 else [])
    again = KeptSet.from_state_dict(state, kept.promise, default_collate)
    assert [type(leaf) for leaf in again.examples[0]] == [type(leaf) for leaf in kept.examples[0]]
    for found, expected in zip(
        tree_leaves(again.fetch([3, 1], None)), tree_leaves(kept.fetch([3, 1], None)), strict=True
    ):
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
