"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings

# Packages between a line of the user and a hook of ours.
_BETWEEN = {"gemproj", "torch", "contextlib", "accelerate", "transformers", "trl", "lightning", "avalanche"}


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line that is in none of the packages between; else at the outermost line."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
