"""What each process checks of errors: what is wrong on one process stops all of them, and leaves no constraints."""

import pytest
import torch
import torch.distributed as dist
from checks_rows import past_of_all, sharded
from checks_training import fsdp
from models import BOTH, EACH, begin, loss, projector_of, task
from models import perceptron as net
from processes import alone, check, expect, share
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gemproj.torch import GEM, GradientProjector, Promise
from gemproj.torch.parameters import local


@check(2)
def a_task_that_one_process_cannot_store_stops_every_process():
    odd, (x, y) = dist.get_rank() == 1, task(0, 3)
    for spread, promise, options in (
        (DistributedDataParallel, loss, {}),
        (DistributedDataParallel, EACH, {"tolerance": 0.0}),
        (fully_shard, loss, {}),
        (fully_shard, EACH, {"tolerance": 0.0, "microbatch": 2}),
        (lambda model: model, BOTH, {"process_group": dist.group.WORLD, "tolerance": 0.0}),
    ):
        _, optimizer, gem = begin(promise, model=spread(net()), **options)
        for text, data in (
            ("data holds no example", [] if odd else [(x, y)]),
            ("leading dimension", [(x[odd:], y)]),
            ("is nan, so no promise about it is possible", [(x * float("inf") if odd else x, y)]),
        ):
            with expect(odd, ValueError, text):
                gem.end_task(data, 0)
        if "tolerance" in options:
            one_number = Promise(loss if odd else EACH, tolerance=0.0)
            with expect(odd, ValueError, "tolerance needs one loss for each example"):
                gem.keep([(x, y)], one_number, name=0)
        assert not gem.memory.tasks
        gem.end_task([(x, y)], 0)
        optimizer.step()
        assert gem.last.constraints == 1


@check(2)
def what_a_recall_needs():
    for spread, group in ((DistributedDataParallel, None), (fsdp, None), (lambda one: one, dist.group.WORLD)):
        check_recall(spread(net()), group)


def check_recall(model, group):
    odd, own = dist.get_rank() == 1, list(model.parameters())
    in_shards, full = isinstance(own[0], DTensor), [share(batch) for batch in past_of_all()]
    x, y = full[0]

    def unlucky(given, batch):
        if odd:
            raise ZeroDivisionError("unlucky")
        return loss(given, batch)

    def empty():
        yield full[0]
        if odd:
            raise OSError("no such memory")
        yield full[1]

    def recall(batches, function=loss):
        projector = GradientProjector(own, process_group=group)
        projector.recall(model, full, loss)
        try:
            projector.recall(model, batches, function)
        finally:
            assert len(projector.constraints) == 0

    with pytest.raises(ValueError, match="disagree on the number of rows"):
        recall(full[odd:])
    with expect(odd, OSError, "no such memory"):
        recall(empty())
    with expect(odd, ValueError, "leading dimension"):
        recall([(x[odd:], y)])
    with pytest.raises(ValueError, match="must have examples of every past task"):
        recall([(x[:0], y[:0]) if odd or not in_shards else (x, y)])
    others = {"parameters": own[odd:]}
    if not in_shards:
        others["entries of all parameters"] = own[1:] if odd else own[:-1]
        with expect(odd, ZeroDivisionError, "unlucky"):
            recall(full, unlucky)
    for what, parameters in others.items():
        with pytest.raises(ValueError, match=f"disagree on the number of {what}"):
            GradientProjector(parameters, process_group=group).recall(model, full, loss)
    if not (in_shards or group):  # of which `constrain` learns nothing
        return
    projector = GradientProjector(own, process_group=group)

    def losses():
        return [loss(model, one) for one in full]

    with pytest.raises(ValueError, match="disagree on the number of losses"):
        projector.constrain(losses()[odd:])
    with expect(odd, ValueError, "losses must be scalars"):
        projector.constrain([one.detach() if odd else one for one in losses()])
    assert len(projector.constraints) == 0
    with pytest.raises(ValueError, match="disagree on the number of parameters"):
        GradientProjector(own[odd:], process_group=group).constrain(losses())
    if in_shards:
        with pytest.raises(TypeError, match="must be a list"):
            projector.constrain(iter(losses()))


@check(2)
def processes_of_which_nothing_is_known():
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
def options_that_differ():
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
def rows_of_other_sets_and_labels():
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
def what_shards_need():
    model, early = net(), GradientProjector(net().parameters())
    past = [share(batch) for batch in past_of_all()]
    with pytest.raises(ValueError, match="after fully_shard"):
        early.recall(fsdp(model), past, loss)
    model, projector, past, _ = sharded()
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="set_requires_gradient_sync"):
        projector.recall(model, past, loss)
    assert len(projector.constraints) == 0
    group, device = dist.group.WORLD, torch.device("cpu")
    adapted = fsdp(net().requires_grad_(False))
    adapted.append(nn.Linear(3, 3).double())
    own, text = list(adapted[-1].parameters()), "not sharded, such as adapters, and sharded frozen"
    with pytest.raises(ValueError, match=text):
        GEM(adapted, torch.optim.SGD(own, lr=0.1), loss, process_group=group)
    with pytest.raises(ValueError, match=text):
        GradientProjector(own, process_group=group).recall(adapted, past, loss)
    flattened = FullyShardedDataParallel(net(), device_id=device, use_orig_params=True)
    with pytest.raises(ValueError, match="FSDP1"):
        GEM(flattened, torch.optim.SGD(flattened.parameters(), lr=0.1), loss, process_group=group)


@check(2)
def what_is_not_finite_on_one_process():
    odd = dist.get_rank() == 1
    model, projector, past, now = sharded()
    projector.recall(model, past, loss)
    loss(model, now).backward()
    if odd:
        projector.constraints[1, 0] = float("nan")
    with pytest.raises(ValueError, match="G is not finite: row 1"):
        projector.project_()
    projector.recall(model, past, loss)
    gradient = local(model[0].weight.grad)
    gradient[0, 0] = float("inf") if odd else 0.0
    with pytest.raises(ValueError, match="g is not finite"):
        projector.project_()
    # Adam's metric is zero where second moment, constraints and eps are: here, on a part of one process.
    gradient[0, 0] = 0.1
    if odd:
        gradient[0] = 0.0
    for options in ({}, {"rows_dtype": torch.float32}):
        projector = projector_of(model.parameters(), on="step", **options)
        projector.recall(model, past, loss)
        if odd:
            projector.constraints.zero_()
        optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
        attached = projector.attach(optimizer)
        with pytest.raises(ValueError, match="metric must be positive" if odd else "is not finite"):
            optimizer.step()
        attached.remove()
