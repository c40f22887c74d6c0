"""The experiment of the I-GEM paper: its tables and accuracies beside the published ones.

If GPT-2 medium is available, this is the protocol of the paper's appendix. Otherwise it is the same protocol
on the small backbone, which is pretrained here. Options that are not listed go to examples.lora_agnews.
Finished runs are kept.
"""

import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.common import command
from examples.common.drawing import save
from examples.lora_agnews import __main__ as agnews
from examples.lora_agnews import backbone, config, figures, report
from examples.study import paper_report

MEDIUM = "gpt2-medium"
RUNS, OUT = Path("runs/study-paper"), Path("docs/results/study/paper")


@command.finishing
def main(arguments: Sequence[str] | None, console: Console) -> list[Path]:
    """Execute the missing runs, then write tables and figures."""
    parser = ArgumentParser(
        "python -m examples.study.paper", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", help=f"folder or name on the hub, by default {MEDIUM}")
    parser.add_argument("--preset", help="another protocol, as for examples.lora_agnews")
    parser.add_argument("--runs", type=Path, default=RUNS, help=f"folder for the runs, by default {RUNS}")
    parser.add_argument("--out", type=Path, default=OUT, help=f"for tables and figures, by default {OUT}")
    parser.add_argument("--draw", action="store_true", help="run nothing: draw OUT/results.json")
    given, others = parser.parse_known_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.draw:
        preset = ["--preset", given.preset] if given.preset else protocol(given.backbone)
        agnews.run([*preset, *others, "--out", str(given.runs)], console)
        shutil.copy(given.runs / "results.json", given.out)
    return write(given.out)


def protocol(named: str | None) -> list[str]:
    """Return the options of the paper's protocol, on the small backbone if GPT-2 medium is not available."""
    if named != "small":
        try:
            backbone.locate(named or MEDIUM)
            return ["--preset", "paper", "--backbone", named or MEDIUM]
        except command.SetupError as error:
            if named:
                raise
            print(f"The same protocol on the small backbone: {error}")
    seeds, methods = ",".join(map(str, paper_report.SEEDS)), ",".join(config.PAPER.methods)
    # Longer articles, and finer measurements, than in the quick preset.
    finer = ["--max-length", "48", "--eval-interval", "10", "--eval-rows", "160", "--probe-interval", "4"]
    return ["--preset", "quick", "--seeds", seeds, "--methods", methods, *finer]


def write(out: Path) -> list[Path]:
    """Write tables and the figure of the results in a folder, and return their paths."""
    results = report.read(out)
    (out / "table.md").write_text(paper_report.markdown(results), encoding="utf-8")
    given = results["config"]
    shape = f"{given['small_layers']} layers of width {given['small_width']}"
    name = f"GPT-2 of {shape}" if given["backbone"] == "small" else given["backbone"]
    here = f"Here\n{name}, {results['environment'].get('gpu', given['device'].upper())}"
    published = {name: found["average_accuracy"] for name, found in paper_report.PUBLISHED.items()}
    panels = {f"I-GEM paper\n{paper_report.BACKBONE}": published}
    drawn = save(out / "final_accuracy.png", figures.final_accuracy, results["runs"], here, panels)
    return [out / "table.md", drawn]


if __name__ == "__main__":
    sys.exit(main())
