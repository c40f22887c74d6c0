"""What each process checks of errors: what is wrong on one process stops all of them, and leaves no rows."""

import logging
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checks_training import fsdp
from loops import begin, flat, protect
from models import BOTH, EACH, loss, task
from models import perceptron as net
from processes import alone, check, expect, share
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from gemproj.torch import Keeper, Promise
from gemproj.torch.vector import local

SPREADS = {
    "replicas": (DistributedDataParallel, {}),
    "group": (lambda model: model, {"process_group": dist.group.WORLD}),
    "shards": (fsdp, {}),
}


def start(promise, spread, **options):
    """Return a model that is spread over processes, its optimizer, and a keeper."""
    wrap, given = SPREADS[spread]
    given = dict.fromkeys(given, dist.group.WORLD)  # that of this check
    return begin(promise, model=wrap(net()), **options, **given)


@check(2)
def a_set_that_one_process_cannot_keep_stops_every_process():
    odd, (x, y) = dist.get_rank() == 1, task(0, 3)
    for spread, promise, options in (
        ("replicas", loss, {}),
        ("replicas", EACH, {"tolerance": 0.0}),
        ("shards", loss, {}),
        ("shards", EACH, {"tolerance": 0.0, "microbatch": 2}),
        ("group", BOTH, {"tolerance": 0.0}),
    ):
        _, optimizer, keeper = start(promise, spread, **options)
        for text, data in (
            ("data holds no example", [] if odd else [(x, y)]),
            ("first dimension", [(x[odd:], y)]),
            ("is nan, so no promise about it is possible", [(x * float("nan") if odd else x, y)]),
        ):
            with expect(odd, ValueError, text):
                keeper.keep(data, name=0)
        if "tolerance" in options:
            one_number = Promise(loss if odd else EACH, tolerance=0.0)
            with expect(odd, ValueError, "tolerance needs one loss for each example"):
                keeper.keep([(x, y)], one_number, name=0)
        with expect(odd, TypeError, "name must be hashable"):
            keeper.keep([(x, y)], name=[] if odd else 0)
        with expect(odd, ValueError, "leaves none to keep"):
            keeper.keep([(x[:1], y[:1]) if odd else (x, y)], EACH, hold_out=0.34)
        assert not keeper.sets
        keeper.keep([(x, y)], name=0)
        optimizer.step()
        assert len(keeper.rows) == 1
        keeper.keep([(x[: 1 + odd], y[: 1 + odd])], Promise(loss), name=1)  # one example has one number
        assert keeper.sets[1].batches


@check(2)
def a_call_that_one_process_alone_makes_says_that_it_waits():
    first, pair, said = dist.get_rank() == 0, dist.new_group(), []

    class Told(logging.Handler):
        """Let the other process make the call, too."""

        def emit(self, record):
            said.append(record.getMessage())
            dist.send(torch.ones(1), 1, group=pair)

    told, (x, y) = Told(), task(0, 3)
    logging.getLogger("gemproj").addHandler(told)
    try:
        with patch("gemproj.torch.processes.PATIENCE", 0.01 if first else 30.0):
            _, _, keeper = start(EACH, "replicas", tolerance=0.0)
            for call in (partial(keeper.keep, [(x, y)]), keeper.report):
                if not first:
                    dist.recv(torch.ones(1), 0, group=pair)
                call()
                dist.barrier()
    finally:
        logging.getLogger("gemproj").removeHandler(told)
    if first:
        assert [text.split()[0] for text in said] == ["keep()", "report()"]
        assert "all of them must call it" in said[0]


@check(2)
def what_rows_need():
    odd = dist.get_rank() == 1
    for spread in SPREADS:
        faults = []

        def unlucky(model, batch, faults=faults):
            if faults:
                raise ZeroDivisionError("unlucky")
            return loss(model, batch)

        _, optimizer, keeper = start(unlucky, spread)
        for k in range(2):
            keeper.keep([share(task(k, 6))])
        optimizer.step()
        assert len(keeper.rows) == 2
        if spread != "shards":  # whose passes all processes must join
            faults += [1] * odd
            with expect(odd, ZeroDivisionError, "unlucky"):
                optimizer.step()
            assert len(keeper.rows) == 0
            faults.clear()
        if odd:  # as many rows of other sets would be added up
            keeper.sets = dict(reversed(keeper.sets.items()))
        with pytest.raises(ValueError, match="disagree on the names of sets"):
            optimizer.step()


@check(2)
def processes_of_which_nothing_is_known():
    model = net()
    with pytest.raises(ValueError, match=r"2 processes are initialised.*DistributedDataParallel"):
        begin(model=model)
    with patch.object(dist, "is_initialized", lambda: False):  # the group comes after the keeper
        _, optimizer, keeper = begin(model=model)
    for late in (lambda: keeper.keep([task(0, 3)]), optimizer.step):
        with pytest.raises(ValueError, match="2 processes are initialised"):
            late()
    keeper.remove()
    _, optimizer, keeper = begin(model=model, process_group=alone())
    for _ in range(dist.get_rank()):  # which nothing waits for
        keeper.keep([task(0, 3)])
    optimizer.step()
    assert len(keeper.rows) == dist.get_rank()


@check(2)
def options_that_differ():
    odd = dist.get_rank() == 1
    for name, one, other in (
        ("weight", 0.1, 0.9),
        ("examples", 2, None),
        ("method", "exact", "agem"),
        ("method", lambda K, b, start: b, "exact"),
        ("tolerance", 0.1, 0.2),
        ("tolerance", 0.1, None),
        ("look", 1, 2),
        ("project", True, False),
        ("on", "gradient", "step"),
        ("microbatch", None, 2),
    ):
        _, optimizer, keeper = start(EACH, "replicas", **{name: one if odd else other})

        def keep_and_step(keeper=keeper, optimizer=optimizer):
            keeper.keep([task(0, 3)])
            optimizer.step()

        with pytest.raises(ValueError, match=rf"disagree on the (option {name}|promises).*same options"):
            keep_and_step()
    _, optimizer, keeper = start(EACH, "replicas", look=4)
    with pytest.raises(ValueError, match="disagree on the share to hold out"):
        keeper.keep([task(0, 9)], hold_out=0.5 if odd else 0.0)
    for name in "ab":
        keeper.keep([task(0, 9)], name=name)
    with pytest.raises(ValueError, match="disagree on the name of the set"):
        keeper.keep([task(0, 9)], name="ab"[odd])
    with pytest.raises(ValueError, match="disagree on the name of the set"):
        keeper.forget("ab"[odd])
    with expect(odd, KeyError, "no set is named 'c'"):
        keeper.forget("ac"[odd])
    assert list(keeper.sets) == ["a", "b"]


@check(2)
def processes_that_stop_earlier_than_others():
    model, optimizer, keeper = start(loss, "replicas")
    keeper.keep([task(0, 3)])
    with model.join(), pytest.raises(ValueError, match=r"DistributedDataParallel.join\(\)"):
        optimizer.step()


@check(2)
def what_shards_need():
    model, optimizer, keeper = start(loss, "shards")
    keeper.keep([share(task(0, 6))])
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="set_requires_gradient_sync"):
        optimizer.step()
    assert len(keeper.rows) == 0
    model = fsdp(net())
    model[0].set_gradient_divide_factor(1.0)
    with pytest.raises(ValueError, match="gradient divide factor"):
        protect(model, torch.optim.SGD(model.parameters(), lr=0.1))
    group, device = dist.group.WORLD, torch.device("cpu")
    adapted = fsdp(net().requires_grad_(False))
    adapted.append(nn.Linear(3, 3).double())
    own, text = list(adapted[-1].parameters()), "not sharded, such as adapters, and sharded frozen"
    with pytest.raises(ValueError, match=text):
        Keeper(adapted, torch.optim.SGD(own, lr=0.1), loss, process_group=group)
    flattened = FullyShardedDataParallel(net(), device_id=device, use_orig_params=True)
    with pytest.raises(ValueError, match="FSDP1"):
        Keeper(flattened, torch.optim.SGD(flattened.parameters(), lr=0.1), loss, process_group=group)


@check(2)
def what_is_not_finite_on_one_process():
    """Weights and states stay as they were on every process."""
    odd = dist.get_rank() == 1
    for on in ("gradient", "both", "step"):
        make = torch.optim.Adam if on != "gradient" else torch.optim.SGD
        model, optimizer, keeper = start(loss, "shards", on=on, make=make)
        keeper.keep([share(task(0, 6))])
        loss(model, share(task(5, 6))).backward()
        before, gradient = flat(model), local(model[0].weight.grad)
        gradient[0, 0] = float("inf") if odd else 0.0
        text = "gradient of 0.weight is not finite" if odd else "is not finite"
        with pytest.raises(ValueError, match=text):
            optimizer.step()
        assert torch.equal(flat(model), before)
        assert not any(optimizer.state.values())
    # Adam's own step is not a number where gradient and eps are zero: here, on a part of one process.
    model, optimizer, keeper = start(loss, "shards", on="step", make=lambda p: torch.optim.Adam(p, eps=0.0))
    keeper.keep([share(task(0, 6))])
    loss(model, share(task(5, 6))).backward()
    keeper._training.look(keeper._steps[0])
    keeper.look = 2  # these rows stay for one more step
    if odd:
        local(model[0].weight.grad)[0] = 0.0
        keeper.rows.G.zero_()
    with pytest.raises(ValueError, match="not finite in 0.weight" if odd else "is not finite"):
        optimizer.step()
