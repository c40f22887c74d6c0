"""
Two processes
=============

Each process holds half of the columns of every gradient, as with sharded parameters. A projection exchanges
``t * t + t + 1`` numbers, whatever the model's size: all processes solve the same small problem and combine
their own columns.
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from gemproj import combine, gram, project, solve_gram


def work(rank, folder):
    """What each process runs: it sees its own columns only."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    G, g = torch.load(f"{folder}/shard{rank}.pt")
    measured = gram(G, g)  # K, b and |g|^2: all of them are sums over columns
    for part in measured:
        dist.all_reduce(part)
    torch.save(combine(G, g, solve_gram(*measured)), f"{folder}/x{rank}.pt")
    dist.destroy_process_group()


torch.manual_seed(0)
G, g = torch.randn(5, 10_000, dtype=torch.float64), torch.randn(10_000, dtype=torch.float64)
with tempfile.TemporaryDirectory() as folder:
    for rank, columns in enumerate((slice(0, 6_000), slice(6_000, None))):  # shards may be uneven
        torch.save((G[:, columns].clone(), g[columns].clone()), f"{folder}/shard{rank}.pt")
    # From a script of your own: torchrun.
    processes.start_processes(work, (folder,), nprocs=2, start_method="fork")
    x = torch.cat([torch.load(Path(folder) / f"x{rank}.pt") for rank in (0, 1)])
print("largest difference from one process:", float((x - project(G, g)).abs().max()))

# %%
# What is exchanged, against gathering the rows of GPT-2 medium's adapters (2.2 million parameters, float32).
t = np.arange(1, 65)
figure, axes = plt.subplots()
axes.semilogy(t, 4 * t * 2_166_784 / 1e6, color="C1", label="gathering the rows")
axes.semilogy(t, 8 * (t * t + t + 1) / 1e6, color="C0", label="gemproj")
axes.set(xlabel="old tasks", ylabel="exchanged (MB)")
axes.legend()
figure.set_label("Megabytes exchanged over the number of old tasks: four to five orders of magnitude fewer")
plt.show()
