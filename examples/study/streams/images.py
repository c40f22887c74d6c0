"""What the streams of small pictures and signals share: the network of the GEM paper, and its tasks."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ...common.command import SetupError
from .. import digest
from ..stream import Batch, Stream, Task

CLASSES = 10


def batch(x: np.ndarray, labels: np.ndarray) -> Batch:
    """Return rows of features and their labels as tensors."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    return {"x": torch.from_numpy(x), "labels": torch.from_numpy(labels.astype(np.int64))}


def build(tasks: Sequence[Task], hidden: int, source: Sequence[np.ndarray]) -> Stream:
    """Return the stream of these tasks; `source` are the data that they were made of."""
    model = mlp(tasks[0].train["x"].shape[1], hidden)
    return Stream(tasks, model, logits, {"data": digest.of_arrays(*source)})


def mlp(inputs: int, hidden: int) -> nn.Sequential:
    """Return the GEM paper's network: two hidden layers with ReLU, initialised with torch's generator."""
    layers = nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(hidden, CLASSES))


def logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a batch."""
    return model(batch["x"])


def at_least_one(**sizes: int) -> None:
    """Refuse sizes below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise SetupError(f"{name} must be at least 1, got {size}")
