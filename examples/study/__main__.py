"""The study: which methods keep what a model knows, and at what price.

Finished runs are kept, one line each: the same command continues where it was stopped. Learning rates and
main settings are chosen on tuning seeds; results are reported on other seeds.
"""

import itertools
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.common import command


def parser(program: str, description: str | None) -> ArgumentParser:
    """Return the parser with the options that all parts of the study have."""
    found = ArgumentParser(program, "%(prog)s [options] [name ...]", description)
    found.add_argument("names", nargs="*", help="streams or settings, by default all")
    found.add_argument("--out", type=Path, default=Path("docs/results/study"), help="folder for results")
    found.add_argument(
        "--jobs", type=command.count, default=command.cores(), help="runs at once, by default one a core"
    )
    found.add_argument("--report", action="store_true", help="run nothing, only write tables and figures")
    return found


@command.finishing
def main(arguments: Sequence[str] | None, console: Console) -> list[Path]:
    """Execute the missing runs, then write tables and figures."""
    asking = parser("python -m examples.study", __doc__)
    asking.add_argument("--methods", default="", help="separated by commas, by default all of the stream")
    asking.add_argument("--time", action="store_true", help="also time steps, one run at a time")
    given = asking.parse_args(arguments)

    # Torch takes seconds to import; --help should not wait.
    from . import plan, publish, settings

    methods = tuple(filter(None, given.methods.split(",")))
    command.check_known("stream", given.names, settings.STREAMS)
    command.check_known("method", methods, settings.METHODS)
    if not given.report:
        plan.complete(given.names, methods, given.out, given.jobs, given.time, console)
    written = {name: publish.publish(name, given.out) for name in given.names or settings.STREAMS}
    if missing := [name for name, paths in written.items() if not paths]:
        told = f"{given.out} has no reported runs of {', '.join(missing)}"
        if len(missing) == len(written):
            raise command.SetupError(told)
        console.print(f"[yellow]missing[/]   {told}")
    tables = publish.overview(given.out)
    for file, text in tables.items():
        (given.out / file).write_text(text, encoding="utf-8")
    return [*itertools.chain(*written.values()), *(given.out / file for file in tables)]


if __name__ == "__main__":
    sys.exit(main())
