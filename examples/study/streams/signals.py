"""MNIST-1D as a stream: ten classes of generated signals of 40 numbers, as many as wanted."""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ...common.command import cache_folder
from ..stream import Stream, Task
from .images import CLASSES, at_least_one, batch, build

DATA_SEED = 42
TEST_ROWS = 1_000
LENGTH = 40
TRANSLATION = 4  # of 72 places; the package's 48 need more passes than one


def mnist1d(
    seed: int,
    tasks: int = 10,
    rows: int = 4_000,
    hidden: int = 100,
    cache: str | None = None,
) -> Stream:
    """Permute the 40 places of the signals, in another way for each task.

    Parameters
    ----------
    seed : int
        Of the permutations and of the network.
    tasks, rows, hidden : int
        Number of tasks, training rows of each (the same signals, permuted), and width of the network.
    cache : str, optional
        Folder in which generated signals are kept; by default the user's cache.
    """
    at_least_one(tasks=tasks, rows=rows, hidden=hidden)
    x, labels = _signals(rows + TEST_ROWS, Path(cache) if cache else cache_folder())
    draw = np.random.default_rng(seed)
    found = []
    for k in range(tasks):
        places = draw.permutation(LENGTH)
        test, train = slice(TEST_ROWS), slice(TEST_ROWS, TEST_ROWS + rows)
        parts = (batch(x[part][:, places], labels[part]) for part in (train, test))
        found.append(Task(f"permutation {k + 1}", *parts))
    return build(found, hidden, [x, labels])


def _signals(count: int, cache: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return at least that many signals, of zero mean and unit variance; a thousand take a second to make."""
    path = cache / f"mnist1d-{count}-{TRANSLATION}-{DATA_SEED}.npz"
    if not path.is_file():
        x, labels = _generate(count)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="draft-", dir=cache) as parent:
            draft = Path(parent, path.name)
            np.savez(draft, x=x, labels=labels)
            draft.replace(path)  # it appears complete or not at all
    with np.load(path) as kept:
        return kept["x"], kept["labels"]


def _generate(count: int) -> tuple[np.ndarray, np.ndarray]:
    from mnist1d.data import get_dataset_args, make_dataset  # imports pyplot: seconds

    settings = get_dataset_args()
    settings.num_samples = -(-count // CLASSES) * CLASSES
    settings.max_translation, settings.seed = TRANSLATION, DATA_SEED
    with _global_generators_kept():
        made = make_dataset(settings)
    parts = np.concatenate([made["x"], made["x_test"]]), np.concatenate([made["y"], made["y_test"]])
    return parts[0].astype(np.float32)[:count], parts[1][:count]


@contextmanager
def _global_generators_kept() -> Iterator[None]:
    """Restore the generators of Python and NumPy, which the package seeds."""
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
