"""What each process checks of Lightning's DistributedDataParallel."""

import tempfile
from pathlib import Path

import torch
from frameworks import Lightning, Plain, batches
from models import flat
from processes import alone, check, same_everywhere, share

from gemproj.torch import Promise


@check(2)
def lightning_trains_replicas_as_one_process():
    def part(data):
        return [dict(zip("xy", share((batch["x"], batch["y"])), strict=True)) for batch in data]

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for promise, options in ((Promise(examples=None, weight=0.05), {"on": "both"}), (Promise(examples=None), {})):
            plain = Plain(folder, promise, process_group=alone(), like=Lightning, **options)
            driver = Lightning(folder, promise, **options)
            for k in range(3):
                plain.train(batches(k))
                driver.train(part(batches(k)), strategy="ddp", devices=2, use_distributed_sampler=False)
                plain.keep(batches(k))
                driver.keep(part(batches(k)))
            same_everywhere(flat(driver.model))
            torch.testing.assert_close(flat(driver.model), flat(plain.model), rtol=1e-6, atol=1e-8)
            assert plain.active > 2
