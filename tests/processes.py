"""Checks that run on several processes: one start of four for all of them, a process group for each check."""

import gc
import importlib.util
import os
import re
import sys
import time
import traceback
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import rival, task

from gemproj import project

# Where the checks for so many processes are; they register themselves when these are imported.
MODULES = {4: ["checks_training"]}
MODULES[2] = [*MODULES[4], "checks_rows", "checks_errors"]
NEEDED = {"checks_accelerate": ["accelerate"]}
NEEDED["checks_frameworks"] = ["lightning", "transformers", "mnist1d"]
NEEDED["checks_zero"] = ["deepspeed", "accelerate", "transformers"]
MODULES[2] += [module for module, needed in NEEDED.items() if all(map(importlib.util.find_spec, needed))]
CHECK = re.compile(r"(?m)^@check\((.*)\)\ndef (\w+)")
# What is imported when it is first used, in each process, unless it is there.
LATER = ["torch._dynamo", "accelerate", "transformers.trainer", "lightning.pytorch"]
LATER += ["deepspeed.runtime.zero.muon.muon_optimizer"]
# A collective that others never join fails after so long, and all checks together end after LIMIT seconds.
PATIENCE, LIMIT = timedelta(seconds=60), 300.0

CHECKS = {}


def check(*worlds):
    """Register a function that so many processes run together."""

    def register(function):
        for world in worlds:
            kind = function.__module__.removeprefix("checks_")
            CHECKS[f"{kind}: {function.__name__}-{world}"] = function
        return function

    return register


def names(world):
    """Return the names of the checks for so many processes; nothing is imported, which takes seconds."""
    texts = {module: Path(__file__).with_name(f"{module}.py").read_text() for module in MODULES[world]}
    found = [(module, *one) for module, text in texts.items() for one in CHECK.findall(text)]
    kinds = ((module.removeprefix("checks_"), *one) for module, *one in found)
    return [f"{kind}: {name}-{world}" for kind, worlds, name in kinds if str(world) in worlds]


def register_all():
    """Import all checks."""
    for module in MODULES[2]:
        importlib.import_module(module)


def run_all(folder):
    """Run all checks; return for each of them what went wrong, by process."""
    mp.spawn(_start, (str(folder),))
    died = Path(folder, "died")
    found = {}
    for world in MODULES:
        for name in names(world):
            reports = [Path(folder, f"{name}.{rank}") for rank in range(world)]
            end = f"did not end {died.read_text()}"
            found[name] = [report.read_text() if report.exists() else end for report in reports]
    return found


def _start(_, folder):
    """Import and compile once what all processes need, where they can be forked, and wait for their end."""
    torch.set_num_threads(1)
    register_all()
    for name in LATER:
        with suppress(ImportError):
            importlib.import_module(name)
    project(torch.eye(2, dtype=torch.float64), -torch.ones(2, dtype=torch.float64))
    gc.collect()
    gc.freeze()
    how = "fork" if sys.platform == "linux" else "spawn"
    barriers = {world: mp.get_context(how).Barrier(world) for world in MODULES}
    context = mp.start_processes(_process, (folder, barriers), max(MODULES), join=False, start_method=how)
    end, died = time.monotonic() + LIMIT, ""
    try:
        while not context.join(timeout=1.0) and time.monotonic() < end:
            pass
    except Exception as error:
        died = str(error)
    for process in context.processes:
        process.kill()
    Path(folder, "died").write_text(died)


def _process(rank, folder, barriers):
    torch.set_num_threads(1)
    register_all()
    # Where the Trainer and the Accelerator of another test leave their options, for all that are made later.
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    todo = [(name, world) for world in MODULES if rank < world for name in names(world)]
    barriers[max(MODULES)].wait()  # on a busy machine one has imported all that long before another
    for name, world in todo:
        start = time.monotonic()
        # As launchers do, for Accelerate and DeepSpeed.
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": 1}
        os.environ |= {"MASTER_ADDR": "localhost"} | {key: str(n) for key, n in environment.items()}
        store = f"file://{folder}/{name}.store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=PATIENCE)
        report = ""
        try:
            torch.manual_seed(0)
            CHECKS[name]()
        except BaseException:  # as pytest.raises fails with
            report = traceback.format_exc()
        Path(folder, f"{name}.{rank}").write_text(report)
        barriers[world].wait()  # whoever is done first would take the connections of the others away
        dist.destroy_process_group()
        if not rank:
            print(f"{name}: {time.monotonic() - start:.1f} s", flush=True)  # shown where a test fails


def share(batch, sizes=None):
    """Return this process's part of a batch, of which processes have so many examples each, or all the same."""
    world = dist.get_world_size()
    sizes = sizes or [len(batch[0]) // world] * world
    return tuple(leaf.split(sizes)[dist.get_rank()] for leaf in batch)


def everything(batch, sizes=None):
    """Return all of a batch, where processes share no data."""
    return batch


def alone():
    """Return the group of this process alone, for a model that no other one trains."""
    return dist.new_subgroups(1)[0]


FOUND = {}


def once(key, function):
    """Return what a function has found when it was first called in this process: one alone finds the same again."""
    if key not in FOUND:
        FOUND[key] = function()
    return FOUND[key]


def gathered(thing):
    """Return what each process has for this."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, thing)
    return everyone


def learn(keeper, take_step, part=everything, dtype=torch.float64):
    """Learn three tasks that contradict each other, of which processes keep unequal parts."""
    active, others = 0, [2] * (dist.get_world_size() - 1)
    for k in range(3):
        for step in range(3):
            take_step(part(rival(task(10 * k + step, 8, dtype))))
            assert len(keeper.rows) == k
            active += 0 if keeper.last is None else keeper.last.num_active
        keeper.keep([part(task(k, 8, dtype), [8 - sum(others), *others])])
    assert active


def same_everywhere(tensor):
    """Check that a tensor has the same bits on all processes."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    assert all(torch.equal(everyone[0], one) for one in everyone), everyone


def expect(odd, error, text):
    """Return the context of an error on one process, which is `odd`, of which others hear only that it is there."""
    if odd:
        return pytest.raises(error, match=text)
    return pytest.raises(RuntimeError, match="Another process failed")


@contextmanager
def all_reduces():
    """Yield a list to which every all-reduce adds its dtype and how many numbers it sums."""
    seen, plain = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        seen.append((tensor.dtype, tensor.numel()))
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        yield seen
    finally:
        dist.all_reduce = plain
