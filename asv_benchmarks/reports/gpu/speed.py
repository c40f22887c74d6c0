"""Part 3: how long projections take, beside A-GEM, I-GEM, the recipe of GEM, and what memory allows."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gemproj
from asv_benchmarks.benchmarks.common import LORA
from asv_benchmarks.benchmarks.peers import agem_published, gem_published, igem_published
from asv_benchmarks.reports.gpu.device import DEVICE, Call, Clock, as_graph, backend, host_time
from asv_benchmarks.reports.gpu.printing import Running, say
from asv_benchmarks.reports.gpu.problems import bound, draw
from asv_benchmarks.reports.tables import digits, power
from gemproj import Exact
from gemproj.backends.triton._layout import lay_out, lay_out_batch
from gemproj.backends.triton.combine import combine
from gemproj.backends.triton.gram import gram, supports
from gemproj.backends.triton.solve import solve

SIZES = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = (LORA, 1 << 25)
DTYPES = (torch.float32, torch.bfloat16)
# Problems of a batch by backend, their rows and columns.
BATCHES, BATCH_SIZES, BATCH_D = {"triton": 1_000_000, "portable": 20_000}, (2, 8), 64
# Numbers that are copied to learn the bandwidth.
COPIED = 1 << 28
HEAD = ["t", "floor", "gram", "solve", "combine", "captured", "warm", "eager", "portable"]
HEAD += ["A-GEM, mean", "A-GEM, given", "I-GEM", "apart"]
NOTE = """
Microseconds, cold but for "warm": before each call one buffer is written, which fills the L2 cache, and
another is read. Floor: the time in which a copy moves G and g twice and x once. Captured, the stages and both
A-GEM, which never wait here, are replays of CUDA graphs. Apart: the largest difference of the backends, over
the largest entry."""
# What a projection takes on an H100 according to the paper on I-GEM, d = 2,166,784.
PAPER = {"GEM": 1_960_000.0, "I-GEM": 2160.0, "A-GEM": 216.0}
# On an H100, d = 2,166,784, float32, by t: microseconds, and the time of A-GEM on the mean as unit.
MOST = {2: 25.0, 8: 65.0, 32: 230.0}
MOST_AGEM = {2: 1.5, 8: 1.2, 16: 1.2, 32: 1.2, 64: 1.2}
LEAST_PROBLEMS = 5e6

Times = dict[str, float | None]


class Speed:
    """All tables, of which `wrong` failed; or answers, that differ between the backends."""

    def __init__(self) -> None:
        self.clock, self.wrong = Clock(), 0
        source, target = torch.zeros(2, COPIED, device=DEVICE)
        # Bytes in a microsecond, read and written.
        self.rate = 2 * source.nbytes / self.clock.warm(lambda: target.copy_(source))
        self.targets: list[list[str]] = []
        say(f"A copy of {source.nbytes / 1e9:.1f} GB moves {self.rate / 1e3:.0f} GB/s.", NOTE)

    def sizes(self, d: int, dtype: torch.dtype) -> None:
        """Print the table of all t for one number of columns and dtype."""
        table = Running(f"d = {d:,}, {dtype}", HEAD)
        for t in SIZES:
            G, g = draw(t, d, dtype)
            times, apart = self._times(G, g), _apart(G, g)
            table.row(str(t), *(_text(times.get(name)) for name in HEAD[1:-1]), power(apart))
            self.wrong += not apart <= 2 * bound(dtype)
            if (d, dtype) == (COLUMNS[0], DTYPES[0]):
                self._judge(t, times)

    def _times(self, G: Tensor, g: Tensor) -> Times:
        x, mean, cold = torch.empty_like(g), torch.empty_like(g), self.clock.cold
        project = partial(gemproj.project, G, g, out=x)
        times: Times = {"floor": (2 * len(G) + 3) * g.nbytes / self.rate}
        at = lay_out([G], [g])
        if at is not None and supports(at):
            stages = _stages(at, x)
            for name, call in zip(("gram", "solve", "combine"), stages, strict=True):
                times[name] = self._replayed(call)
            times["captured"] = self._replayed(project)
            times["warm"] = self._replayed(project, self.clock.warm)
        times["eager"] = cold(project)
        with backend("portable"):
            times["portable"] = cold(project)
        times["A-GEM, mean"] = self._replayed(lambda: agem(g, torch.mean(G, 0, out=mean), x))
        times["A-GEM, given"] = self._replayed(lambda: agem(g, mean, x))
        times["I-GEM"] = cold(partial(igem_published, G, g))
        return times

    def _replayed(self, call: Call, time: Callable[[Call], float] | None = None) -> float | None:
        """Return the time of a replay; where that is not possible none, and the reason in the log."""
        try:
            return (time or self.clock.cold)(as_graph(call))
        except RuntimeError:
            traceback.print_exc()
            return None

    def _judge(self, t: int, times: Times) -> None:
        ours, mean = times.get("captured"), times["A-GEM, mean"]
        if ours is not None and t in MOST:
            self._target(f"t = {t}, microseconds", ours, MOST[t], ours <= MOST[t])
        if ours is not None and mean is not None and t in MOST_AGEM:
            self._target(
                f"t = {t}, times A-GEM, mean", ours / mean, MOST_AGEM[t], ours <= MOST_AGEM[t] * mean
            )

    def _target(self, name: str, found: float, target: float, met: bool) -> None:
        self.targets.append([name, digits(target), digits(found), "yes" if met else "no"])

    def published(self) -> None:
        """Print the figures of the paper beside the same recipes here."""
        G, g = draw(2, COLUMNS[0])
        here: dict[str, Call] = {
            "GEM": lambda: gem_published(G.cpu(), g.cpu()).to(DEVICE),
            "I-GEM": partial(igem_published, G, g),
            "A-GEM": partial(agem_published, G[0], g),
            "gemproj": partial(gemproj.project, G, g, out=torch.empty_like(g)),
        }
        table = Running("As published, microseconds, t = 2 here", ["", "paper, on an H100", "here"])
        for name, call in here.items():
            try:
                found = digits(self.clock.cold(call))
            except ImportError as error:
                found = str(error)
            table.row(name, _text(PAPER.get(name)), found)

    def host(self) -> None:
        """Print when calls return, with so few columns that the device is never waited for."""
        head = ["t", "triton", "portable", "replay"]
        table = Running(f"Microseconds until a call returns, d = {BATCH_D}", head)
        for t in SIZES:
            G, g = draw(t, BATCH_D)
            call = partial(gemproj.project, G, g, out=torch.empty_like(g))
            times = [host_time(call)]
            with backend("portable"):
                times.append(host_time(call))
            table.row(str(t), *map(digits, [*times, host_time(as_graph(call))]))

    def batches(self) -> None:
        """Print how many small problems are solved in a second."""
        head = ["t", "backend", "problems", "gram", "solve", "combine", "all three", "problems/s"]
        table = Running(f"Batches, d = {BATCH_D}, float32, microseconds, warm", head)
        for t in BATCH_SIZES:
            for name, count in BATCHES.items():
                G, g = draw(t, BATCH_D, batch=(count,))
                x, stages = torch.empty_like(g), list[Call]()
                if name == "triton":
                    stages = _stages(lay_out_batch(G, g), x)
                with backend(name):
                    whole = self.clock.warm(partial(gemproj.project, G, g, out=x))
                cells = [digits(self.clock.warm(stage)) for stage in stages] or [""] * 3
                rate = 1e6 * count / whole
                table.row(str(t), name, f"{count:,}", *cells, digits(whole), f"{rate:.1e}")
                if name == "triton":
                    self._target(f"t = {t}, problems/s", rate, LEAST_PROBLEMS, rate >= LEAST_PROBLEMS)

    def verdicts(self) -> None:
        """Print which targets are met."""
        table = Running(f"Targets on an H100, d = {COLUMNS[0]:,}, float32", ["", "target", "found", "met"])
        for target in self.targets:
            table.row(*target)


def agem(g: Tensor, reference: Tensor, out: Tensor) -> Tensor:
    """Project on one reference gradient by torch's operations, without a wait for the device."""
    weight = torch.dot(g, reference).clamp(max=0.0) / torch.dot(reference, reference)
    return torch.sub(g, weight * reference, out=out)


def _stages(at: Any, x: Tensor) -> list[Call]:
    """Return the three stages as `project` runs them; every row has a multiplier in the last."""
    total = gram(at)
    K, b = total[:, :-1, :-1], total[:, :-1, -1]
    return [
        partial(gram, at),
        partial(solve, K, b, method=Exact(), only_multipliers=True),
        partial(combine, at, torch.full_like(b, 0.5), [x]),
    ]


def _apart(G: Tensor, g: Tensor) -> float:
    x = gemproj.project(G, g)
    with backend("portable"):
        y = gemproj.project(G, g)
    return float(x.sub_(y).abs_().max() / y.abs_().max())


def _text(time: float | None) -> str:
    return "" if time is None else digits(time)


def main(seconds: float) -> int:
    """Print all tables, the most important ones first; return 1 if one fails or the backends differ."""
    with backend("triton"):
        speed = Speed()
        sizes: list[Call] = [partial(speed.sizes, d, dtype) for d in COLUMNS for dtype in DTYPES]
        others: list[Call] = [speed.batches, speed.verdicts, speed.published, speed.host]
        for table in [*sizes[:1], *others, *sizes[1:]]:
            try:
                table()
            except Exception as error:
                traceback.print_exc()
                say("", f"**Failed: {type(error).__name__}**")
                speed.wrong += 1
    return int(bool(speed.wrong))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
