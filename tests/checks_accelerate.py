"""What each process checks of Accelerate and the Trainer: examples and checkpoints of its own."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from frameworks import forget_accelerate
from loops import flat, rows
from models import loss, perceptron, rival, task
from processes import check, gathered
from torch.utils.data import DataLoader

from gemproj.integrations.accelerate import Keeper
from gemproj.torch import Promise


@check(2)
def processes_bring_and_keep_examples_of_their_own():
    rank = dist.get_rank()
    accelerator = Accelerator(cpu=True)
    past = [rival(task(k, 4), 0) for k in range(6)]
    model = perceptron()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    keeper = Keeper(accelerator, model, optimizer, Promise(loss, examples=None))
    keeper.keep(past[rank::2])
    accelerator.backward(loss(model, rival(past[rank])))
    optimizer.step()
    everything = tuple(torch.cat(leaves) for leaves in zip(*past, strict=True))
    torch.testing.assert_close(keeper.rows.G, rows(perceptron(), [everything]), rtol=1e-9, atol=1e-12)
    folders = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folders)
    accelerator.save_state(folders[0])
    accelerator.wait_for_everyone()
    files = sorted(file.name for file in Path(folders[0]).glob("keeper*"))
    assert files == ["keeper_rank0.pt", "keeper_rank1.pt"]
    keeper.forget(0)
    accelerator.load_state(folders[0])
    assert torch.equal(keeper.sets[0].fetch(range(4), None)[0][0], past[rank][0])
    assert not torch.equal(flat(model), flat(perceptron()))
    file = Path(folders[0], f"keeper_rank{rank}.pt")
    torch.save(torch.load(file, weights_only=True) | {"process": (0, 3)}, file)
    with pytest.raises(ValueError, match=r"made by 3 processes, .* this run has 2"):
        accelerator.load_state(folders[0])
    forget_accelerate()


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

    keeper = Keeper(accelerator, model, optimizer, of_number)
    keeper.keep(loader, name="numbers")
    first, second = gathered(list(keeper.sets["numbers"].examples))
    assert sorted([*first, *second]) == list(range(16))
    forget_accelerate()
