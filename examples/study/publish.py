"""Tables and figures of a stream, from the runs that are there."""

from __future__ import annotations

from pathlib import Path

from . import compare, figures, plan, report
from .results import Results
from .settings import METHODS, STREAMS

OVER_STREAM = ("plain", "agem", "gem", "gem-bound", "gpm", "replay", "der", "gem-margin", "gem-kl")


def publish(stream: str, results: Results, folder: Path) -> list[Path]:
    """Write them into a folder, and return their paths; none if nothing has been reported."""
    records = plan.published(stream, results)
    if not records:
        return []
    methods = {name: METHODS[name] for name in STREAMS[stream].methods}
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / f"{stream}.md"
    page.write_text(report.page(records, methods, stream, "rows"), encoding="utf-8")
    runs = compare.reported(records, methods, stream, "rows")
    written = [page]
    for name, drawing, needed, more in (
        ("cost", figures.accuracy_and_cost, "plain", (compare.timed(runs, records),)),
        ("stream", figures.accuracy_over_stream, "plain", (OVER_STREAM,)),
        ("differences", figures.paired_differences, "replay", ()),
    ):
        if needed in runs and len(runs) > 1:
            written.append(folder / f"{stream}-{name}.png")
            figures.save(written[-1], drawing, runs, methods, *more)
    return written
