"""The plugins in Avalanche's loop take the same steps as a loop by hand, and as Avalanche's own where they should."""

import pickle

import pytest

torch = pytest.importorskip("torch")


def import_avalanche():
    """Import Avalanche; return why this is impossible, if it is."""
    kept = []
    try:
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            # Its compiled operators are for another build of torch, and it describes two of them when it is
            # imported. Nothing here calls them: their names are enough.
            kept.append(library := torch.library.Library("torchvision", "DEF"))
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import avalanche  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return kept, f"Avalanche cannot be imported: {type(error).__name__}: {error}"
    return kept, None


LIBRARIES, PROBLEM = import_avalanche()
if PROBLEM:
    pytest.skip(PROBLEM, allow_module_level=True)

from avalanche.benchmarks import tensors_benchmark  # noqa: E402
from avalanche.models import MultiHeadClassifier, MultiTaskModule  # noqa: E402
from avalanche.training import plugins as theirs  # noqa: E402
from avalanche.training.supervised import Naive  # noqa: E402
from models import assert_same_weights, flat, loss, perceptron, rival, task  # noqa: E402

from gemproj import GEM2017  # noqa: E402
from gemproj.integrations.avalanche import AGEMPlugin, GEMPlugin  # noqa: E402
from gemproj.torch import EpisodicMemory, GradientProjector  # noqa: E402

PER_TASK, BATCH, EPOCHS = 24, 8, 2


def stream(k):
    return rival(task(0, PER_TASK), k)


def benchmark(tasks=3, labelled=False):
    """Tasks that contradict each other."""
    streams = [stream(k) for k in range(tasks)]
    labels = list(range(tasks)) if labelled else [0] * tasks
    return tensors_benchmark(train_tensors=streams, test_tensors=streams, task_labels=labels)


class MultiHead(MultiTaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(6, 8)
        self.heads = MultiHeadClassifier(8, 3)

    def forward(self, x, task_labels):
        return self.heads(torch.tanh(self.body(x.float())), task_labels)


def make(model, plugin, make_optimizer=torch.optim.SGD):
    return Naive(
        model=model,
        optimizer=make_optimizer(model.parameters(), lr=0.1),
        criterion=torch.nn.CrossEntropyLoss(),
        train_mb_size=BATCH,
        train_epochs=EPOCHS,
        plugins=[plugin],
        evaluator=None,
    )


def by_avalanche(model, plugin, make_optimizer=torch.optim.SGD, tasks=3):
    strategy = make(model, plugin, make_optimizer)
    for experience in benchmark(tasks).train_stream:
        strategy.train(experience, shuffle=False)
    return strategy


def by_hand(model, options, make_optimizer=torch.optim.SGD, sample=None):
    optimizer, memory, active = make_optimizer(model.parameters(), lr=0.1), EpisodicMemory(PER_TASK), 0
    for k in range(3):
        projector = GradientProjector(model.parameters(), **options)
        attached = projector.attach(optimizer)
        x, y = stream(k)
        for _ in range(EPOCHS):
            for now in zip(x.split(BATCH), y.split(BATCH), strict=True):
                past = memory.batches() if sample is None or not k else [memory.sample(sample)]
                projector.recall(model, past, loss)
                optimizer.zero_grad()
                loss(model, now).backward()
                optimizer.step()
                active += projector.last.num_active
        attached.remove()
        memory.add(stream(k), k)
    assert active
    return projector


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"on": "both", "metric": "adam"},
        {"on": "step"},
        {"margin": 0.1, "interval": 3},
        {"method": "fista"},
    ],
    ids=str,
)
def test_gem_trains_as_a_loop_by_hand(options):
    make_optimizer = torch.optim.Adam if "metric" in options else torch.optim.SGD
    model, other = perceptron(), perceptron()
    plugin = GEMPlugin(PER_TASK, **{"memory_strength" if k == "margin" else k: v for k, v in options.items()})
    by_avalanche(model, plugin, make_optimizer)
    projector = by_hand(other, options, make_optimizer)
    # The memory holds the same patterns in another order.
    assert_same_weights(model, other)
    assert plugin.projector.last.constraints == projector.last.constraints == 2
    assert plugin.projector.last.worst_cosine is not None
    assert plugin.memory.tasks == [0, 1, 2]


def test_agem_trains_as_a_loop_by_hand():
    model, other = perceptron(), perceptron()
    plugin = AGEMPlugin(PER_TASK, 2 * PER_TASK)
    by_avalanche(model, plugin)
    by_hand(other, {}, sample=2 * PER_TASK)
    assert_same_weights(model, other)
    assert plugin.projector.last.constraints == 1


def test_a_sample_has_the_size_that_was_asked_for():
    plugin = AGEMPlugin(10, 7)
    by_avalanche(perceptron(), plugin, tasks=2)
    (batch,) = plugin.gem._batches()
    assert [len(leaf) for leaf in batch] == [7, 7, 7]


@pytest.mark.parametrize(
    ("ours", "other"),
    [
        (GEMPlugin(PER_TASK, method=GEM2017(0.5)), theirs.GEMPlugin(PER_TASK, 0.5)),
        (GEMPlugin(PER_TASK, method=GEM2017(0.0)), theirs.GEMPlugin(PER_TASK, 0.0)),
        (AGEMPlugin(PER_TASK, 2 * PER_TASK), theirs.AGEMPlugin(PER_TASK, 2 * PER_TASK)),
    ],
    ids=["gem", "gem without strength", "agem"],
)
def test_has_the_numbers_of_the_plugin_whose_place_it_takes(ours, other):
    models = [perceptron(), perceptron(), perceptron()]
    for model, plugin in zip(models, (ours, other, GEMPlugin(PER_TASK)), strict=True):
        by_avalanche(model, plugin)
    torch.testing.assert_close(
        flat(models[0]), flat(models[1]), rtol=1e-4, atol=1e-6
    )  # theirs rounds to float32
    assert (flat(models[0]) - flat(models[2])).abs().max() > 1e-4


def test_heads_of_past_tasks_are_held_too():
    model = MultiHead()
    plugin = GEMPlugin(10, on="both", metric="adam")
    strategy = make(model, plugin, torch.optim.Adam)
    sizes = []
    for experience in benchmark(labelled=True).train_stream:
        strategy.train(experience, shuffle=False)
        sizes.append(plugin.projector.constraints.shape)
    body, head = 6 * 8 + 8, 8 * 3 + 3
    assert sizes == [(k, body + (k + 1) * head) for k in range(3)]  # heads join as tasks arrive
    for k, row in enumerate(plugin.projector.constraints):
        heads = row[body:].reshape(3, head).abs().amax(1)
        assert (heads > 0).tolist() == [j == k for j in range(3)]
    assert plugin.projector.last.worst_cosine > -1e-5


def test_remembers_a_random_choice_and_disturbs_no_random_state():
    plugins = [GEMPlugin(6, seed=seed) for seed in (0, 0, 1)]
    kept = []
    for plugin in plugins:
        strategy = by_avalanche(perceptron(), plugin, tasks=1)
        strategy.experience = benchmark().train_stream[1]
        state = torch.get_rng_state()
        (batch,) = plugin.memory.batches()
        assert [len(leaf) for leaf in batch] == [6, 6, 6]
        kept.append(batch[0])
        plugin.after_training_exp(strategy)
        assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's, when it unpickles a TreeSpec
def test_survives_pickling_which_is_how_avalanche_saves_strategies():
    model, other = perceptron(), perceptron()
    by_avalanche(model, GEMPlugin(6, on="both"))
    plugin = GEMPlugin(6, on="both")
    by_avalanche(other, plugin, tasks=2)
    other, plugin = pickle.loads(pickle.dumps((other, plugin)))
    make(other, plugin).train(benchmark().train_stream[2], shuffle=False)
    assert torch.equal(flat(model), flat(other))


def test_leaves_the_optimizer_alone_afterwards():
    strategy = by_avalanche(perceptron(), GEMPlugin(6), tasks=2)
    assert not strategy.optimizer._optimizer_step_pre_hooks


def test_bad_input():
    with pytest.raises(ValueError, match="patterns_per_experience must be at least 1"):
        GEMPlugin(0)
    with pytest.raises(ValueError, match="sample_size must be at least 1"):
        AGEMPlugin(3, 0)
    with pytest.raises(ValueError, match="margin must be finite and at least 0"):
        GEMPlugin(3, -1.0)
    with pytest.raises(ValueError, match="margin cannot be combined with method GEM2017"):
        GEMPlugin(3, 0.5, method="gem2017")
