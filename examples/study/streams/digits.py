"""Streams of scikit-learn's digits, by the recipe of the GEM paper: permuted, rotated, and split by class.

The digits are 1,797 pictures of 8 x 8 pixels. Which of them are test rows is the same for every seed. The
seed draws the training rows of each task, the permutations, the angles, and the order of the classes.
"""

from collections.abc import Callable

import numpy as np
from scipy import ndimage
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ...common.command import SetupError
from ..stream import Stream, Task
from .images import CLASSES, at_least_one, batch, build

SPLIT_SEED = 0
TEST_SHARE = 0.2
MEAN, STD = 4.9, 6.0  # of all pixels, which lie in 0..16
HALF_TURN = 180.0


def permuted(seed: int, tasks: int = 10, rows: int = 1_000, hidden: int = 100) -> Stream:
    """Permute the pixels, in another order for each task."""
    draw = np.random.default_rng(seed)

    def change(k: int, pictures: np.ndarray) -> np.ndarray:
        return pictures.reshape(len(pictures), -1)[:, orders[k]]

    orders = [draw.permutation(64) for _ in range(tasks)]
    return _domains("permutation", change, draw, tasks, rows, hidden)


def rotated(seed: int, tasks: int = 10, rows: int = 1_000, hidden: int = 100) -> Stream:
    """Rotate the pictures, by a larger angle for each task.

    As in the GEM paper's code, each task draws its angle from its own part of [0, 180) degrees. Rotation is
    SciPy's, bilinear: it takes all pictures in one call, and what turns in from outside is background.
    """
    draw = np.random.default_rng(seed)

    def change(k: int, pictures: np.ndarray) -> np.ndarray:
        return ndimage.rotate(pictures, angles[k], axes=(1, 2), reshape=False, order=1)

    angles = HALF_TURN / max(tasks, 1) * (np.arange(tasks) + draw.random(max(tasks, 0)))
    return _domains("rotation", change, draw, tasks, rows, hidden)


def split(seed: int, tasks: int = 5, rows: int = 1_000, hidden: int = 100) -> Stream:
    """Deal the ten classes out to the tasks, in equal numbers; one head learns all of them."""
    at_least_one(tasks=tasks, rows=rows, hidden=hidden)
    if CLASSES % tasks:
        raise SetupError(f"tasks must divide the {CLASSES} classes, got {tasks}; choose 2, 5 or 10")
    draw = np.random.default_rng(seed)
    pictures, labels = _pictures()
    found = []
    for classes in np.sort(draw.permutation(CLASSES).reshape(tasks, -1), axis=1):
        mine = [np.flatnonzero(np.isin(part, classes)) for part in labels]
        mine[0] = draw.permutation(mine[0])[:rows]
        parts = (batch(_scale(x[at]), y[at]) for x, y, at in zip(pictures, labels, mine, strict=True))
        found.append(Task("digits " + " ".join(map(str, classes)), *parts))
    return build(found, hidden, [*pictures, *labels])


def _domains(
    title: str,
    change: Callable[[int, np.ndarray], np.ndarray],
    draw: np.random.Generator,
    tasks: int,
    rows: int,
    hidden: int,
) -> Stream:
    """Return tasks of all ten classes, of which the k-th changes the pictures by ``change(k, pictures)``."""
    at_least_one(tasks=tasks, rows=rows, hidden=hidden)
    pictures, labels = _pictures()
    found = []
    for k in range(tasks):
        mine = draw.permutation(len(labels[0]))[:rows]
        train = batch(_scale(change(k, pictures[0][mine])), labels[0][mine])
        test = batch(_scale(change(k, pictures[1])), labels[1])
        found.append(Task(f"{title} {k + 1}", train, test))
    return build(found, hidden, [*pictures, *labels])


def _pictures() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the pictures (n, 8, 8) and the labels, each of the training rows and of the test rows."""
    data = load_digits()
    parts = train_test_split(
        data.images, data.target, test_size=TEST_SHARE, stratify=data.target, random_state=SPLIT_SEED
    )
    return parts[:2], parts[2:]


def _scale(pictures: np.ndarray) -> np.ndarray:
    return (pictures.reshape(len(pictures), -1) - MEAN) / STD
