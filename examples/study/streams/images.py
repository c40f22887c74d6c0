"""Streams of small pictures and signals, with the network and the recipes of the GEM paper.

The digits are scikit-learn's, 1,797 pictures of 8 x 8 pixels: permuted, rotated, and split by class. The test
rows are the same for every seed. MNIST-1D generates any number of signals of 40 numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import from_numpy, nn

from ...common.origin import digest
from . import Batch, Stream, Task

CLASSES = 10
SPLIT_SEED, TEST_SHARE = 0, 0.2  # of the digits
MEAN, STD = 4.9, 6.0  # of all pixels, which lie in 0..16
DATA_SEED, TEST_ROWS, LENGTH = 42, 1_000, 40  # of the signals
TRANSLATION = 4  # of 72 places; with the package's default of 48, one pass is not enough

Halves = Sequence[np.ndarray]  # one array of the training rows, one of the test rows
Change = Callable[[int, np.ndarray], np.ndarray]  # of the rows in the k-th task


def permuted(seed: int, tasks: int = 10, rows: int = 1_000, hidden: int = 100) -> Stream:
    """Permute the pixels, in another order for each task; each task draws its own training rows."""
    draw = np.random.default_rng(seed)
    orders = [draw.permutation(64) for _ in range(tasks)]

    def change(k: int, pictures: np.ndarray) -> np.ndarray:
        return _scaled(pictures)[:, orders[k]]

    return _domains("permutation", change, _digits(), tasks, hidden, lambda n: draw.permutation(n)[:rows])


def rotated(seed: int, tasks: int = 10, rows: int = 1_000, hidden: int = 100) -> Stream:
    """Rotate the pictures, by a larger angle for each task; each task draws its own training rows.

    As in the GEM paper's code, each task draws its angle from its own part of [0, 180) degrees. Rotation is
    SciPy's, bilinear, of all pictures in one call; corners from outside the picture are background.
    """
    draw = np.random.default_rng(seed)
    angles = 180.0 / tasks * (np.arange(tasks) + draw.random(tasks))

    def change(k: int, pictures: np.ndarray) -> np.ndarray:
        return _scaled(ndimage.rotate(pictures, angles[k], axes=(1, 2), reshape=False, order=1))

    return _domains("rotation", change, _digits(), tasks, hidden, lambda n: draw.permutation(n)[:rows])


def split(seed: int, tasks: int = 5, rows: int = 1_000, hidden: int = 100) -> Stream:
    """Distribute the ten classes to the tasks, in equal numbers; one head learns all of them."""
    draw = np.random.default_rng(seed)
    pictures, labels = _digits()
    found = []
    for classes in np.sort(draw.permutation(CLASSES).reshape(tasks, -1), axis=1):
        mine = [np.flatnonzero(np.isin(part, classes)) for part in labels]
        mine[0] = draw.permutation(mine[0])[:rows]
        parts = (_batch(_scaled(x[at]), y[at]) for x, y, at in zip(pictures, labels, mine, strict=True))
        found.append(Task("digits " + " ".join(map(str, classes)), *parts))
    return _stream(found, hidden, [*pictures, *labels])


def mnist1d(seed: int, tasks: int = 10, rows: int = 4_000, hidden: int = 100) -> Stream:
    """Permute the 40 positions of the signals, in another order for each task; the signals are the same."""
    draw = np.random.default_rng(seed)
    orders = [draw.permutation(LENGTH) for _ in range(tasks)]
    x, labels = _signals(rows + TEST_ROWS)
    halves = [(part[TEST_ROWS:], part[:TEST_ROWS]) for part in (x, labels)]
    stream = _domains("permutation", lambda k, signals: signals[:, orders[k]], halves, tasks, hidden)
    return replace(stream, hashes={"data": digest(x, labels)})


def _domains(
    title: str,
    change: Change,
    data: Sequence[Halves],
    tasks: int,
    hidden: int,
    choose: Callable[[int], Any] = slice,
) -> Stream:
    """Return tasks of all ten classes, each with its own change of the features and its choice of rows."""
    (x, x_test), (y, y_test) = data
    found = []
    for k in range(tasks):
        mine = choose(len(y))
        test = _batch(change(k, x_test), y_test)
        found.append(Task(f"{title} {k + 1}", _batch(change(k, x[mine]), y[mine]), test))
    return _stream(found, hidden, [x, x_test, y, y_test])


def _stream(tasks: Sequence[Task], hidden: int, source: Sequence[np.ndarray]) -> Stream:
    """Return the stream of these tasks; the network has two hidden layers with ReLU, as in the GEM paper."""
    inputs = tasks[0].train["x"].shape[1]
    layers = nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(hidden, CLASSES))
    return Stream(tasks, model, lambda model, batch: model(batch["x"]), {"data": digest(*source)})


def _batch(x: np.ndarray, labels: np.ndarray) -> Batch:
    x = np.ascontiguousarray(x, dtype=np.float32)
    return {"x": from_numpy(x), "labels": from_numpy(labels.astype(np.int64))}


def _digits() -> tuple[Halves, Halves]:
    """Return the pictures (n, 8, 8) and the labels."""
    data = load_digits()
    parts = train_test_split(
        data.images, data.target, test_size=TEST_SHARE, stratify=data.target, random_state=SPLIT_SEED
    )
    return parts[:2], parts[2:]


def _scaled(pictures: np.ndarray) -> np.ndarray:
    return (pictures.reshape(len(pictures), -1) - MEAN) / STD


@lru_cache(maxsize=1)  # a worker has many runs, and a thousand signals take a second
def _signals(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Generate signals of zero mean and unit variance, and their labels."""
    from mnist1d.data import get_dataset_args, make_dataset  # imports pyplot: seconds

    settings = get_dataset_args()
    settings.num_samples = -(-count // CLASSES) * CLASSES
    settings.max_translation, settings.seed = TRANSLATION, DATA_SEED
    made = make_dataset(settings)
    parts = np.concatenate([made["x"], made["x_test"]]), np.concatenate([made["y"], made["y_test"]])
    return parts[0].astype(np.float32)[:count], parts[1][:count]
