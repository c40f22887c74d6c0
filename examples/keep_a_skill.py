"""Fine-tune a language model for Y and keep X: ``python examples/keep_a_skill.py``.

X and Y are languages of the same 32 words. The two previous words determine the words that may follow; half
of these rules are the same in both languages. A small transformer is pretrained on X. Then all its weights
are fine-tuned on Y; 48 stored sequences of X are the reference. No loss can be below 1.208 nats, the entropy
of both languages. The script compares plain fine-tuning; replay of the reference's text, or of the model's
stored outputs (Kullback-Leibler divergence, KL), with a weight; a promise that the text's loss does not rise;
and a promise that the KL stays below a tolerance, with the report on it.

``--seeds 5 --figure FILE --out FILE`` made docs/results/keep-a-skill.md and its figure. One seed takes
less than a minute on two CPU cores and needs no data.
"""

import argparse
import copy
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gemproj.torch import Keeper, Promise
from gemproj.torch.history import Report
from gemproj.torch.losses import CrossEntropy, Distillation

WORDS, GROUPS, LENGTH, WIDTH = 32, 4, 24, 64
CHANCES = torch.tensor([0.5, 0.25, 0.15, 0.1])  # of the four words that may follow
ENTROPY = float(-(CHANCES * CHANCES.log()).sum())  # 1.208 nats: no loss can be lower
REFERENCE, BATCH = 48, 16


def rules(seed: int) -> list[Tensor]:
    """Return the words that may follow in X and in Y, by the group of the word before last and the last."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(2, GROUPS, WORDS, WORDS, generator=generator).argsort(-1)[..., : len(CHANCES)]
    return [x, torch.where(torch.rand(GROUPS, WORDS, 1, generator=generator) < 0.5, x, y)]


def write(rule: Tensor, language: int, n: int, seed: int) -> Tensor:
    """Write sequences: a token for the language, two random words, and words that follow by the rules."""
    generator = torch.Generator().manual_seed(seed)
    text = [torch.full((n,), WORDS + language), *torch.randint(WORDS, (2, n), generator=generator)]
    for draws in torch.multinomial(CHANCES, n * (LENGTH - 3), True, generator=generator).view(-1, n):
        text.append(rule[text[-2] % GROUPS, text[-1], draws])
    return torch.stack(text, 1)


class GPT(nn.Module):
    """A small causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS + 2, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next word."""
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        x = self.embed(text) + self.place[: text.shape[1]]
        return self.head(self.block(x, src_mask=mask, is_causal=True))


def logits(model: nn.Module, text: Tensor) -> Tensor:
    """Return the logits of all words but the first two, which follow no rule."""
    return model(text[:, :-1])[:, 2:]


TEXT = CrossEntropy(logits, labels=lambda text: text[:, 3:])
KL = Distillation(logits)


@dataclass(frozen=True)
class Method:
    """How X is kept: not at all; by replay, with a weight; or by a promise, possibly with a tolerance."""

    kind: str
    rate: float
    loss: Any = None
    option: str = ""
    value: float | None = None

    def __str__(self) -> str:
        return f"{self.kind}, {self.option} {self.value:g}" if self.option else self.kind


PLAIN = Method("plain", 3e-2)  # also used for pretraining
METHODS = [
    PLAIN,
    *(Method("replay of text", 1e-2, TEXT, "weight", weight) for weight in (0.1, 0.3, 1.0)),
    *(Method("replay of KL", 6e-2, KL, "weight", weight) for weight in (1.0, 3.0, 10.0)),
    Method("GEM on text", 3e-3, TEXT),
    *(Method("KL held", 6e-2, KL, "tolerance", e) for e in (0.0, 0.03, 0.1)),
]
# Colours as in all figures (examples/common/colours.py), markers, and the side of the labels.
LOOKS = {
    "plain": ("#999999", "X", 1),
    "replay of text": ("#009E73", "s", 1),
    "replay of KL": ("#882255", "^", 1),
    "GEM on text": ("#332288", "D", 1),
    "KL held": ("#0072B2", "o", -1),
}
Curve = tuple[tuple[str, str, int], list[tuple[tuple[float, float], tuple[float, float], str]]]
COLUMNS = {"x": "X", "y": "Y", "reference": "reference", "kl": "KL of reference", "seconds": "seconds"}


def learn(
    model: nn.Module, text: Tensor, steps: int, seed: int, method: Method = PLAIN, reference: Any = None
) -> Report | None:
    """Train a model on a text, and keep the reference by the method; return the report on a promise."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=method.rate, fused=True
    )
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / steps, 1 - step / steps)
    )
    replayed, keeper = method.option == "weight", None
    if replayed:
        said, stored = KL.outputs(model, reference), drawn(len(reference))
    elif method.loss:
        promise = Promise(method.loss, examples=BATCH, tolerance=method.value)
        keeper = Keeper(model, optimizer, promise)
        keeper.keep([reference], name="X")
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = TEXT(model, text[torch.randint(len(text), (BATCH,), generator=generator)]).mean()
        if replayed:
            at = next(stored)
            outputs = [said[at]] if method.loss is KL else []
            loss = loss + method.value * method.loss(model, reference[at], *outputs).mean()
        loss.backward()
        optimizer.step()
        plan.step()
    return keeper.report() if keeper else None


def drawn(n: int) -> Iterator[Tensor]:
    """Yield indices of n texts, a batch at a time: none is drawn again before all have been drawn."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(n, generator=generator).split(BATCH)


def texts_of(seed: int, reference: int = REFERENCE) -> dict[str, Tensor]:
    """Write texts for pretraining and fine-tuning, `reference` stored ones, and test texts of X and Y."""
    x, y = rules(seed)
    sizes = {"pretrain": (x, 0, 8192), "reference": (x, 0, reference), "x": (x, 0, 512)}
    sizes |= {"tune": (y, 1, 4096), "y": (y, 1, 512)}
    return {name: write(*size, 10 * seed + k) for k, (name, size) in enumerate(sizes.items())}


@torch.no_grad()
def losses(model: nn.Module, texts: Mapping[str, Tensor], said: Tensor) -> dict[str, float]:
    """Return the losses on X, on Y and on the reference, and the KL from the stored outputs of the latter."""
    found = {name: float(TEXT(model, texts[name]).mean()) for name in ("x", "y", "reference")}
    return found | {"kl": max(0.0, float(KL(model, texts["reference"], said).mean()))}


def compare(seed: int, steps: int) -> list[dict[str, Any]]:
    """Pretrain one model, fine-tune it by each method, and return the losses of each."""
    texts = texts_of(seed)
    torch.manual_seed(seed)
    print(f"seed {seed}: pretraining, {4 * steps} steps ...", flush=True)
    start = GPT()
    learn(start, texts["pretrain"], 4 * steps, seed)
    said = KL.outputs(start, texts["reference"])
    rows = []
    for method in [None, *METHODS]:
        model, begin = copy.deepcopy(start), time.perf_counter()
        if method is not None:
            print(f"seed {seed}: {method} ...", flush=True)
            report = learn(model, texts["tune"], steps, seed, method, texts["reference"])
            if report:
                print(report)
        row = {"seed": seed, "method": str(method or "before"), "seconds": time.perf_counter() - begin}
        rows.append(row | losses(model, texts, said))
    return rows


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return mean and standard deviation over the seeds, by method and column."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for method in dict.fromkeys(row["method"] for row in rows):
        columns = {name: [row[name] for row in rows if row["method"] == method] for name in COLUMNS}
        found[method] = {k: (mean(c), stdev(c) if len(c) > 1 else 0.0) for k, c in columns.items()}
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the loss on X over the loss on Y, a curve for each kind of method, into a PNG."""
    found = summarize(rows)
    curves = {}
    for kind in dict.fromkeys(method.kind for method in METHODS):
        methods = [method for method in METHODS if method.kind == kind]
        points = [
            (found[str(m)]["y"], found[str(m)]["x"], f"{m.value:g}" if m.option else "") for m in methods
        ]
        curves[kind] = LOOKS[kind], points
    note = "Beside the points: weights, or tolerances. Error bars: standard deviation over the seeds."
    front(curves, found["before"]["x"][0], note).savefig(path, dpi=200)


def front(curves: Mapping[str, Curve], before: float, note: str) -> Any:
    """Return a figure of the loss on X over the loss on Y, both above the entropy.

    Parameters
    ----------
    curves : mapping
        By label: colour, marker and side of the texts (1 or -1); then of each point the losses on Y and on X,
        each with the length of its error bar, and a text.
    before : float
        Loss on X before fine-tuning.
    note : str
        What the error bars are.
    """
    from matplotlib.figure import Figure  # without pyplot: no window, also without a display
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for label, ((colour, marker, side), points) in curves.items():
        look: dict[str, Any] = {"color": colour, "marker": marker, "markeredgecolor": "white"}
        look |= {"markersize": 8, "ecolor": (colour, 0.4), "elinewidth": 1, "capsize": 2}
        numbers = [(y - ENTROPY, x - ENTROPY, dx, dy) for (y, dy), (x, dx), _ in points]
        at: Any = zip(*numbers, strict=True)
        axes.errorbar(*at, label=label, **look)
        align: dict[str, Any] = {"ha": "left", "va": "bottom"} if side > 0 else {"ha": "right", "va": "top"}
        for (y, x, *_), (*_, text) in zip(numbers, points, strict=True):
            look = {"textcoords": "offset points", "color": colour, **align}
            axes.annotate(text, (y, x), (5 * side, 5 * side), **look)
    axes.axhline(before - ENTROPY, color="#767676", linestyle="--", label="X before")
    axes.set(xscale="log", yscale="log")
    for axis, name in ((axes.xaxis, "Y"), (axes.yaxis, "X")):
        axis.set_label_text(f"Loss on {name}, above the entropy of {ENTROPY:.3f} nats")
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    figure.supxlabel(note, fontsize=8, color="#767676")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare the methods; print a table, and write the figure and the numbers that the options name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 0")
    parser.add_argument("--steps", type=int, default=150, help="fine-tuning steps (pretraining: 4 x as many)")
    parser.add_argument("--figure", type=Path, help="PNG to draw")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers of each seed")
    options = parser.parse_args(arguments)
    if min(options.seeds, options.steps) < 1:
        parser.error("--seeds and --steps must be at least 1")
    for path in filter(None, (options.figure, options.out)):
        if not path.parent.is_dir():
            parser.error(f"{path} is in no folder that exists")
    rows = [row for seed in range(options.seeds) for row in compare(seed, options.steps)]
    table = Table("", *COLUMNS.values(), title="Losses in nats: mean ± standard deviation over the seeds")
    for method, cells in summarize(rows).items():
        table.add_row(method, *(f"{m:.3f} ± {s:.3f}" for m, s in cells.values()))
    Console(width=110).print(table)
    if options.figure:
        draw(rows, options.figure)
    if options.out:
        options.out.write_text(json.dumps({"steps": options.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small
    main()
