"""What an earlier version answered: problems and short trainings drawn from seeds, with the answers in files.

``python -m tests.golden`` draws all problems and trainings, and writes the answers of the installed version to
``tests/golden/``. Run it only to freeze a behaviour that has changed on purpose. Only seeds and answers are
stored. Left out is every problem on which the version itself warns or is not optimal, and every one whose
answer moves if the last bit of its numbers does: no answer depends on how a processor rounds.
"""

import re
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

import gemproj
from asv_benchmarks.reports.families import FAMILIES
from tests import problems
from tests.problems import KINDS, draw, draw_options, lengths

FILES = Path(__file__).with_suffix("")
FEW = 12  # of at most so many entries, x is stored; of more, a few of its linear functionals


@dataclass(frozen=True)
class Problem:
    """Arrays of NumPy's float64; other libraries, dtypes, blocks and batches are compared with them elsewhere."""

    G: np.ndarray
    g: np.ndarray
    options: dict = field(default_factory=dict)
    exact: bool = False  # whether the numbers are integers, the same on every machine


def call(problem):
    """Return status, multipliers and x of a problem: the only lines that call the core."""
    sol = gemproj.solve_dual(problem.G, problem.g, **problem.options)
    return int(sol.status), sol.multipliers, gemproj.project(problem.G, problem.g, **problem.options)


def tolerance(A):
    """Return the tolerance for x over the size of the problem, and the smallest singular value of rows A.

    For well-conditioned rows it is 1e-9. K loses the square of the condition of the unit rows, of which K is
    the square: 1e3 roundings over the smallest singular value squared, but no more than 1e-5, beyond which
    `project` warns. Values below 1e-13 are those of dependent rows.
    """
    values = np.linalg.svd(A, compute_uv=False)
    kept = values[values > 1e-13 * values.max(initial=1e-300)]
    least = kept.min(initial=1.0)
    return max(1e-9, min(1e-13 / least**2, 1e-5)), least if len(kept) == len(A) else 0.0


def answer(problem):
    """Return all numbers that are frozen, over the size of the problem, and by how much each may differ."""
    status, lam, x = call(problem)
    (t, d), options = problem.G.shape, problem.options
    root = np.sqrt(np.broadcast_to(options.get("metric", 1.0), d))
    G, a, y = problem.G / root, problem.g * root, x * root
    h, margin = (np.broadcast_to(options.get(k, 0.0), t) for k in ("h", "margin"))
    n = lengths(G)
    A = G / n[:, None]
    within, least = tolerance(A)
    size = np.linalg.norm(a) + np.max(np.abs(h) / n) + np.linalg.norm((margin * n) @ A) or 1.0
    if d <= FEW:
        seen, off = y / size, np.full(d, within)
    else:  # four random functionals of norm sqrt(d), so that an error e of x changes each by about |e|
        seen, off = np.random.default_rng(d).standard_normal((4, d)) @ y / size, np.full(4, 4 * within)
    unique = least > 1e-3  # with a margin: otherwise only K lam is determined, which is x - g in the rows
    mu = lam * n / size
    found = [status], seen, mu if unique else A @ (mu @ A)
    return np.concatenate(found), np.concatenate([[0], off, np.full(t, within / least if unique else within)])


def refusal(problem):
    """Return the rows that the error about an infeasible h names, or None if there is no error."""
    try:
        call(problem)
    except ValueError as error:
        named = re.search(r"h is infeasible.* rows? (\d+(?:, \d+)*)", str(error))
        if named is None:
            raise
        return np.array(sorted(map(int, named[1].split(", "))), float)
    return None


def only(problem, rows):
    """Return whether all contradictions share these rows, in exact arithmetic."""
    h, equality = (np.broadcast_to(problem.options.get(k, 0.0), len(problem.G)) for k in ("h", "equality"))
    rest = [np.arange(len(problem.G)) != int(row) for row in rows]
    return all(problems.rational_feasible(problem.G[k], h[k], equality[k] > 0) for k in rest)


def families(rng, seed):
    family = FAMILIES[[*FAMILIES][seed % len(FAMILIES)]]
    return Problem(*family.draw(rng, (2, 5, 10, 30)[seed // len(FAMILIES) % 4]))


def known(rng, seed, t=30):
    t = int(rng.integers(1, t + 1))
    return Problem(*draw(rng, KINDS[seed % len(KINDS)], t, int(rng.integers(2, 2 * t + 8)))[:2])


def with_options(rng, seed):
    problem = known(rng, seed, 12)
    return replace(problem, options=draw_options(rng, problem.G))


def held(rng, seed):
    """Draw multipliers that cannot move, and warm starts, which must not matter."""
    problem = with_options(rng, seed)
    t, margin = len(problem.G), problem.options.get("margin", 0.0)
    penalty = np.where(rng.random(t) < 0.3, margin, margin + rng.random(t) / lengths(problem.G))
    return replace(problem, options=problem.options | {"penalty": penalty, "warm_start": rng.random(t)})


def integers(rng, seed):
    G, g, h, equality = problems.small_integers(rng)
    return Problem(G, rng.integers(-3, 4, len(g)).astype(float), {"h": h, "equality": equality}, exact=True)


def integer_options(rng, seed):
    G, g = FAMILIES["tiny integers"].draw(rng, int(rng.integers(2, 9)))
    margin = rng.integers(0, 2, len(G)).astype(float)
    options = {"margin": margin, "penalty": margin + rng.integers(0, 4, len(G)), "metric": 4.0 ** (g % 3)}
    return Problem(G, g, {k: a for k, a in options.items() if k in draw_options(rng, G)}, exact=True)


def contradiction(rng, seed):
    """Draw rows of which some contradict each other: the last is minus a sum of others, and asks for more."""
    t = int(rng.integers(2, 9))
    G, chosen = rng.integers(-9, 10, (t, t + 4)).astype(float), rng.permutation(t - 1)[: rng.integers(1, 4)]
    h = rng.integers(-3, 4, t).astype(float)
    G[-1], h[-1] = -G[chosen].sum(axis=0), 1.0 + rng.integers(1, 5) - h[chosen].sum()
    return Problem(G, rng.standard_normal(t + 4), {"h": h}, exact=True)


def methods(rng, seed):
    problem = known(rng, seed, 9)
    return replace(problem, options={"method": ("agem", "pgd", "fista")[seed % 3]})


# The function that draws, and the number of seeds; all kinds but the refused ones are compared by `answer`.
PROBLEMS = {
    "families": (families, 19 * 4 * 4), "known": (known, 280), "options": (with_options, 300),
    "held": (held, 80), "integers": (integers, 320), "integers with options": (integer_options, 160),
    "refused integers": (integers, 320), "refused": (contradiction, 60), "methods": (methods, 60),
}  # fmt: skip


def drawn(kind, seed):
    return PROBLEMS[kind][0](np.random.default_rng([zlib.crc32(kind.encode()), seed]), seed)


def draws():
    """Return some draws of NumPy: if they change, so do all problems."""
    rng = np.random.default_rng(0)
    return np.r_[rng.standard_normal(99), rng.random(9), rng.integers(9, size=9), rng.permutation(9)]


def jolted(problem):
    """Return the problem with other last bits in the columns of G, which leave dependent rows dependent."""
    rng = np.random.default_rng(0)

    def jolt(a):
        return a * (1.0 + 2.0**-52 * rng.integers(-1, 2, a.shape[-1]))

    h = {"h": jolt(problem.options["h"])} if "h" in problem.options else {}
    return replace(problem, G=jolt(problem.G), g=jolt(problem.g), options=problem.options | h)


def frozen(kind, seed):
    """Return what is frozen of a problem, or why it is left out."""
    problem = drawn(kind, seed)
    if kind.startswith("refused"):
        rows = refusal(problem)
        return "feasible" if rows is None else rows if only(problem, rows) else np.array([])
    try:
        found, allowed = answer(problem)
    except (ValueError, RuntimeWarning) as error:
        return type(error).__name__
    if kind != "methods" and found[0]:
        return "not optimal"
    if not problem.exact:
        try:
            off = np.abs(answer(jolted(problem))[0] - found)
        except (ValueError, RuntimeWarning):
            return "fragile"
        if (off > 0.1 * allowed).any():
            return "fragile"
    return found


# Promises by kind; those of "distillation" are about stored outputs.
PROMISES = {
    "no rise": {}, "tolerance": {"tolerance": 0.02}, "weight": {"weight": 0.5}, "equal": {"equal": True},
    "penalty": {"penalty": 0.3}, "distillation": {"tolerance": 0.01},
}  # fmt: skip
OPTIMIZERS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.01, "weight_decay": 0.1}}
# Kinds of promises, one for each kept set, the optimizer, `on`, and whether a language model is trained.
CASES = [[kind] for kind in PROMISES for _ in OPTIMIZERS]
CASES += [["no rise", "tolerance"], ["weight", "penalty"], ["equal", "distillation"]] * 2
CASES += [["distillation", "weight"], ["no rise", "distillation"]]
ON = ["both", "gradient", "step"] * 2 + ["gradient", "step", "both"] * 2 + ["step", "both", "gradient"] * 3
TRAININGS = {
    f"{k}: {' and '.join(kinds)}, {name}, {on}": (kinds, name, on, k > 17)
    for k, (kinds, name, on) in enumerate(zip(CASES, [*OPTIMIZERS] * 10, ON[:20], strict=True))
}


def keep(model, optimizer, sets, on, logits, shift):
    """Keep sets of examples, each with its promise: the only lines that call the training layer.

    All examples are used in every step, and none is drawn at random.
    """
    from gemproj.torch import Keeper, Promise
    from gemproj.torch.losses import CrossEntropy, Distillation

    keeper = Keeper(model, optimizer, on=on)
    for kind, batch in sets.items():
        loss = Distillation(logits) if kind == "distillation" else CrossEntropy(logits, shift=shift)
        keeper.keep([batch], Promise(loss, examples=None, **PROMISES[kind]), name=kind)


def trained(promises, name, on, language, jolt=0.0):
    """Train on a task that contradicts the kept sets; return losses at four steps, and the norms of weights."""
    import torch
    from torch.nn.functional import cross_entropy, kl_div

    rng = np.random.default_rng(len(promises))
    if language:
        from tests.models import adapted, language_model

        # Not Llama, whose norms are computed in float32 even in a model of float64.
        model = language_model("gpt2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model = adapted(model, target_modules=["c_attn"], fan_in_fan_out=True).double()
        batches = [{"input_ids": torch.tensor(rng.integers(1, 20, (6, 8)))} for _ in range(3)]
        batches = [batch | {"labels": batch["input_ids"]} for batch in batches]
    else:
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
        batches = [{"x": torch.tensor(rng.standard_normal((12, 6)))} for _ in range(2)]
        batches = [batch | {"labels": batch["x"][:, :3].argmax(1)} for batch in batches]
        shift = 0 if "equal" in promises else 1  # without its promise, the loss of the first set would fall
        x = batches[0]["x"] if shift else torch.tensor(rng.standard_normal((12, 6)))
        batches.append({"x": x, "labels": (x[:, :3].argmax(1) + shift) % 3})
    # From NumPy, because draws of torch depend on the processor and the version.
    for key, p in sorted(model.named_parameters()):
        value = 0.3 * rng.standard_normal(tuple(p.shape)) * (1.0 + jolt)
        p.data = torch.tensor(value + ("ln_" in key))

    def logits(model, batch):
        return model(input_ids=batch["input_ids"]).logits if language else model(batch["x"])

    def loss(batch):
        out, labels = logits(model, batch), batch["labels"]
        out, labels = (out[:, :-1], labels[:, 1:]) if language else (out, labels)
        return cross_entropy(out.flatten(0, -2), labels.flatten())

    def steps(optimizer, batches, count):
        for _ in range(count):
            optimizer.zero_grad()
            sum(map(loss, batches)).backward()
            optimizer.step()

    weights = [p for p in model.parameters() if p.requires_grad]
    sets = dict(zip(promises, batches, strict=False))
    steps(torch.optim.SGD(weights, lr=0.01 if language else 0.3), [*sets.values()], 20)
    before = [logits(model, batch).detach().log_softmax(-1) for batch in sets.values()]
    optimizer = getattr(torch.optim, name)(weights, **OPTIMIZERS[name])
    optimizer.param_groups[0]["lr"] *= 0.1 if language else 1.0
    keep(model, optimizer, sets, on, logits, language)
    found = []
    for _ in range(4):
        with torch.no_grad():
            found += [loss(batch) for batch in (batches[-1], *sets.values())]
            now = [logits(model, batch).log_softmax(-1) for batch in sets.values()]
            found += [
                kl_div(*pair, reduction="sum", log_target=True) for pair in zip(now, before, strict=True)
            ]
        steps(optimizer, [batches[-1]], 8)
    return np.array([float(a) for a in [*found, *(p.detach().norm() for p in weights)]])


def main():
    FILES.mkdir(exist_ok=True)
    warnings.simplefilter("error", RuntimeWarning)
    stored = {"draws": draws()}
    for kind, (_, seeds) in PROBLEMS.items():
        found = {seed: frozen(kind, seed) for seed in range(seeds)}
        kept = {seed: values for seed, values in found.items() if not isinstance(values, str)}
        print(kind, len(kept), dict(Counter(a for a in found.values() if isinstance(a, str))))
        stored[f"{kind}/seeds"] = np.array([*kept], np.int16)
        stored[f"{kind}/counts"] = np.array([*map(len, kept.values())], np.int16)
        stored[f"{kind}/values"] = np.concatenate([*kept.values()])
    np.savez_compressed(FILES / "problems.npz", **stored)
    stored = {}
    for name, case in TRAININGS.items():
        stored[name] = trained(*case)
        off = np.abs(trained(*case, jolt=1e-12) - stored[name]).max()
        assert off < 1e-8, f"{name}: rounding would move it by {off:.0e}"
    np.savez_compressed(FILES / "trainings.npz", **stored)


if __name__ == "__main__":
    main()
