"""What a build of the pages refuses: formulas that are prose, links that lead nowhere, pictures without words."""

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("latex2mathml")
from docutils import nodes
from docutils.utils import new_document
from sphinx.errors import ExtensionError

DOCS = Path(__file__).parents[1] / "docs"
sys.path.append(str(DOCS / "_ext"))
from checks import faults, missing  # noqa: E402
from mathml import mathml  # noqa: E402


@pytest.mark.parametrize(
    ("latex", "message"),
    [
        ("where rows without an upper bound contribute", "prose"),
        (r"\lambda without bounds", "prose"),
        (r"\nosuchcommand x", "not known"),
        (r"\frac{", "cannot convert"),
    ],
)
def test_what_is_no_formula_is_refused(latex, message):
    assert "<mfrac>" in mathml(r"\tfrac12 (x-g)^\top W (x-g) \quad\text{subject to some} Gx \ge h", "block")
    with pytest.raises(ExtensionError, match=message):
        mathml(latex)


GOOD = """<p id="here">a <a href="#here">link</a>, <a href="b.html#there">another</a>, <a href="b.html#x=1">a state</a>,
<a href="https://example.org/x">elsewhere</a>, <code>\\n</code> <img src="c.svg" alt="a cone"></p><pre>\\n</pre>"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD, []),
        ('<a href="b.html#gone">', ["a.html: no anchor b.html#gone"]),
        ('<a href="gone.html">', ["a.html: gone.html is not there"]),
        ('<img src="c.svg">', ["a.html: the picture c.svg has no alt text"]),
        ("<p>\\lambda</p>", ["a.html: a backslash in '\\\\lambda': a formula that was not set?"]),
    ],
)
def test_faults_of_a_page(tmp_path, text, expected):
    (tmp_path / "a.html").write_text(text)
    (tmp_path / "b.html").write_text('<h1 id="there">')
    (tmp_path / "c.svg").write_text("<svg/>")
    (tmp_path / "llms.txt").write_text("- [A](a.html)\n- [D](d.html)\n- [C](https://example.org)\n")
    assert faults(tmp_path) == [*expected, "llms.txt: d.html is not there"]
    text = '[a](a.html#b) [c](https://example.org) [d](#e) <img src="docs/f.svg">'
    (tmp_path / "README.md").write_text(text)
    assert missing(tmp_path) == ["README.md: docs/f.svg is not there"]


def test_figures_come_for_light_and_for_dark_pages(tmp_path):
    looks = pytest.importorskip("looks", reason="needs matplotlib and torch")
    with looks.plt.rc_context(looks.STYLE):
        figure, axes = looks.plt.subplots()
        axes.plot([0, 1], color="C0")
        figure.set_label("A line & no more")
        light, dark = (file.read_text() for file in looks.write(figure, tmp_path / "figure"))
        looks.plt.close(figure)
    pairs = [looks.INK, looks.LINES, looks.COLOURS["C0"]]
    assert all(day in light and night not in light for day, night in pairs)
    assert all(night in dark and day not in dark for day, night in pairs)
    assert "#ffffff" not in light + dark  # no ground of its own
    assert importlib.import_module("drawing").title(tmp_path / "figure-light.svg") == "A line & no more"


def test_a_picture_of_a_git_host_becomes_one_for_each_theme():
    drawing = importlib.import_module("drawing")
    text = '<picture><source srcset="a-dark.svg"><img src="a-light.svg" alt="x &lt; y"></picture>'
    document = new_document("page")
    document += nodes.paragraph("", "", *(nodes.raw("", part) for part in re.split("(?=<)", text) if part))
    document += nodes.paragraph("", "no picture")
    drawing.Pictures(document).apply()
    light, dark = document[0].children
    assert (light["uri"], light["alt"], light["classes"]) == ("a-light.svg", "x < y", ["only-light"])
    assert (dark["uri"], dark["classes"]) == ("a-dark.svg", ["only-dark"])
    assert document[1].astext() == "no picture"


def test_the_sidebar_has_all_pages_in_at_most_fifteen_entries():
    code = ast.parse((DOCS / "conf.py").read_text()).body
    [given] = [line for line in code if isinstance(line, ast.Assign) and line.targets[0].id == "page_tree"]
    page_tree = ast.literal_eval(given.value)
    assert sum(map(len, page_tree.values())) <= 15
    named = " ".join(importlib.import_module("tree").blocks(page_tree, "index").values()).split()
    pages = {page.stem for page in DOCS.glob("*.md")} - {"index"}
    assert pages <= set(named)
    assert named.count("faq") == named.count("demo") == 1


@pytest.mark.parametrize(("mode", "ground"), [(0, "ffffff"), (1, "131416")])
def test_colours_of_the_figures_have_contrast(mode, ground):
    looks = pytest.importorskip("looks", reason="needs matplotlib and torch")
    contrast = pytest.importorskip("test_cone").contrast
    for pair in [looks.INK, looks.FAINT, *looks.COLOURS.values()]:
        assert contrast(list(bytes.fromhex(pair[mode][1:])), list(bytes.fromhex(ground))) >= 4.5, pair


def test_recorded_benchmarks_can_be_read_and_are_linked():
    asv_pages = pytest.importorskip("asv_pages", reason="needs matplotlib and torch")
    runs = asv_pages.recorded()
    assert len(runs) >= 2
    for run in runs:
        for name in asv_pages.PANELS:
            assert run["values"][name]["'exact'", "9", str(asv_pages.LORA)] > 0
    text = (DOCS / "tested_versions.md").read_text()
    assert f"{{drawing}} {asv_pages.FIGURE.as_posix()}" in text
    assert '<a href="benchmarks/index.html">' in text


@pytest.mark.parametrize(
    "script", sorted((DOCS / "gallery").glob("plot_*.py")), ids=lambda script: script.stem
)
def test_a_figure_of_the_gallery_has_words(script):
    text = script.read_text()
    assert text.count("figure.set_label(") == text.count("plt.subplots(") == 1
