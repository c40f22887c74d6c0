"""What each process checks of replicated parameters: DistributedDataParallel, and a group."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from models import BOTH, EACH, begin, flat, loss, protect, rival, take, task
from models import perceptron as net
from processes import all_reduces, alone, check, expect, learn, once, same_everywhere, share
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from gemproj.torch import EpisodicMemory, GradientProjector, Promise, stream
from gemproj.torch.constraints import ConstraintMatrix

# Examples of each past task that a process remembers: unequal, and none at all.
REMEMBERED = [[5, 0, 2, 1], [0, 4, 1, 3]]

PROMISES = [
    (loss, {"on": "both", "every": 2}),
    (loss, {"equal": True, "microbatch": 3}),
    (BOTH, {"on": "both", "tolerance": 0.0, "repair": 0.5}),
    (EACH, {"on": "step", "tolerance": 0.01, "microbatch": 3, "every": 2}),
    (EACH, {"weight": 0.02}),
    (loss, {"on": "step", "penalty": 0.5}),
    (loss, {"on": "both", "microbatch": 2}),
]


def past():
    """Draw what all processes together remember, and this one's part of it."""
    sizes = [one[: dist.get_world_size()] for one in REMEMBERED]
    together = [task(k, sum(one)) for k, one in enumerate(sizes)]
    return together, [share(batch, one) for batch, one in zip(together, sizes, strict=True)]


def same_rows(projector, single):
    torch.testing.assert_close(projector.constraints, single.constraints, rtol=1e-10, atol=1e-14)
    same_everywhere(projector.constraints)


@check(2)
def recall_joins_the_memories():
    together, mine = past()
    one, many = net(), DistributedDataParallel(net())
    single = GradientProjector(one.parameters(), process_group=alone())
    projector = GradientProjector(many.parameters())
    single.recall(one, together, loss)
    for options in ({}, {"microbatch": 2}, {"scale": 4.0}):
        projector.recall(many, mine, loss, **options)
        same_rows(projector, single)
    assert all(p.grad is None for p in many.parameters())
    projector = GradientProjector(many.parameters())
    projector.recall(torch.compile(many), mine, loss)
    same_rows(projector, single)
    with pytest.raises(ValueError, match="a part that is wrapped in DistributedDataParallel"):
        projector.recall(torch.nn.Sequential(many), mine, loss)
    # Without the wrapping class, by a group.
    plain = net()
    projector = GradientProjector(plain.parameters(), process_group=dist.group.WORLD)
    projector.recall(plain, mine, loss)
    same_rows(projector, single)


@check(2)
def rows_share_passes():
    """With weights of their own where the other process has other numbers of examples."""
    sizes = [[3, 1], [3, 5], [3, 3]]
    together = [task(k, sum(one)) for k, one in enumerate(sizes)]
    memory = EpisodicMemory(per_task=10)
    for k, (batch, one) in enumerate(zip(together, sizes, strict=True)):
        memory.add(share(batch, one), k)
    one, many = net(), DistributedDataParallel(net())
    single = GradientProjector(one.parameters(), process_group=alone())
    projector = GradientProjector(many.parameters())
    single.recall(one, together, EACH)
    for _ in range(2):
        projector.recall(many, memory.batches(), EACH)
        same_rows(projector, single)
    # Rows of the second process differ in size, so that each has a pass, and none could have shared one.
    assert projector.why_row_by_row is None


@check(2)
def constrain_averages():
    one, many = net(), net()
    single = GradientProjector(one.parameters(), process_group=alone())
    projector = GradientProjector(many.parameters(), process_group=dist.group.WORLD)
    batches = [task(k, 6) for k in range(2)]
    single.constrain(loss(one, batch) for batch in batches)
    projector.constrain(loss(many, share(batch)) for batch in batches)
    same_rows(projector, single)
    # Only one process's loss depends on the last layer: all know that a row reaches it.
    projector.constrain([many[0](task(0, 3)[0]).sum() if dist.get_rank() else loss(many, task(0, 3))])
    many[0](task(5, 4)[0]).sum().neg().backward()
    projector.project_()
    same_everywhere(torch.stack([torch.tensor(float(p.grad is not None)) for p in many.parameters()]))
    projector.constrain([])
    assert len(projector.constraints) == 0
    with all_reduces() as seen:
        projector.project_()
    assert not seen


@check(2)
def a_task_that_one_process_cannot_store_stops_every_process():
    odd = dist.get_rank() == 1
    for spread, promise, options in (
        (DistributedDataParallel, loss, {}),
        (DistributedDataParallel, EACH, {"tolerance": 0.0}),
        (fully_shard, loss, {}),
        (fully_shard, EACH, {"tolerance": 0.0, "microbatch": 2}),
        (lambda model: model, BOTH, {"process_group": dist.group.WORLD, "tolerance": 0.0}),
    ):
        _, optimizer, gem = begin(promise, model=spread(net()), **options)
        x, y = task(0, 3)
        with expect(odd, ValueError, "data holds no example"):
            gem.end_task([] if odd else [(x, y)], 0)
        with expect(odd, ValueError, "leading dimension"):
            gem.end_task([(x[odd:], y)], 0)
        with expect(odd, ValueError, "is nan, and nothing can be promised"):
            gem.end_task([(x * float("inf") if odd else x, y)], 0)
        if "tolerance" in options:
            one_number = Promise(loss if odd else EACH, tolerance=0.0)
            with expect(odd, ValueError, "tolerance needs one loss for each example"):
                gem.keep([(x, y)], one_number, name=0)
        assert not gem.memory.tasks
        gem.end_task([(x, y)], 0)
        optimizer.step()
        assert gem.last.constraints == 1


@check(2)
def processes_of_which_nothing_is_known_are_an_error():
    model = net()
    projector = GradientProjector(model.parameters())
    for use in (
        lambda: begin(model=model),
        lambda: projector.recall(model, [task(0, 3)], loss),
        lambda: projector.constrain([loss(model, task(0, 3))]),
    ):
        with pytest.raises(ValueError, match=r"2 processes are initialised.*DistributedDataParallel"):
            use()
    _, optimizer, gem = begin(model=model, process_group=alone())
    for _ in range(dist.get_rank()):  # which nothing waits for
        gem.end_task([task(0, 3)])
    optimizer.step()
    assert gem.last.constraints == dist.get_rank()


@check(2)
def options_that_differ_are_an_error():
    odd = dist.get_rank() == 1
    for name, one, other in (
        ("weight", 0.1, 0.9),
        ("method", "exact", "agem"),
        ("method", lambda K, b, start: b, "exact"),
        ("tolerance", 0.1, 0.2),
        ("tolerance", 0.1, None),
        ("every", 1, 2),
        ("on", "gradient", "step"),
        ("rows_dtype", torch.float32, torch.float64),
        ("microbatch", None, 2),
    ):
        model = DistributedDataParallel(net())
        _, optimizer, gem = begin(EACH, model=model, **{name: one if odd else other})

        def store_and_step(gem=gem, optimizer=optimizer):
            gem.end_task([task(0, 3)])
            optimizer.step()

        text = f"disagree on the (option {name}|promises|option bound).*same options"
        with pytest.raises(ValueError, match=text):
            store_and_step()


@check(2)
def rows_are_of_the_same_tasks_and_labels():
    """As many rows of other labels would be added up."""
    rank, (x, y) = dist.get_rank(), task(0, 60)
    keep = (y == rank) | (y == rank + 1)
    for names, promise in ((["a", "b"][:: 1 - 2 * rank], "task"), (["a"], "label")):
        _, optimizer, gem = begin(process_group=dist.group.WORLD, label=1, per=promise)
        for name in names:
            gem.end_task([(x[keep], y[keep])], name)
        with pytest.raises(ValueError, match="disagree on the names of sets or labels"):
            optimizer.step()


@check(2)
def rows_of_examples_are_as_many_though_stored_examples_are_not():
    _, optimizer, gem = begin(process_group=dist.group.WORLD, per="example", examples=3)
    gem.end_task([task(0, 10 - 2 * dist.get_rank())])
    optimizer.step()
    assert gem.last.constraints == 3


@check(2)
def an_optimizer_that_has_moments_of_some_parameters_only():
    """Also when those of the others were loaded as None: all processes measure distances alike."""
    model = DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.03)
    gem = protect(model, optimizer, on="step")
    gem.end_task([share(task(0, 8))])
    take(model, optimizer, share(rival(task(0, 8))))
    optimizer.consolidate_state_dict()
    state = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    optimizer.load_state_dict(state[0])
    take(model, optimizer, share(rival(task(0, 8))))
    assert gem.last.num_active
    assert gem.last.worst_cosine > -1e-6
    same_everywhere(flat(model))


@check(2)
def copies_are_made_without_a_group():
    for spread, options in (
        (DistributedDataParallel, {}),
        (lambda model: model, {"process_group": dist.group.WORLD}),
    ):
        _, optimizer, gem = begin(model=spread(net()), **options)
        gem.end_task([task(0, 3)])
        optimizer.step()
        other = copy.deepcopy(gem)
        assert other.memory.counts == gem.memory.counts
        assert other.projector.processes == 2


@check(2, 4)
def gem_trains_as_one_process_does():
    """The one object for a loop, on replicas and on shards, whose memories differ in size."""
    for promise, options in PROMISES:
        for spread in (DistributedDataParallel, fully_shard):
            compare_gem(spread, promise, options)


@check(2)
def tiles_of_columns_add_up_like_shards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "_HOST_TILE", 40)
        patch.setattr(ConstraintMatrix, "streamed", True)
        for spread in (DistributedDataParallel, fully_shard):
            compare_gem(spread, EACH, {"on": "both", "tolerance": 0.0})


def compare_gem(spread, promise, options):
    def trained(model, *part, group=None):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        gem = protect(model, optimizer, promise, per_task=100, process_group=group, **options)
        learn(gem, partial(take, model, optimizer), *part)
        return flat(model)

    group = alone()  # always, as in checks_sharded.py
    expected = once((promise, str(options)), lambda: trained(net(), group=group))
    found = trained(spread(net()), share)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    same_everywhere(found)
