"""What is special to Avalanche: its plugins' numbers, heads that join, the choice of patterns, pickles.

What holds in every framework is in test_frameworks.py.
"""

import pickle

import pytest
import torch
from frameworks import Avalanche, batches, import_avalanche

import_avalanche()

from avalanche.models import MultiHeadClassifier, MultiTaskModule  # noqa: E402
from avalanche.training import plugins as theirs  # noqa: E402
from loops import flat  # noqa: E402

from gemproj import GEM2017  # noqa: E402
from gemproj.integrations.avalanche import KeeperPlugin  # noqa: E402
from gemproj.torch import Promise  # noqa: E402
from gemproj.torch.losses import Distillation  # noqa: E402

ALL, SIZE = Promise(examples=None), 24
GRADIENT = {"limit": SIZE, "on": "gradient"}


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
    driver.keeper = driver.use(plugin)
    for k in range(tasks):
        driver.train(batches(k))
    return driver


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        (KeeperPlugin(ALL, method=GEM2017(0.5), **GRADIENT), theirs.GEMPlugin(SIZE, 0.5)),
        (KeeperPlugin(ALL, method=GEM2017(0.0), **GRADIENT), theirs.GEMPlugin(SIZE, 0.0)),
        (KeeperPlugin(ALL, method="agem", name="past", **GRADIENT), theirs.AGEMPlugin(SIZE, 2 * SIZE)),
    ],
    ids=["gem", "gem without strength", "agem"],
)
def test_has_the_numbers_of_the_plugin_whose_place_it_takes(ours, other, tmp_path):
    exact = KeeperPlugin(ALL, **GRADIENT)
    first, second, exact = (flat(learn(tmp_path, plugin).model) for plugin in (ours, other, exact))
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)  # theirs rounds to float32
    assert (first - exact).abs().max() > 1e-4


def test_a_promise_about_another_loss_than_the_criterion_is_refused():
    with pytest.raises(ValueError, match=r"promise must have no loss here, .* criterion"):
        KeeperPlugin(Promise(Distillation()))


def test_one_growing_set_is_sampled(tmp_path):
    plugin, sizes = KeeperPlugin(Promise(examples=7), limit=10, name="past", method="agem"), set()
    driver = learn(tmp_path, plugin, 2)

    def note(model, given):
        if not model.training:
            sizes.add(len(given[0]))

    driver.model.register_forward_pre_hook(note)
    driver.train(batches(2))
    assert sizes == {7, 3}  # and what is kept, 10 patterns in two passes
    assert plugin.last.names == ["past"]
    assert len(plugin.sets["past"]) == 30


def test_heads_of_past_tasks_are_held_too(tmp_path):
    plugin = KeeperPlugin(ALL, limit=10)
    driver, sizes = learn(tmp_path, plugin, 0, model=MultiHead()), []
    for k in range(3):
        driver.train(batches(k), label=k)
        sizes.append(plugin.rows.G.shape)
    body, head = 6 * 8 + 8, 8 * 3 + 3
    assert sizes == [(k, body + (k + 1) * head) for k in range(3)]  # heads join as tasks arrive
    for k, row in enumerate(plugin.rows.G):
        heads = row[body:].reshape(3, head).abs().amax(1)
        assert (heads > 0).tolist() == [j == k for j in range(3)]
    assert plugin.last.worst_cosine > -1e-5
    assert [line.steps for line in plugin.report().values()] == [12, 6, 0]


def test_keeps_a_random_choice_and_disturbs_no_random_state(tmp_path):
    plugin = KeeperPlugin(ALL, limit=6)
    driver = learn(tmp_path, plugin, 1)
    assert driver.hooks() == 0
    driver.strategy.experience = driver.stream[0]
    assert list(map(len, plugin.sets[0].examples)) == [3] * 6
    state = torch.get_rng_state()
    plugin.after_training_exp(driver.strategy)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's, when it unpickles a TreeSpec
def test_survives_pickling_which_is_how_avalanche_saves_strategies(tmp_path):
    whole, half = (learn(tmp_path, KeeperPlugin(ALL, limit=6), tasks) for tasks in (3, 2))
    half.model, plugin = pickle.loads(pickle.dumps((half.model, half.keeper)))
    half.use(plugin)
    half.train(batches(2))
    assert torch.equal(flat(whole.model), flat(half.model))
