"""Errors for unknown keywords, with a suggestion."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")

# Names in GEM's code and paper, in Avalanche and in `gemproj.project`, and what to pass instead.
_ELSEWHERE = {
    "margin": "weight",
    "memory_strength": "weight",
    "patterns_per_experience": "per_task",
    "promise": "a Promise as loss",
    "label": "memory=EpisodicMemory(label=...)",
    "equality": "a Promise with equal",
    **{name: f"a Promise with {name}" for name in ("repair", "equal", "penalty")},
}


def suggesting(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor suggest the closest keyword; its signature is unchanged."""
    known = list(inspect.signature(init).parameters)

    @wraps(init)
    def told(*args: P.args, **named: P.kwargs) -> None:
        for name in named:
            if name not in known:
                close: Any = get_close_matches(name, known, 1)
                meant = _ELSEWHERE.get(name, close[0] if close else None)
                hint = "." if meant is None else f"; did you mean {meant}?"
                raise TypeError(f"{type(args[0]).__name__} has no keyword {name!r}{hint}")
        init(*args, **named)

    return told
