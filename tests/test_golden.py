"""Answers are those of an earlier version: see golden.py."""

import numpy as np
import pytest

from tests import golden

PROBLEMS, TRAININGS = (dict(np.load(golden.FILES / f"{name}.npz")) for name in ("problems", "trainings"))


def test_draws():
    """If this test fails, NumPy draws other numbers, and nothing else in this file says anything."""
    np.testing.assert_allclose(golden.draws(), PROBLEMS["draws"], rtol=1e-14)


@pytest.mark.parametrize("kind", golden.PROBLEMS)
def test_problems(kind):
    seeds, counts, values = (PROBLEMS[f"{kind}/{name}"] for name in ("seeds", "counts", "values"))
    missed = []
    for seed, frozen in zip(seeds, np.split(values, np.cumsum(counts)[:-1]), strict=True):
        problem = golden.drawn(kind, seed)
        try:
            if kind.startswith("refused"):
                rows = golden.refusal(problem)
                # Where several sets of rows contradict each other, nothing is stored, and any may be named.
                if rows is None or (len(frozen) and rows.tolist() != frozen.tolist()):
                    missed.append(f"seed {seed}: names {rows}, not {frozen}")
                continue
            found, allowed = golden.answer(problem)
        except (ValueError, RuntimeWarning) as error:
            missed.append(f"seed {seed}: {error}")
            continue
        ratio = np.abs(found - frozen) / np.maximum(allowed, 1e-300)
        if not ratio.max() <= 1.0:
            worst = int(ratio.argmax())
            missed.append(f"seed {seed}: entry {worst} off by {ratio[worst]:.1e} times the tolerance")
    assert not missed, f"{len(missed)} of {len(seeds)} problems of kind {kind!r}:\n" + "\n".join(missed[:20])


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:After 20 steps")  # the rates are high
@pytest.mark.filterwarnings("ignore:.*keeps what the model says with its adapters")  # which are not new
@pytest.mark.parametrize("name", golden.TRAININGS)
def test_trainings(name):
    for module in ("torch", "transformers", "peft")[: 3 if golden.TRAININGS[name][-1] else 1]:
        pytest.importorskip(module)
    np.testing.assert_allclose(golden.trained(*golden.TRAININGS[name]), TRAININGS[name], rtol=1e-6, atol=1e-9)
