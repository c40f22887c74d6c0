"""Compile every kernel for a GPU that need not be here: ``python tests/compile_kernels.py 90``.

The interpreter runs what the compiler may refuse. The host code runs as it is; only launches stop after
the compilation. Prints one line per kernel: name and bytes of shared memory.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from gemproj import FISTA, PGD, Exact
from gemproj.backends.triton.combine import combine, combine_batch
from gemproj.backends.triton.gram import gram, gram_batch
from gemproj.backends.triton.solve import solve


class Driver:
    """A device that is only ever compiled for."""

    def get_current_target(self):
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    print(self.fn.__name__, kernel.metadata.shared)


driver.set_active(Driver())
launch, JITFunction.run = JITFunction.run, compile_only

for t in (2, 9):
    gram([torch.ones(t, 9000)], [torch.ones(9000)])
mixed = [torch.ones(3, 9000, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)]
vector = [a[0].float() for a in mixed]
gram(mixed, vector)
gram_batch(torch.ones(9, 2, 64), torch.ones(9, 64))
lam = torch.ones(9, 3, dtype=torch.float64)
combine(mixed, vector, lam[0], [a[0].clone() for a in mixed])
combine_batch(torch.ones(9, 3, 64), torch.ones(9, 64), lam, torch.ones(9, 64))
for t, method in ((2, PGD()), (2, FISTA()), (4, Exact()), (9, Exact())):
    K, b = torch.eye(t, dtype=torch.float64), torch.ones(t, dtype=torch.float64)
    solve(K, b, method=method, lower=-b, upper=1.0, start=b)
