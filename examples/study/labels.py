"""Names beside the points of a figure, placed where they cover least."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Text

from ..common.drawing import INK
from ..common.metrics import Interval

Point = tuple[float, Interval]


def label_points(axes: Axes, points: Mapping[str, Point], steps: Sequence[Point] = ()) -> None:
    """Write each name near its point, with a thin line between them.

    Names avoid points, error bars, other names, and the line of steps through `steps`. Call it last: it
    freezes the layout of the figure.
    """
    figure: Any = axes.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    unit, to_pixels = figure.dpi / 72, axes.transData.transform
    fixed = []  # boxes: left, bottom, right, top
    for x, y in points.values():
        at, low, high = to_pixels([(x, y.mean), (x, y.mean - y.bar), (x, y.mean + y.bar)])
        fixed += [[*(at - 5 * unit), *(at + 5 * unit)], [*(low - unit), *(high + unit)]]
    for (x, y), (x_next, y_next) in pairwise(steps):
        start, corner, end = to_pixels([(x, y.mean), (x_next, y.mean), (x_next, y_next.mean)])
        fixed += [[*(start - unit), *(corner + unit)], [*(corner - unit), *(end + unit)]]

    circle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    turns = np.tile(np.stack([np.cos(circle), np.sin(circle)], 1), (5, 1))
    distance = np.repeat([6, 14, 24, 36, 50], len(circle))
    line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
    look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": INK, "arrowprops": line}
    labels = {
        name: axes.annotate(name, (x, y.mean), (0, 0), textcoords="offset points", **look)
        for name, (x, y) in points.items()
    }
    placed: dict[str, Any] = {}  # boxes of a name and of its line
    for name in 2 * list(points):  # in the second pass all other names have a place
        x, y = points[name]
        half = np.array(Text.get_window_extent(labels[name]).size) / 2 + unit
        shift = np.clip(1.5 * turns, -1, 1) * half + turns * unit * distance[:, None]
        at = to_pixels((x, y.mean))
        along = at + shift[:, None] * np.linspace(0.2, 1, 9)[:, None]  # on the lines, shape (tried, 9, 2)
        boxes = np.concatenate([along - unit, along + unit], -1)
        boxes[:, -1] = np.concatenate([at + shift - half, at + shift + half], 1)
        others = np.concatenate([fixed, *(box for other, box in placed.items() if other != name)])
        covers = overlaps(boxes.reshape(-1, 4), others).reshape(len(boxes), -1).sum(1)
        outside = 4 * half.prod() - overlaps(boxes[:, -1], [axes.get_window_extent().extents])[:, 0]
        best = np.argmin(distance + (covers + 10 * outside) / unit**2)
        labels[name].set_position(shift[best] / unit)
        placed[name] = boxes[best]
        if arrow := labels[name].arrow_patch:
            arrow.set_visible(distance[best] > distance[0])


def overlaps(a: Any, b: Any) -> Any:
    """Return the areas of intersection of boxes a (m, 4) and b (n, 4), shape (m, n)."""
    a, b = np.asarray(a)[:, None], np.asarray(b)[None]
    shared = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    return np.clip(shared, 0, None).prod(-1)
