"""The episodic memory: which examples stay, how they come back, and what survives a file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils._pytree import tree_leaves  # noqa: E402

from gemproj.torch import EpisodicMemory  # noqa: E402
from gemproj.torch.policies import POLICIES  # noqa: E402


def numbered(labels):
    """A stream whose examples carry their place in it."""
    labels = torch.as_tensor(labels, dtype=torch.int64)
    return {"x": torch.arange(len(labels)), "y": labels}


def kept(labels, cuts=None, **options):
    """Places in the stream of the examples that stay, by slot."""
    memory, stream = EpisodicMemory(label="y", **options), numbered(labels)
    for rows in torch.arange(len(labels)).split(cuts or len(labels)):
        memory.add({name: values[rows] for name, values in stream.items()}, task=0)
    return memory.batch(0)["x"].tolist()


def frequencies(trials, labels, **options):
    """How often each example of a stream stays, over seeds."""
    counts = torch.zeros(len(labels))
    for seed in range(trials):
        counts[kept(labels, seed=seed, **options)] += 1
    return counts


def close(counts, trials, chance):
    """Within 4.5 standard deviations of as many draws with this chance."""
    return bool((counts - trials * chance).abs().max() < 4.5 * (trials * chance * (1 - chance)) ** 0.5)


def same(left, right):
    """The memories hold the same, slot by slot, and draw the same from here on."""

    def seen(memory):
        batches = [*memory.batches(), memory.sample(5)]
        for _ in range(4):
            batches += [*memory.batches(n=2), *memory.batches(n=2, per="label")]
        return tree_leaves(batches)

    pairs = zip(seen(left), seen(right), strict=True)
    return left.tasks == right.tasks and all(torch.equal(a, b) for a, b in pairs)


LABELS = torch.zeros(2, dtype=torch.long)
streams = st.lists(st.integers(0, 4), min_size=1, max_size=80)
capacities = st.integers(1, 12)

# --- policies -----------------------------------------------------------------------------------


@given(streams, capacities, st.sampled_from(sorted(POLICIES)), st.integers(1, 80))
def test_choices_do_not_depend_on_batches(labels, per_task, policy, cuts):
    whole = kept(labels, per_task=per_task, policy=policy)
    assert kept(labels, cuts, per_task=per_task, policy=policy) == whole
    assert len(set(whole)) == len(whole) == min(per_task, len(labels))


@given(streams, capacities, st.sampled_from(["balanced", "ring"]))
def test_labels_are_even_within_one_as_far_as_there_are_examples(labels, per_task, policy):
    stays = [labels[k] for k in kept(labels, per_task=per_task, policy=policy)]
    most = max(stays.count(y) for y in stays)
    assert all(stays.count(y) >= min(labels.count(y), most - 1) for y in set(labels))


@given(streams, capacities)
def test_ring_keeps_the_last_of_each_label(labels, per_task):
    places = sorted(kept(labels, per_task=per_task, policy="ring"))
    for y in set(labels):
        of_y = [k for k, label in enumerate(labels) if label == y]
        stays = [k for k in places if labels[k] == y]
        assert stays == of_y[len(of_y) - len(stays) :]


def test_ring_without_labels_overwrites_the_oldest():
    memory = EpisodicMemory(per_task=5, policy="ring")
    for part in torch.arange(13).split(3):
        memory.add(part, task=0)
    assert memory.batch(0).tolist() == [10, 11, 12, 8, 9]
    memory.add(torch.zeros(0, dtype=torch.int64), task=1)
    assert memory.tasks == [0]


def test_reservoir_keeps_every_example_with_the_same_chance():
    labels = [0] * 15 + [1] * 5  # skewed, which it must not look at
    counts = frequencies(600, labels, per_task=5, policy="reservoir")
    assert counts.sum() == 3000
    assert close(counts, 600, 1 / 4)


@pytest.mark.parametrize("per_task", [7, 8])  # also where labels cannot be equally frequent
def test_balanced_keeps_examples_of_a_label_with_the_same_chance(per_task):
    labels = torch.tensor([0, 1, 1, 2] * 8 + [0] * 16)
    counts = frequencies(600, labels.tolist(), per_task=per_task, policy="balanced")
    for y in range(3):
        of_label = counts[labels == y]
        assert of_label.sum() >= 600 * (per_task // 3)
        assert close(of_label, 600, float(of_label.mean()) / 600)


@pytest.mark.parametrize(("labels", "policy"), [([3] * 90, "balanced"), ([0] * 30 + [1] * 3, None)])
def test_one_label_makes_balanced_a_reservoir_which_is_the_default(labels, policy):
    options = {"policy": policy} if policy else {}
    assert kept(labels, per_task=7, **options) == kept(labels, per_task=7, policy="reservoir")


def test_a_seed_means_the_same_examples_in_every_version():
    labels = [0, 0, 1, 2] * 12
    assert kept(labels, per_task=6, policy="reservoir", seed=5) == [27, 21, 47, 28, 39, 45]
    assert kept(labels, per_task=6, policy="balanced", seed=5) == [11, 13, 2, 35, 41, 26]


# --- what comes back ----------------------------------------------------------------------------


def test_memory_yields_tasks_in_order_and_samples_their_union():
    memory = EpisodicMemory(per_task=3)
    for k in (2, 0, 1):
        memory.add((torch.full((5,), k), [torch.arange(5)]), task=k)
    assert len(memory) == 3
    assert memory.tasks == [2, 0, 1]
    assert [int(batch[0][0]) for batch in memory.batches()] == [2, 0, 1]
    assert [int(batch[0][0]) for batch in memory.batches(exclude=0)] == [2, 1]
    assert len(list(memory.batches(exclude="of now"))) == 3
    assert memory.batch(0)[0].tolist() == [0, 0, 0]
    assert torch.bincount(memory.sample(100, exclude=1)[0]).tolist() == [3, 0, 3]
    sample = memory.sample(100)
    assert torch.bincount(sample[0]).tolist() == [3, 3, 3]
    assert sample[0].shape == sample[1][0].shape == (9,)
    assert memory.sample(4)[0].shape == (4,)
    assert memory.nbytes == 3 * 3 * 8 * 2


def test_a_sample_is_on_one_device_where_tasks_are_on_several():
    memory = EpisodicMemory(4)
    memory.add(torch.zeros(4, 2, device="meta"), 0)
    memory.add(torch.zeros(4, 2), 1)
    assert memory.sample(8).shape == (8, 2)
    assert memory.sample(8).device.type == "meta"


def test_examples_may_come_and_go_in_inference_mode():
    memory, plain = EpisodicMemory(per_task=4), EpisodicMemory(per_task=4)
    for k in range(4):
        with torch.inference_mode(k % 2 == 0):
            memory.add(torch.arange(3.0) + 3 * k, task=0)
        plain.add(torch.arange(3.0) + 3 * k, task=0)
    weight = torch.ones(4, requires_grad=True)
    (weight * memory.batch(0)).sum().backward()
    assert torch.equal(weight.grad, plain.batch(0))


def test_bytes_are_those_of_the_memory_not_of_what_was_offered():
    memory = EpisodicMemory(per_task=512)
    big = torch.zeros(1000, 1000)
    batch = {"view": big[:2, ::500], "expanded": torch.zeros(1, 1).expand(2, 256), "half": big[:2, 0].half()}
    batch["again"] = batch["half"]
    memory.add(batch, task=0)
    assert memory.nbytes == 512 * (2 * 4 + 256 * 4 + 2 + 2)
    settings = "per_task=512, label=None, policy='reservoir', examples={0: 2}, size='518 KiB'"
    assert repr(memory) == f"EpisodicMemory({settings})"
    storages = {leaf.untyped_storage().data_ptr() for leaf in memory.batch(0).values()}
    assert len(storages) == 4
    assert memory.batch(0)["view"].untyped_storage().nbytes() == 2 * 2 * 4


def test_memory_ignores_the_default_device():
    memory, plain = (EpisodicMemory(per_task=3, label="y") for _ in range(2))
    stream = numbered([0, 1] * 9)
    plain.add(stream, task=0)
    with torch.device("meta"):
        memory.add(stream, task=0)
        memory.load_state_dict(memory.state_dict())
        assert same(memory, plain)


# --- saved and loaded ---------------------------------------------------------------------------


def through(memory, other, folder):
    torch.save(memory.state_dict(), folder / "memory.pt")
    other.load_state_dict(torch.load(folder / "memory.pt", weights_only=True))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_memory_goes_on_as_if_never_interrupted(policy, tmp_path):
    options = {"per_task": 4, "seed": 3, "policy": policy}
    through_it, without = (EpisodicMemory(label=lambda batch: batch["y"], **options) for _ in range(2))

    def add(memory, labels, task):
        batch = numbered(labels)
        memory.add(batch, task, outputs=-batch["x"], losses=batch["x"] / 8)

    for memory in (through_it, without):
        add(memory, torch.arange(9) % 3, "a")
        add(memory, [0, 0], 1)  # its memory is not full
        list(memory.batches(n=2)), list(memory.batches(n=2, per="label"))
    loaded = EpisodicMemory(per_task=4, label="y", policy=policy)
    through(through_it, loaded, tmp_path)
    assert same(loaded, without)
    for memory in (loaded, without):
        add(memory, torch.arange(50) % 4, "a")
        add(memory, torch.arange(50) % 4, 1)
        add(memory, [2, 3], "c")
    assert same(loaded, without)


def test_any_nesting_survives(tmp_path):
    wide = torch.arange(48.0).reshape(6, 8) / 7
    batch = {
        "ids": [torch.arange(6), (torch.arange(12).reshape(2, 6).T,)],
        7: {"mask": torch.arange(6) > 2, "half": wide.bfloat16(), "same": wide[:, ::2], "too": wide[:, ::2]},
        "none": torch.zeros(6, 0),
    }
    tasks = ["news", 3, -1, "3", 2.5, True, ("a", 1)]
    memory, loaded = (EpisodicMemory(per_task=6) for _ in range(2))
    through(memory, loaded, tmp_path)
    assert loaded.tasks == []
    for task in tasks:
        memory.add(batch, task=task)
    through(memory, loaded, tmp_path)
    assert [(task, type(task)) for task in loaded.tasks] == [(task, type(task)) for task in tasks]
    for back in loaded.batches():
        torch.testing.assert_close(back, memory.batch(3), rtol=0, atol=0)
    loaded.add(batch, task="more")


def test_a_batch_a_state_and_their_memory_do_not_follow_each_other():
    memory, given = EpisodicMemory(per_task=50), torch.zeros(2)
    memory.add(given, task=0)
    given += 1.0
    state, batch = memory.state_dict(), next(memory.batches())
    batch += 7.0
    memory.add(torch.ones(40), task=0)
    assert not state["tasks"][0]["batch"].any()
    assert state["tasks"][0]["batch"].untyped_storage().nbytes() == 8
    memory.load_state_dict(state)
    state["tasks"][0]["batch"] += 1
    assert memory.batch(0).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "change", "text"),
    [
        ({"per_task": 5}, None, "state has per_task=4 but this memory has 5"),
        ({"policy": "ring"}, None, "state has policy='reservoir' but this memory has 'ring'"),
        ({"label": None}, None, "state has labelled=True but this memory has False"),
        ({}, dict.clear, "state has no 'per_task'"),
        ({}, lambda state: state["tasks"][0].update(labels=LABELS), "2 labels and 3 arrivals for 4 slots"),
        ({}, lambda state: state["tasks"][0].update(batch=LABELS), "2 examples of a task but 3 labels"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(options, change, text):
    memory, other = (EpisodicMemory(**{"per_task": 4, "label": "y"} | more) for more in ({}, options))
    memory.add(numbered([1, 2, 1]), task=0)
    other.add(numbered([1, 2]), task=1)
    state = memory.state_dict()
    if change:
        change(state)
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(state)
    assert other.tasks == [1]
    assert other.batch(1)["x"].tolist() == [0, 1]


# --- draws -------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 15), st.integers(0, 5))
def test_none_is_drawn_again_before_all_were(kept, n, seed):
    memory = EpisodicMemory(per_task=20, seed=seed)
    memory.add(torch.arange(kept), "a")
    drawn = []
    for _ in range(7):
        (batch,) = memory.batches(n=n)
        assert len(batch) == len(set(batch.tolist())) == min(n, kept)
        drawn += batch.tolist()
        counts = [drawn.count(i) for i in range(kept)]
        assert max(counts) - min(counts) <= 1


def test_draws_for_each_label_and_for_each_example():
    memory = EpisodicMemory(per_task=8, label=1, policy="reservoir")
    memory.add((torch.arange(7), torch.tensor([2, 0, 2, 0, 2, 2, 2])), 0)
    memory.add((torch.arange(10, 13), torch.tensor([1, 1, 1])), 1)
    found = [sorted(x.tolist()) for x, _ in memory.batches(per="label")]
    assert found == [[1, 3], [0, 2, 4, 5, 6], [10, 11, 12]]
    some = list(memory.batches(n=2, per="label"))
    assert [len(x) for x, _ in some] == [2, 2, 2]
    assert all(len(set(y.tolist())) == 1 for _, y in some)
    each = [x.tolist() for x, _ in memory.batches(exclude=1, per="example")]
    assert sorted(each) == [[i] for i in range(7)]
    assert [len(x) for x, _ in memory.batches(n=3, per="example")] == [1] * 6


def test_outputs_and_losses_stay_with_their_examples():
    memory = EpisodicMemory(per_task=5, seed=3)
    for x in torch.arange(40).split(4):
        memory.add({"x": x}, 0, outputs=(10.0 * x, x[:, None].half()), losses=x.double() / 8)
    for found in (memory.batch(0), *memory.batches(n=2), *memory.batches(per="example"), memory.sample(3)):
        x = found.batch["x"]
        expected = {"outputs": (10.0 * x, x[:, None].half()), "losses": x.double() / 8}
        torch.testing.assert_close({name: getattr(found, name) for name in expected}, expected)
    assert memory.nbytes == 5 * (8 + 4 + 2 + 8)
    for task, more, text in (
        (0, {}, "stored with batch and outputs and losses; found batch"),
        (1, {"losses": torch.ones(2, 1)}, r"losses must be a tensor of shape \(n,\).*found \(2, 1\)"),
        (1, {"outputs": torch.ones(3)}, "same leading dimension"),
    ):
        with pytest.raises(ValueError, match=text):
            memory.add({"x": torch.arange(2)}, task, **more)
    memory.add({"x": torch.arange(2)}, 1)
    with pytest.raises(ValueError, match="Only some tasks have stored"):
        memory.sample(8)


def test_outputs_and_losses_are_recorded_for_what_is_kept():
    memory = EpisodicMemory(per_task=5)
    memory.add({"x": torch.arange(30)}, 0)
    x = memory.batch(0)["x"]
    for more in ({"outputs": 10.0 * x}, {"losses": x / 8}):  # one instead of the other
        memory.record(0, **more)
        found = memory.batch(0)._asdict()
        for name in ("outputs", "losses"):
            assert torch.equal(found[name], more[name]) if name in more else found[name] == ()
    for task, n, text in ((0, 4, "same leading dimension"), (7, 5, "No examples of task 7")):
        with pytest.raises(ValueError, match=text):
            memory.record(task, losses=torch.ones(n))
