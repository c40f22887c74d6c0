"""What each process checks of Accelerate: memories and checkpoints of its own."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from models import flat, loss, perceptron, rival, rows, task
from processes import check, gathered
from torch.utils.data import DataLoader

from gemproj.integrations.accelerate import GEM
from gemproj.torch import EpisodicMemory


@check(2)
def processes_bring_and_keep_examples_of_their_own():
    rank = dist.get_rank()
    accelerator = Accelerator(cpu=True)
    past = [rival(task(k, 4), 0) for k in range(6)]
    model = perceptron()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    memory = EpisodicMemory(per_task=16)
    for batch in past[rank::2]:
        memory.add(batch, 0)
    gem = GEM(accelerator, model, optimizer, loss, memory=memory)
    accelerator.backward(loss(model, rival(past[rank])))
    optimizer.step()
    everything = tuple(torch.cat(leaves) for leaves in zip(*past, strict=True))
    expected = rows(perceptron(), [everything])
    torch.testing.assert_close(gem.projector.constraints, expected, rtol=1e-9, atol=1e-12)
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    accelerator.save_state(folders[0])
    accelerator.wait_for_everyone()
    assert sorted(file.name for file in Path(folders[0]).glob("gem*")) == ["gem_rank0.pt", "gem_rank1.pt"]
    memory.load_state_dict(EpisodicMemory(per_task=16).state_dict())
    accelerator.load_state(folders[0])
    assert torch.equal(memory.batch(0)[0][:4], past[rank][0])
    assert not torch.equal(flat(model), flat(perceptron()))
    accelerator.wait_for_everyone()
    if rank == 0:
        Path(folders[0], "gem_rank2.pt").touch()
    accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match=r"made by 3 processes, .* this run has 2"):
        accelerator.load_state(folders[0])
    AcceleratorState._reset_state(reset_partial_state=True)


@check(2)
def examples_of_a_prepared_loader_are_kept_once():
    """Its own collate function would leave out what makes the order of all processes the same."""
    accelerator = Accelerator(cpu=True)
    model = perceptron()
    set_seed(0, device_specific=True)
    loader = DataLoader(range(16), 2, shuffle=True, collate_fn=lambda numbers: torch.tensor(numbers))
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)

    def of_number(model, numbers):
        return model(numbers[:, None].double().expand(-1, 6)).sum(1)

    gem = GEM(accelerator, model, optimizer, of_number)
    gem.keep(loader, name="numbers")
    kept = gathered(gem.memory.batch("numbers"))
    assert sorted(torch.cat(kept).tolist()) == list(range(16))
    AcceleratorState._reset_state(reset_partial_state=True)
