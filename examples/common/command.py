"""Shared by the command lines of the experiments."""

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from pathlib import Path

from rich.console import Console
from rich.markup import escape


class SetupError(ValueError):
    """The experiment cannot start with these settings; the message says what to change."""


def check_known(kind: str, asked: Iterable[str], known: Collection[str]) -> None:
    """Raise `SetupError` for unknown names."""
    if unknown := sorted(set(asked) - set(known)):
        raise SetupError(f"unknown {kind} {unknown}; choose from {', '.join(known)}")


def count(text: str) -> int:
    """Parse an argument as an integer of at least 1."""
    if int(text) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def cache_folder() -> Path:
    """Return gemproj's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gemproj")


def finishing(main: Callable[[Sequence[str] | None, Console], Iterable[Path]]) -> Callable[..., int]:
    """Make a command print what it has written, and return its status: 0, 2 for an error, 130 for Ctrl-C."""

    @wraps(main)
    def finished(arguments: Sequence[str] | None = None) -> int:
        console = Console(highlight=False)
        try:
            for path in main(arguments, console):
                console.print(f"[bold]written[/]   {path}")
        except (SetupError, OSError) as error:  # for example a folder that cannot be written to
            console.print(f"[red]error[/]     {escape(str(error))}")
            return 2
        except KeyboardInterrupt:
            console.print("[yellow]stopped[/]   finished runs are kept; the same command goes on from here")
            return 130
        return 0

    return finished


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
