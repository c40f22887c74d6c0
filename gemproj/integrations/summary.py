"""What a log says about the steps since the last one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gemproj.torch import Projection


def summary(steps: Iterable[Projection]) -> dict[str, float]:
    """Return means over steps, and the smallest cosine that any of them had with a constraint.

    One transfer from a device, however many steps there are.

    Parameters
    ----------
    steps : iterable of Projection
        Of an attached projector. Those without constraints do not count.

    Returns
    -------
    dict
        ``gem/violations``, ``gem/active``, ``gem/cosine``, ``gem/worst_cosine`` and ``gem/seconds``; empty if
        no step counts.
    """
    rows, seconds = [], 0.0
    for step in steps:
        if step.solution is None or step.slopes is None:
            continue
        sol, wide = step.solution, step.slopes.dtype
        numbers = [sol.violated.sum(), sol.active.sum(), sol.cosine(), step.slopes.min()]
        rows.append(torch.stack([number.to(wide) for number in numbers]))
        seconds += step.seconds
    if not rows:
        return {}
    table = torch.stack(rows)
    means, least = torch.stack([table.mean(0), table.min(0).values]).tolist()
    return {
        "gem/violations": means[0],
        "gem/active": means[1],
        "gem/cosine": means[2],
        "gem/worst_cosine": least[3],
        "gem/seconds": seconds / len(rows),
    }
