"""Part 2: times of projections, beside A-GEM, I-GEM, the recipe of GEM, and the memory floor."""

import traceback
from collections.abc import Callable
from functools import partial
from math import isnan, nan

import torch
from torch import Tensor

import gemproj
from asv_benchmarks.benchmarks.common import LORA
from asv_benchmarks.benchmarks.peers import agem_published, gem_published, igem_published
from asv_benchmarks.reports.gpu.device import DEVICE, Call, Clock, as_graph, backend, host_time
from asv_benchmarks.reports.gpu.printing import Running, Targets, say
from asv_benchmarks.reports.gpu.problems import draw
from asv_benchmarks.reports.tables import digits, power

SIZES = (1, 2, 4, 8, 16, 32, 64)
COLUMNS = (LORA, 1 << 25)
DTYPES = (torch.float32, torch.bfloat16)
# Problems of a batch by backend, their rows and columns.
BATCHES, BATCH_SIZES, BATCH_D = {"triton": 1_000_000, "portable": 20_000}, (2, 8), 64
# The most rows for which no call waits for the device.
MOST_CAPTURED = 8
# Numbers that are copied to measure the bandwidth.
COPIED = 1 << 28
HEAD = ["t", "floor", "gram", "combine", "captured", "warm", "eager", "portable, captured", "portable, eager"]
HEAD += ["A-GEM, mean", "A-GEM, given", "I-GEM", "KKT residual"]
# Of the optimality conditions, free of scale.
BOUND = 1e-6
NOTE = """
Microseconds, cold but for "warm": before each call one buffer is written, which fills the L2 cache, and
another is read. Floor: the time in which a copy moves G and g twice and x once. All but "eager", I-GEM and
GEM are replays of CUDA graphs; above 8 rows the CPU solves, and there is none. Gram and combine are the first
and the last stage. Portable: array operations, without Triton's kernels."""
# Time of a projection on an H100 according to the I-GEM paper, d = 2,166,784.
PAPER = {"GEM": 1_960_000.0, "I-GEM": 2160.0, "A-GEM": 216.0}
# Targets for d = 2,166,784, float32, t = 2 in microseconds; "eager" is the time of the paper's A-GEM.
MOST = {"eager": 216.0, "captured": 60.0}

Times = dict[str, float]


class Speed:
    """All tables; `wrong` counts failed tables and answers that are not optimal."""

    def __init__(self) -> None:
        self.clock, self.wrong = Clock(), 0
        source, target = torch.zeros(2, COPIED, device=DEVICE)
        # Bytes in a microsecond, read and written.
        self.rate = 2 * source.nbytes / self.clock.warm(lambda: target.copy_(source))
        self.aimed: Times = {}
        say(f"A copy of {source.nbytes / 1e9:.1f} GB moves {self.rate / 1e3:.0f} GB/s.", NOTE)

    def sizes(self, d: int, dtype: torch.dtype) -> None:
        """Print the table of all t for one number of columns and dtype."""
        table = Running(f"d = {d:,}, {dtype}", HEAD)
        for t in SIZES:
            G, g = draw(t, d, dtype)
            times, residual = self._times(G, g), float(gemproj.solve_dual(G, g).kkt_residual())
            table.row(str(t), *(digits(times.get(name, nan)) for name in HEAD[1:-1]), power(residual))
            self.wrong += not residual <= BOUND
            if (d, dtype, t) == (COLUMNS[0], DTYPES[0], 2):
                self.aimed = times

    def _times(self, G: Tensor, g: Tensor) -> Times:
        x, mean, cold = torch.empty_like(g), torch.empty_like(g), self.clock.cold
        project = partial(gemproj.project, G, g, out=x)
        times: Times = {"floor": (2 * len(G) + 3) * g.nbytes / self.rate}
        lam = gemproj.solve_dual(G, g).multipliers
        times["gram"] = self._replayed(partial(gemproj.gram, G, g))
        times["combine"] = self._replayed(partial(gemproj.combine, G, g, lam, out=x))
        times["eager"] = cold(project)
        if len(G) <= MOST_CAPTURED:
            times["captured"] = self._replayed(project)
            times["warm"] = self._replayed(project, self.clock.warm)
        with backend("portable"):
            times["portable, eager"] = cold(project)
            if len(G) <= MOST_CAPTURED:
                times["portable, captured"] = self._replayed(project)
        times["A-GEM, mean"] = self._replayed(lambda: agem(g, torch.mean(G, 0, out=mean), x))
        times["A-GEM, given"] = self._replayed(lambda: agem(g, mean, x))
        times["I-GEM"] = cold(partial(igem_published, G, g))
        return times

    def _replayed(self, call: Call, time: Callable[[Call], float] | None = None) -> float:
        """Return the time of a replay; NaN if capture fails, with the reason in the log."""
        try:
            return (time or self.clock.cold)(as_graph(call))
        except RuntimeError:
            traceback.print_exc()
            return nan

    def published(self) -> None:
        """Print the times of the paper beside those of the same recipes here."""
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
            table.row(name, digits(PAPER.get(name, nan)), found)

    def host(self) -> None:
        """Print the times until calls return, with so few columns that no call waits for the device."""
        head = ["t", "eager", "portable", "replay"]
        table = Running(f"Microseconds until a call returns, d = {BATCH_D}", head)
        for t in SIZES:
            G, g = draw(t, BATCH_D)
            call = partial(gemproj.project, G, g, out=torch.empty_like(g))
            replay = digits(host_time(as_graph(call))) if t <= MOST_CAPTURED else ""
            with backend("portable"):
                portable = host_time(call)
            table.row(str(t), digits(host_time(call)), digits(portable), replay)

    def batches(self) -> None:
        """Print the number of small problems that are solved in a second."""
        head = ["t", "backend", "problems", "microseconds", "problems/s"]
        table = Running(f"Batches, d = {BATCH_D}, float32, warm", head)
        for t in BATCH_SIZES:
            for name, count in BATCHES.items():
                G, g = draw(t, BATCH_D, batch=(count,))
                with backend(name):
                    whole = self.clock.warm(partial(gemproj.project, G, g, out=torch.empty_like(g)))
                table.row(str(t), name, f"{count:,}", digits(whole), f"{1e6 * count / whole:.1e}")

    def verdicts(self) -> None:
        """Print the targets, and whether they are met."""
        table = Targets(f"Targets, d = {COLUMNS[0]:,}, float32")
        for name, most in MOST.items():
            if not isnan(found := self.aimed.get(name, nan)):
                table.add(f"t = 2, {name}, microseconds", found, most, digits)


def agem(g: Tensor, reference: Tensor, out: Tensor) -> Tensor:
    """Project on one reference gradient by operations of torch, without waiting for the device."""
    weight = torch.dot(g, reference).clamp(max=0.0) / torch.dot(reference, reference)
    return torch.sub(g, weight * reference, out=out)


def main(seconds: float) -> int:
    """Print all tables, the most important ones first; return 1 if one fails or an answer is not optimal."""
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
