"""What the command lines of the experiments share."""

import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import wraps
from pathlib import Path

from rich.console import Console
from rich.markup import escape


class SetupError(ValueError):
    """The experiment cannot start as it was asked for; the message says what to change."""


def check_known(kind: str, asked: Iterable[str], known: Collection[str]) -> None:
    """Raise for names that there are not."""
    if unknown := sorted(set(asked) - set(known)):
        raise SetupError(f"unknown {kind} {unknown}; choose from {', '.join(known)}")


def count(text: str) -> int:
    """Return an argument that is a number from 1 on."""
    if int(text) < 1:
        raise ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def cache_folder() -> Path:
    """Return the folder for what is made once and kept, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gemproj")


def finishing(main: Callable[[Sequence[str] | None, Console], None]) -> Callable[..., int]:
    """Let a command return its exit status: 0, 2 if it could not start, or 130 if it was stopped."""

    @wraps(main)
    def finished(arguments: Sequence[str] | None = None) -> int:
        console = Console(highlight=False)
        try:
            main(arguments, console)
        except SetupError as error:
            console.print(f"[red]error[/]     {escape(str(error))}")
            return 2
        except KeyboardInterrupt:
            console.print("[yellow]stopped[/]   finished runs are kept; the same command goes on from here")
            return 130
        return 0

    return finished


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
