"""What a stream is: tasks to be learned one after the other, and the model that learns them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

Batch = dict[str, Tensor]  # tensors (n, ...), among them integers "labels" of shape (n,)


@dataclass(frozen=True)
class Task:
    """The examples of one task."""

    name: str
    train: Batch
    test: Batch


@dataclass(frozen=True)
class Stream:
    """Tasks in the order in which a seed meets them, with a model that the seed has initialised.

    Attributes
    ----------
    tasks : sequence of Task
        Examples of all tasks have the same shapes: memories mix them.
    model : torch.nn.Module
        Only parameters that require a gradient are learned.
    logits : callable
        ``logits(model, batch)`` of shape (n, classes).
    hashes : mapping of str
        Hashes of what the results depend on: the data, and the backbone if there is one.
    """

    tasks: Sequence[Task]
    model: nn.Module
    logits: Callable[[nn.Module, Batch], Tensor]
    hashes: Mapping[str, str]
