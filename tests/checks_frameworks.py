"""What each process checks of DistributedDataParallel in the loops of frameworks."""

import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from frameworks import Lightning, Plain, Transformers, batches, forget_accelerate
from loops import flat
from models import language_model, tokenizer
from processes import alone, check, gathered, same_everywhere, share
from test_examples import gained
from torch.distributed.fsdp import fully_shard

from examples import fsdp2
from gemproj.torch import Promise, write_references

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
            driver.keeper.keep(batches(9, 11), name="alike")  # which is divided
            first, second = gathered(torch.stack([one["x"] for one in driver.keeper.sets["alike"].examples]))
            assert (len(first), len(second)) == ((24, 20) if kind is Transformers else (44, 44))
            torch.testing.assert_close(flat(driver.model), flat(plain.model), rtol=1e-6, atol=1e-8)
            assert driver.norms in ([], pytest.approx(plain.norms))
            assert plain.active > 2
    forget_accelerate()


@check(2)
def a_keeper_keeps_past_tasks_in_shards():
    assert gained(fsdp2.compare(partial(fsdp2.learn, steps=15), show=False)) > 0.05


@check(2)
def shards_write_texts_of_their_own():
    """Passes are those of all processes, of which one needs more texts, and longer ones."""
    words = tokenizer([f"w{k}" for k in range(18)])

    def model():
        made = language_model(max_position_embeddings=64)
        made.generation_config.eos_token_id = 1
        return made

    def write(model, **options):
        return write_references(model, words, 4, tokens=24, batch=2, progress=False, **options)

    expected, many = write(model(), seed=dist.get_rank()), model()
    for layer in many.model.layers:
        fully_shard(layer)
    fully_shard(many)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            assert write(many, seed=dist.get_rank(), cache=folder) == expected
        (file,) = Path(folder).iterdir()
        if dist.get_rank():
            file.unlink()  # both write again
        assert write(many, seed=dist.get_rank(), cache=folder) == expected
    hidden = model()
    next(hidden.parameters()).ds_id = 0  # as ZeRO-3 does, whose weights are not here
    with tempfile.TemporaryDirectory() as folder:
        write(hidden, cache=folder)
        assert not list(Path(folder).iterdir())
