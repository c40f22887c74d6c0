"""What each process checks of DistributedDataParallel in the loops of frameworks."""

import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from frameworks import Lightning, Plain, Transformers, batches
from models import flat
from processes import alone, check, same_everywhere, share
from test_examples import gained

from examples import fsdp2
from gemproj.torch import Promise

LIGHTNING = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
ALL = Promise(examples=None)


def part(data):
    return [dict(zip("xy", share((batch["x"], batch["y"])), strict=True)) for batch in data]


@check(2)
def replicas_learn_what_one_process_learns():
    for kind, how in ((Lightning, LIGHTNING), (Transformers, {"ddp_backend": "gloo"})):
        for promise, options in ((Promise(examples=None, weight=0.05), {"on": "both"}), (ALL, {})):
            with tempfile.TemporaryDirectory() as name:
                plain = Plain(Path(name), promise, process_group=alone(), like=kind, **options)
                driver = kind(Path(name), promise, **options)
                for k in range(3):
                    plain.train(batches(k))
                    driver.train(part(batches(k)), **how)
                    plain.keep(batches(k))
                    driver.keep(part(batches(k)))
            same_everywhere(flat(driver.model))
            torch.testing.assert_close(flat(driver.model), flat(plain.model), rtol=1e-6, atol=1e-8)
            assert driver.norms in ([], pytest.approx(plain.norms))
            assert plain.active > 2
    AcceleratorState._reset_state(reset_partial_state=True)


@check(2)
def a_keeper_keeps_past_tasks_in_shards():
    assert gained(fsdp2.compare(partial(fsdp2.learn, steps=15), show=False)) > 0.05
