"""The examples run as they are."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")


pytestmark = pytest.mark.usefixtures("fresh_state")


def means(table):
    """The last column, by the name of the row."""
    names, last = table.columns[0], table.columns[-1]
    return {name: float(cell.rstrip("%")) for name, cell in zip(names.cells, last.cells, strict=True)}


@pytest.mark.parametrize("name", sorted(f.stem for f in Path(__file__).parents[1].glob("examples/[a-z]*.py")))
def test_tiny_models_are_trained_by_one_thread(name):
    """More threads wait for each other, ten times as long beside a busy core."""
    text = (Path(__file__).parents[1] / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert "    torch.set_num_threads(1)" in text.split('if __name__ == "__main__":')[1]


def test_trainer_peft(capsys):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    from examples.trainer_peft import main

    assert list(means(main(steps=3))) == ["fine-tuning", 'GEM, on="gradient"', 'GEM, on="both"']
    assert capsys.readouterr().out.count(": 3 tasks of 3 steps ...") == 3  # before the table, as it goes


def test_accelerate_loop(capsys):
    from examples.accelerate_loop import main

    found = means(main(epochs=2))
    assert capsys.readouterr().out.count(": 3 tasks of 2 epochs ...") == 3
    assert found['GEM, on="both"'] > 20 + found["fine-tuning"]
