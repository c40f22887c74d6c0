"""The examples run as they are."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")


pytestmark = pytest.mark.usefixtures("fresh_state")


def means(table):
    """The last column, by the name of the row."""
    names, last = table.columns[0], table.columns[-1]
    return {name: float(cell.rstrip("%")) for name, cell in zip(names.cells, last.cells, strict=True)}


def test_trainer_peft():
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from examples.trainer_peft import main

    assert list(means(main(steps=3))) == ["fine-tuning", 'GEM, on="gradient"', 'GEM, on="both"']


def test_accelerate_loop():
    from examples.accelerate_loop import main

    found = means(main(epochs=2))
    assert found['GEM, on="both"'] > 20 + found["fine-tuning"]
