"""Tables and figures of a stream, from the runs that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..common.drawing import save
from . import across, compare, figures, plan, report
from .compare import Record
from .results import Results, results_of
from .settings import BASIC, BUDGETS, CHEAPER, LADDERS, MEMORIES, METHODS, SAME, STREAMS, Method

OVER_STREAM = ("plain", "agem", "gem", "gem-tolerance", "gpm", "replay", "der", "gem-weight", "gem-kl")
COSTS = ("replay", "replay-4", "replay-all", "agem", "igem3", "gem", "gem-weight", *LADDERS[1][1:])
EXACT, SHORTCUTS = "gem", ("agem", "igem1", "igem3", "igem10")  # does exactness matter?


def publish(stream: str, results: Results, folder: Path) -> list[Path]:
    """Write them into a folder, and return their paths; none if nothing has been reported."""
    records = plan.published(stream, results)
    if not records:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / f"{stream}.md"]
    written[0].write_text(page(stream, records), encoding="utf-8")
    runs = compare.reported(records, METHODS)
    times = compare.timed(runs, records)
    main = {name: runs[name] for name in named(stream) if name in runs}
    with_same = {name: runs[name] for name in runs if name in main or name in SAME}
    ladders = [[name for name in ladder if name in times] for ladder in LADDERS]
    kept = [one | {"method": METHODS[one["method"]].like or one["method"]} for one in stored(runs)]
    for name, drawing, needed, what in (
        ("cost", figures.accuracy_and_cost, "plain", (main, METHODS, times)),
        ("stream", figures.accuracy_over_stream, "plain", (main, METHODS, OVER_STREAM)),
        ("differences", figures.paired_differences, "replay", (with_same, METHODS)),
        ("exact", figures.after_each_task, EXACT, (runs, METHODS, EXACT, SHORTCUTS)),
        ("rows", figures.ladders, LADDERS[1][1], (runs, METHODS, times, ladders)),
        ("memory", figures.memory, next(iter(MEMORIES)), (kept, METHODS)),
    ):
        if needed in runs and len(main) > 1:
            written.append(folder / f"{stream}-{name}.png")
            save(written[-1], drawing, *what)
    return written


def page(stream: str, records: Sequence[Record]) -> str:
    """Return all tables of a stream: of the methods, and of what varies them."""
    parts = [report.page(records, named(stream))]
    runs = compare.reported(records, METHODS)
    times = compare.timed(runs, records)
    if EXACT in runs and set(SHORTCUTS) & set(runs):
        parts.append(report.after_each_task(runs, METHODS, EXACT, SHORTCUTS))
    for names, timed in ((SAME, None), (CHEAPER, times), (MEMORIES, None)):
        if set(names) & set(runs):
            parts.append(report.variants(runs, METHODS, names, timed))
    if all(name in runs for ladder in LADDERS for name in ladder):
        parts.append(report.equal_time(runs, times, METHODS, LADDERS, BUDGETS))
    full, *others = LADDERS[1]
    if full in times and (cheaper := [name for name in others if name in times]):
        parts.append(report.cheapest(runs, times, METHODS, cheaper, full))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def named(stream: str) -> dict[str, Method]:
    """Return the methods of a stream that do not merely vary others in settings, examples, age or memory."""
    vary = {*SAME, *CHEAPER, *MEMORIES}
    return {name: METHODS[name] for name in STREAMS[stream].methods if name not in vary}


def stored(runs: Mapping[str, list[Record]]) -> list[Record]:
    """Return the runs of all policies and sizes of the memory, with those of the methods they vary."""
    names = dict.fromkeys(name for one in MEMORIES for name in (METHODS[one].like, one))
    return [run for name in names for run in runs.get(name, [])]


def overview(folder: Path) -> dict[str, str]:
    """Return the tables over all streams, from the runs in a folder, by the name of their file."""
    streams, times = {}, {}
    for name, setting in STREAMS.items():
        records = plan.published(name, results_of(name, folder))
        streams[setting.title] = runs = compare.reported(records, METHODS)
        times[setting.title] = compare.timed(runs, records)
    title = {name: method.title for name, method in METHODS.items()}
    others = [name for name in BASIC if name not in ("replay", "joint")]
    varied = {title[name]: (name, METHODS[name].like) for name in CHEAPER}
    same = (
        "minus that of the same method with 10 (digits) or 16 (articles) fresh examples of each task a step."
    )
    tables = {
        "projection": across.at_equal_settings(
            "GEM with a weight minus replay at the same learning rate and weight.",
            streams,
            "gem-weight",
            ("replay", *SAME),
        ),
        "exactness": across.differences(
            "Final average accuracy of exact GEM minus that of others.",
            streams,
            {title[name]: (EXACT, name) for name in SHORTCUTS},
        ),
        "replay": across.differences(
            "Final average accuracy minus that of replay.",
            streams,
            {title[name]: (name, "replay") for name in others},
            turned=True,
        ),
        "cost": across.relative_times(
            "Time of a step in plain steps: means over two seeds and all steps after the first task.",
            times,
            {name: title[name] for name in COSTS},
        ),
        "rows": across.differences(f"Final average accuracy {same}", streams, varied, turned=True),
        "rows-lowest": across.differences(
            f"Lowest accuracy of past tasks {same}",
            streams,
            varied,
            compare.lowest_past_accuracy,
            turned=True,
        ),
    }
    return {f"overview-{name}.md": text + "\n" for name, text in tables.items()}
