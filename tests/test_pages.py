"""Every Python block of the README and of every page runs as it is printed, in order.

What a page may do: a ``python`` block is executed; a ``pycon`` block shows its output, which is compared; an
``output`` block right after a ``python`` block is what that printed, with ``...`` for what differs from machine to
machine. All blocks of one page share their names, so a page that needs a model shows how it is made ("Setup").
``diff`` and ``console`` blocks do not run.
"""

from pathlib import Path

import pytest
from pages import blocks, run

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if not {"_build", "results"} & set(page.parts) and blocks(page)]
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
NEEDS = {
    "docs/catastrophic_forgetting.md": "transformers",
    "docs/continued_pretraining.md": "transformers",
    "docs/frameworks.md": "lightning trl",
    "docs/migrate.md": "quadprog",
    "docs/multi_task.md": "torchjd",
    "docs/safety.md": "transformers",
    "docs/training.md": "lightning trl",
}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_runs(name, tmp_path, monkeypatch, one_thread):
    for module in NEEDS.get(name, "").split():
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    run(ROOT / name)


def page(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def test_blocks_in_tabs_run_in_order(tmp_path):
    text = "````{tab-set}\n```{tab-item} A\n```\n````\n\n  ```python\n  x = [1,\n\n       2]\n  ```\n\n````python\ny = len(x)\n````\n"
    assert run(page(tmp_path, text))["y"] == 2


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n\n```output\n2\n```\n",
        "```output\n1\n```\n",
        "```pycon\n>>> 1 + 1\n3\n```\n",
        "```pycon\n1 + 1\n```\n",
    ],
)
def test_what_differs_from_the_page_fails(text, tmp_path):
    with pytest.raises(AssertionError):
        run(page(tmp_path, text))


def test_errors_show_the_line_of_the_page(tmp_path):
    broken = page(tmp_path, "# Title\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as raised:
        run(broken)
    assert raised.traceback[-1].path == broken
    assert raised.traceback[-1].lineno == 4
