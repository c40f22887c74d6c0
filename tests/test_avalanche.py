"""What is special to Avalanche: its plugins' numbers, heads that join, the choice of patterns, pickles.

What holds in every framework is in test_frameworks.py.
"""

import pickle

import pytest

torch = pytest.importorskip("torch")

from frameworks import Avalanche, batches, import_avalanche  # noqa: E402

import_avalanche()

from avalanche.models import MultiHeadClassifier, MultiTaskModule  # noqa: E402
from avalanche.training import plugins as theirs  # noqa: E402
from models import flat  # noqa: E402

from gemproj import GEM2017  # noqa: E402
from gemproj.integrations.avalanche import AGEMPlugin, GEMPlugin  # noqa: E402

SIZE = Avalanche.per_task


class MultiHead(MultiTaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(6, 8)
        self.heads = MultiHeadClassifier(8, 3)

    def forward(self, x, task_labels):
        return self.heads(torch.tanh(self.body(x.float())), task_labels)


def learn(folder, plugin, tasks=3, **options):
    driver = Avalanche(folder, **options)
    driver.object = driver.use(plugin)
    for k in range(tasks):
        driver.train(batches(k))
    return driver


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        (GEMPlugin(SIZE, method=GEM2017(0.5)), theirs.GEMPlugin(SIZE, 0.5)),
        (GEMPlugin(SIZE, method=GEM2017(0.0)), theirs.GEMPlugin(SIZE, 0.0)),
        (AGEMPlugin(SIZE, 2 * SIZE), theirs.AGEMPlugin(SIZE, 2 * SIZE)),
    ],
    ids=["gem", "gem without strength", "agem"],
)
def test_has_the_numbers_of_the_plugin_whose_place_it_takes(ours, other, tmp_path):
    first, second, exact = (flat(learn(tmp_path, plugin).model) for plugin in (ours, other, GEMPlugin(SIZE)))
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)  # theirs rounds to float32
    assert (first - exact).abs().max() > 1e-4


def test_a_sample_has_the_size_that_was_asked_for(tmp_path):
    plugin, sizes = AGEMPlugin(10, 7), set()
    driver = learn(tmp_path, plugin, 2)

    def note(model, given):
        if not model.training:
            sizes.add(len(given[0]))

    driver.model.register_forward_pre_hook(note)
    driver.train(batches(2))
    assert sizes == {7}
    assert plugin.last.constraints == 1


def test_heads_of_past_tasks_are_held_too(tmp_path):
    plugin = GEMPlugin(10, on="both")
    driver, sizes = learn(tmp_path, plugin, 0, model=MultiHead()), []
    for k in range(3):
        driver.train(batches(k), label=k)
        sizes.append(plugin.projector.constraints.shape)
    body, head = 6 * 8 + 8, 8 * 3 + 3
    assert sizes == [(k, body + (k + 1) * head) for k in range(3)]  # heads join as tasks arrive
    for k, row in enumerate(plugin.projector.constraints):
        heads = row[body:].reshape(3, head).abs().amax(1)
        assert (heads > 0).tolist() == [j == k for j in range(3)]
    assert plugin.last.worst_cosine > -1e-5


def test_remembers_a_random_choice_and_disturbs_no_random_state(tmp_path):
    kept = []
    for plugin in [GEMPlugin(6, seed=seed) for seed in (0, 0, 1)]:
        driver = learn(tmp_path, plugin, 1)
        assert driver.hooks() == 0
        driver.strategy.experience = driver.stream[0]
        batch, state = plugin.memory.batch(0), torch.get_rng_state()
        assert [len(leaf) for leaf in batch] == [6, 6, 6]
        kept.append(batch[0])
        plugin.after_training_exp(driver.strategy)
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's, when it unpickles a TreeSpec
def test_survives_pickling_which_is_how_avalanche_saves_strategies(tmp_path):
    whole, half = (learn(tmp_path, GEMPlugin(6, on="both"), tasks) for tasks in (3, 2))
    half.model, plugin = pickle.loads(pickle.dumps((half.model, half.object)))
    half.use(plugin)
    half.train(batches(2))
    assert torch.equal(flat(whole.model), flat(half.model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GEMPlugin(0), "patterns_per_experience must be at least 1"),
        (lambda: AGEMPlugin(3, 0), "sample_size must be at least 1"),
        (lambda: GEMPlugin(3, -1.0), "memory_strength must be finite and at least 0"),
        (lambda: GEMPlugin(3, 0.5, method="gem2017"), "weight cannot be combined with method GEM2017"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()
