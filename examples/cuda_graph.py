"""A training step with a projection in a CUDA graph, whose replay takes the host one launch.

    python -m examples.cuda_graph

All data that changes is in arrays with fixed addresses: new batches are copied into x, y and memories.
Kernels are compiled for each t, dtype and alignment, so warm up with the call that is to be captured. On a
CPU it runs once.
"""

import torch
from torch import Tensor

from gemproj import project

on_gpu = torch.cuda.is_available()
device = "cuda" if on_gpu else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=on_gpu)
parameters = list(model.parameters())


def draw(n: int) -> tuple[Tensor, Tensor]:
    """Return a batch."""
    return torch.randn(n, 64, device=device), torch.randn(n, 8, device=device)


x, y = draw(32)
memories = [draw(16) for _ in range(3)]


def gradient(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Return the gradient of the loss of a batch, by parameters."""
    return torch.autograd.grad(torch.nn.functional.mse_loss(model(x), y), parameters)


def step() -> None:
    """Take a step that raises the loss of no memory."""
    past = [gradient(*memory) for memory in memories]
    rows = [torch.stack(blocks) for blocks in zip(*past, strict=True)]
    for parameter, new in zip(parameters, project(rows, gradient(x, y)), strict=True):
        parameter.grad = new
    optimizer.step()


step()
if on_gpu:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the first calls compile kernels, and set up cuBLAS and cuSOLVER
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(100):
        x.copy_(torch.randn(32, 64))
        y.copy_(torch.randn(32, 8))
        graph.replay()
