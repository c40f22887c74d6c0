"""Tables and figures of a stream, from the finished runs."""

from pathlib import Path

from ..common.drawing import save
from . import figures, plan, report
from .compare import Found
from .runs import results_of
from .settings import BASIC, CHEAPER, MEMORIES, METHODS, SAME, STREAMS

EXACT, SHORTCUTS = "gem", ("agem", "igem1", "igem3", "igem10")  # does exactness matter?


def publish(stream: str, folder: Path) -> list[Path]:
    """Write tables and figures into a folder, and return their paths; none without reported runs."""
    found = plan.published(stream, results_of(stream, folder))
    if not found.runs:
        return []
    written = [folder / f"{stream}.md"]
    written[0].write_text(page(stream, found), encoding="utf-8")
    main = found.only(named(stream))
    if "replay" in main.runs and len(main.runs) > 1:
        with_same = found.only(name for name in found.runs if name in main.runs or name in SAME)
        written.append(save(folder / f"{stream}-differences.png", figures.paired_differences, with_same))
    if next(iter(MEMORIES)) in found.runs:
        # All policies and sizes of the memory, under the names of the methods that they vary.
        sizes = dict.fromkeys(name for one in MEMORIES for name in (METHODS[one].like, one))
        stored = [
            run | {"method": METHODS[name].like or name} for name in sizes for run in found.runs.get(name, [])
        ]
        written.append(save(folder / f"{stream}-memory.png", figures.memory, stored))
    return written


def page(stream: str, found: Found) -> str:
    """Return the figure of a stream and all tables, each below its caption: of methods and of variants."""
    names = named(stream)
    main = found.only(names)
    parts = [report.accuracy(main), report.cost(main), report.promises(main)] if main.runs else []
    if "replay" in main.runs and len(main.runs) > 1:
        told = "Final average accuracy of each method minus that of replay"
        parts.insert(0, f"![{told}]({stream}-differences.png)")
    parts += [report.differences(main, baseline) for baseline in ("replay", "gem") if baseline in main.runs]
    if missing := [METHODS[name].title for name in names if name not in main.runs]:
        parts.append(f"No reported runs yet: {', '.join(missing)}.")
    for varied in (SAME, CHEAPER, MEMORIES):
        if set(varied) & set(found.runs):
            parts.append(report.variants(found, varied, timed=varied is CHEAPER))
    return "\n\n".join(parts) + "\n"


def named(stream: str) -> list[str]:
    """Return the methods of a stream that are no variants in settings, examples, age of rows or memory."""
    return [name for name in STREAMS[stream].methods if name not in {*SAME, *CHEAPER, *MEMORIES}]


def overview(folder: Path) -> dict[str, str]:
    """Return the tables over all streams, from the runs in a folder, by file name."""
    streams = {one.title: plan.published(name, results_of(name, folder)) for name, one in STREAMS.items()}
    exact = {METHODS[name].title: (EXACT, name) for name in SHORTCUTS}
    others = {METHODS[name].title: (name, "replay") for name in BASIC if name not in ("replay", "joint")}
    varied = {METHODS[name].title: (name, METHODS[name].like) for name in CHEAPER}
    same = (
        "minus that of the same method with 10 (digits) or 16 (articles) fresh examples of each task a step."
    )
    tables = {
        "projection": report.at_equal_settings(streams),
        "exactness": report.over_streams(
            "Final average accuracy of exact GEM minus that of others; I-GEM has GEM's settings.",
            streams,
            exact,
            turned=False,
        ),
        "replay": report.over_streams("Final average accuracy minus that of replay.", streams, others),
        "rows": report.over_streams(f"Final average accuracy {same}", streams, varied),
    }
    return {f"overview-{name}.md": text + "\n" for name, text in tables.items()}
