"""The recorded benchmarks of commits: a figure, and asv's own pages of them in ``benchmarks/``."""

import json
import subprocess
import sys
from datetime import datetime, timezone
from html import escape
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from looks import STYLE, plt, write
from sphinx.util.logging import getLogger
from sphinx.util.typing import ExtensionMetadata

ASV = Path(__file__).parents[2] / "asv_benchmarks"
FIGURE = Path("gallery_pages", "benchmarks")
# GPT-2 medium's adapters, as in asv_benchmarks/benchmarks/common.py.
LORA = 2_166_784
PANELS = {
    "projection.Methods.time_project": "Time of one projection (ms)",
    "ratios.Ratios.track_to_memory_floor": "Time over the memory floor",
}


def recorded(folder: Path = ASV / "results" / "epyc") -> list[dict[str, Any]]:
    """Return what is recorded, by date: of each commit the hash, the date, the values of each benchmark."""
    found = []
    for path in folder.glob("*-*.json"):
        run = json.loads(path.read_text(encoding="utf-8"))
        values = {
            name: dict(zip(product(*row[1]), row[0] or [None], strict=False))
            for name, row in run["results"].items()
        }
        date = datetime.fromtimestamp(run["date"] / 1000, timezone.utc)
        found.append({"commit": run["commit_hash"], "date": date, "values": values})
    return sorted(found, key=lambda run: run["date"])


def draw(app: Any) -> None:
    """Draw `PANELS` over the recorded commits, for method exact in float32 on torch."""
    runs = recorded()
    with plt.rc_context(STYLE):
        figure, both = plt.subplots(2, 1, figsize=(6, 5.4), sharex=True)
        for axes, (name, title) in zip(both, PANELS.items(), strict=True):
            for t in (2, 9, 49):
                case = ("'exact'", str(t), str(LORA))
                values = [run["values"].get(name, {}).get(case) for run in runs]
                scale = 1000 if "time" in name else 1
                axes.plot(
                    [k for k, value in enumerate(values) if value is not None],
                    [scale * value for value in values if value is not None],
                    "o-",
                    label=f"{t} constraints",
                )
            names = [f"{run['date']:%d %b}\n{run['commit'][:7]}" for run in runs]
            axes.set_xticks(range(len(runs)), names)
            axes.set_title(title)
            if "time" in name:
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_formatter("")
            else:
                axes.set_ylim(0)
            axes.yaxis.set_major_formatter("{x:g}")
            axes.margins(x=0.15)
        figure.legend(*both[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.set_label("Time of a projection at each recorded commit, and that time over the memory floor")
        (Path(app.srcdir) / FIGURE).parent.mkdir(exist_ok=True)
        write(figure, Path(app.srcdir) / FIGURE)
        plt.close(figure)


def hindrance() -> str:
    """Return why asv's pages cannot be made here, or nothing."""
    if find_spec("asv") is None:
        return "asv is not installed"
    for run in recorded():
        command = ["git", "-C", str(ASV), "merge-base", "--is-ancestor", run["commit"], "HEAD"]
        if subprocess.run(command, capture_output=True).returncode:
            return f"there is no git history with commit {run['commit'][:8]}"
    return ""


def publish(app: Any, exception: Exception | None) -> None:
    """Let asv write its pages, or a page that says why there are none."""
    if exception is not None or app.builder.name != "html":
        return
    folder = Path(app.outdir).resolve() / "benchmarks"
    reason = hindrance()
    if not reason:
        config = str(ASV / "asv.conf.json")
        command = [sys.executable, "-m", "asv", "--config", config, "publish", "--html-dir", str(folder)]
        made = subprocess.run([*command, "--no-pull"], cwd=ASV, capture_output=True, text=True)
        reason = made.stdout[-500:] if made.returncode else ""
    if reason:
        getLogger(__name__).info("No pages of asv: %s.", reason)
        folder.mkdir(exist_ok=True)
        page = f"<title>Benchmarks</title><p>These pages were not made in this build: {escape(reason)}.</p>"
        (folder / "index.html").write_text(page, encoding="utf-8")


def setup(app: Any) -> ExtensionMetadata:
    app.connect("builder-inited", draw)
    app.connect("build-finished", publish)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
