"""The README and the pages: code runs as it is printed, in order; text is easy to read, and numbers have a source.

A ``python`` block is executed; a ``pycon`` block shows its output, which is compared; an ``output`` block right
after a ``python`` block is what that printed, with ``...`` for what differs from machine to machine. All blocks of
one page share their names, so a page that needs a model shows how it is made ("Setup"). ``diff`` and ``console``
blocks do not run.
"""

import ast
import re
import sys
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import pytest
from pages import blocks, run

ROOT = Path(__file__).parent.parent
DOCS, PACKAGE = ROOT / "docs", ROOT / "gemproj"
README = ROOT / "README.md"
WRITTEN = sorted(DOCS.glob("*.md"))
PLAIN = [README, *sorted({ROOT / link for link in re.findall(r"\]\((docs/\w+\.md)", README.read_text())})]
NEEDS = {
    "docs/frameworks.md": "lightning",
    "docs/keep_chat.md": "transformers",
    "docs/migrate.md": "quadprog torchjd",
    "docs/training.md": "trl",
}
sys.path.append(str(DOCS))


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [*filter(blocks, [README, *WRITTEN])], ids=name)
def test_the_page_runs(page, tmp_path, monkeypatch, one_thread):
    for module in NEEDS.get(name(page), "").split():
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of texts that a model writes
    run(page)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```\n\n```output\n2\n```\n",
        "```output\n1\n```\n",
        "```pycon\n>>> 1 + 1\n3\n```\n",
        "```pycon\n1 + 1\n```\n",
        "````{tab-set}\n```{tab-item} A\n```\n````\n\n  ```python\n  x = [1,\n\n       2]\n  ```\n\n````python\nassert not x\n````\n",
    ],
)
def test_what_differs_from_the_page_fails(text, tmp_path):
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(AssertionError) as raised:
        run(tmp_path / "page.md")
    if "assert" in text:  # errors show the line of the page
        assert (raised.traceback[-1].path, raised.traceback[-1].lineno) == (tmp_path / "page.md", 12)


FENCE = re.compile(r"(?ms)^ *(`{3,})(\S*)[^\n]*\n(.*?)^ *\1 *$")


def paragraphs(text):
    """Return the prose of a page by paragraphs and items, with each formula and piece of code as one word."""
    text = re.sub(r"(?s)\A---\n.*?\n---\n|\$\$.*?\$\$", "\n\n", FENCE.sub("\n\n", text))
    text = re.sub(r"(?m)^(#|\||:{3,}|:[\w-]+:|%|\().*$", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`|\$[^$]*\$", "Code", text)
    return filter(None, map(str.strip, re.split(r"\n\s*\n|\n(?=\s*[-*] )|\n(?=: )|\n(?=\d+\. )", text)))


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_sentences_and_paragraphs_are_short(page):
    for part in paragraphs(page.read_text()):
        assert len(part.split()) <= 80
        assert all(len(sentence.split()) <= 30 for sentence in re.split(r"(?<=[.!?:;])[*\"')]*\s+", part))


def test_code_fits_the_page():
    for page in (*WRITTEN, *DOCS.glob("results/**/*.md")):
        written, found = page in WRITTEN, FENCE.finditer(page.read_text())
        code = "\n".join(block[3] for block in found if not (written and block[2].startswith("{")))
        assert [line for line in code.splitlines() if len(line) > (80 if written else 86)] == [], page.name


def anchors(page):
    """Return the anchors of a page's headings, as Git hosts make them."""
    headings = re.findall(r"(?m)^#+ (.*)$", FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PLAIN, ids=name)
def test_what_readme_links_can_be_read_on_a_git_host(page):
    """No directives, no HTML but folds and pictures, and links only to what is in the repository."""
    text = page.read_text()
    assert re.findall(r"(?m)^ *`{3,}\{.*|^ *:{3,}.*|\A---$", text) == []
    prose = re.sub(r"`[^`\n]*`|<!--.*?-->", "", FENCE.sub("", text))
    assert set(re.findall(r"</?([a-z]+)", prose)) <= {"details", "summary", "picture", "source", "img"}
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|srcset)="([^"]+)"', prose)
    for path, _, anchor in (link.partition("#") for link in links if "://" not in link):
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{path} is not there"
        assert "gallery_pages" not in target.parts, f"{path} is built"
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), f"{path} has no {anchor}"


def numbers(text):
    return re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?![\w])", text)


def stands_in(number, others):
    """Whether a number is one of the others, or one of them rounded."""
    value, _, decimals = number.replace(",", "").partition(".")
    for other in (one.replace(",", "") for one in others):
        digits = len(other.partition(".")[2])
        if float(other) == float(number.replace(",", "")):
            return True
        rounded = f"{float(other):.{len(decimals)}f}"
        if decimals and digits > len(decimals) and rounded == f"{value}.{decimals}":
            return True
    return False


def test_a_number_without_a_source_is_found():
    assert stands_in("1.8", ["1.77"])
    assert stands_in("27", ["27.0"])
    assert not stands_in("1.8", ["1.9", "18"])
    assert not stands_in("28", ["27.6"])


LINK = re.compile(r"\]\(([^)#]+\.md)")
SETTINGS = {"16", "256", "0.05"}  # defaults


def results(page):
    """Return the results that a page links, or the page itself if it is one."""
    linked = {(page.parent / link).resolve() for link in LINK.findall(page.read_text())}
    return {page} if "results" in page.parts else {one for one in linked if "results" in one.parts}


def test_numbers_of_readme_stand_in_a_result_that_their_paragraph_links():
    """If it links none, in one of its section. What code prints, and pictures show, is compared elsewhere."""
    text, seen = re.sub(r"Python \d\.\d+|<picture.*", "", FENCE.sub("", README.read_text())), 0
    for section in re.split(r"(?m)^##? ", text):
        every = [ROOT / link for link in LINK.findall(section)]
        for part in re.split(r"\n\n|\n(?=- )", section):
            own = [ROOT / link for link in LINK.findall(part) if "/results/" in link]
            linked = [one.read_text() for page in own or every for one in results(page)]
            there = [number for one in linked for number in numbers(one)]
            for number in set(numbers(LINK.sub("]", part))) - SETTINGS:
                seen += 1
                assert stands_in(number, there), f"{number} stands in no result of {part[:80]!r}"
    assert seen > 40


def test_the_pages_are_few_and_short():
    assert len(README.read_text().splitlines()) <= 90
    assert len(WRITTEN) <= 24
    assert sum(len(page.read_text().split()) for page in WRITTEN) <= 18_000


def test_tables_are_those_of_the_results():
    from tables import copied

    for page in WRITTEN:
        assert copied(page.read_text()) == page.read_text(), f"{page.name}: run python docs/tables.py"


def test_the_first_picture_shows_the_recorded_drifts():
    pytest.importorskip("peft")
    from examples.common.results import Results
    from examples.keep_chat import report

    records = list(Results(DOCS / "results/keep-chat/runs.jsonl").records.values())
    shown = report.compared(records)
    assert len({(one["skill"], one["seed"]) for one in shown}) == 10
    ends = {}
    for one in shown:
        ends.setdefault((one["kind"], one["value"]), []).append(one["held_out"])
    ends = {key: f"{min(values):.3f} to {max(values):.3f}" for key, values in ends.items()}
    kept = [(value, text) for (kind, value), text in sorted(ends.items()) if kind == "promise"]
    asked = [f"asked for {value:g}, it was {text}" for value, text in kept]
    others = f"with a KL term of weight 1, {ends['outputs', 1.0]}; without, {ends['plain', 0.0]} nats"
    for page in (README, DOCS / "index.md", DOCS / "keep_chat.md"):
        assert f"{'; '.join(asked)}; {others} per token." in page.read_text()


def test_pages_say_in_the_same_words_what_gemproj_is():
    """Both parts of the package's description stand in each of them."""
    description = re.search(r'(?m)^description = "(.*): (.*)\."', (ROOT / "pyproject.toml").read_text())
    for page in (README, DOCS / "index.md", DOCS / "llms.txt", ROOT / "conda/recipe.yaml"):
        text = re.sub(r"[\s>]+", " ", page.read_text())
        assert [part for part in description.groups() if part not in text] == [], page.name


def words(text):
    return re.findall(r"[^\W\d]\w*", text)


@cache
def messages():
    """Return the words of all texts in the source of the library, without what is filled in."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = (part.value for part in parts if isinstance(part, ast.Constant))
            found.append(words(" ".join(text for text in texts if isinstance(text, str))))
    return [text for text in found if text]


HEADINGS = "".join(re.findall(r"(?m)^### (.*)$", (DOCS / "faq.md").read_text()))


@pytest.mark.parametrize("message", re.findall(r'"([^"]+)"', HEADINGS))
def test_a_message_that_the_faq_quotes_is_one_of_the_library(message):
    """Up to three words of it differ from case to case, such as names and numbers."""
    for part in re.split(r"\.\.\. |;", message):
        matchers = (SequenceMatcher(None, text, words(part), autojunk=False) for text in messages())
        known = max(sum(block.size for block in matcher.get_matching_blocks()) for matcher in matchers)
        assert known >= max(len(words(part)) - 3, 0.5 * len(words(part)))


def trees():
    """Return for each tree of docs/contributing.md its files with their depths."""
    texts = re.findall(r"(?ms)^```text\n(.*?)^```", (DOCS / "contributing.md").read_text())
    found = [re.findall(r"(?m)^( *)([\w/]+\.py)  *\S", text) for text in texts]
    return [[(len(indent) // 2, file) for indent, file in tree] for tree in found if tree]


def test_each_file_of_a_tree_is_imported_by_the_one_above():
    assert [tree[0][1] for tree in trees()] == ["_project.py", "torch/keeper.py"]
    for tree in trees():
        above = []
        for depth, file in tree:
            del above[depth:]
            module = Path(file).parent.name if Path(file).stem == "__init__" else Path(file).stem
            text = (PACKAGE / above[-1]).read_text() if above else module
            assert re.search(rf"\b{module}\b", text), f"{above[-1]} does not import {file}"
            above.append(file)
    named = {file for tree in trees() for _, file in tree}
    core = {path.name for path in PACKAGE.glob("_*.py")} - {"__init__.py", "__main__.py", "_selfcheck.py"}
    assert core - named == {"_constants.py", "_tspace.py"}, "what all others use stands in no tree"
