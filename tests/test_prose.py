"""Pages are easy to read: short sentences, short paragraphs, code that is not cut off at the right."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    page for page in sorted(DOCS.rglob("*.md")) if not {"results", "_build", "paper.md"} & set(page.parts)
]
NAMES = [page.relative_to(DOCS).as_posix() for page in PAGES]
FENCE = re.compile(r"(?ms)^ *(`{3,})(\S*)[^\n]*\n(.*?)^ *\1 *$")
MOST_WORDS_OF_A_SENTENCE, MOST_WORDS_OF_A_PARAGRAPH, COLUMNS = 30, 80, 80


def paragraphs(text):
    """Return the prose of a page by paragraphs and items, with each formula and piece of code as one word."""
    text = re.sub(r"(?s)\A---\n.*?\n---\n|\$\$.*?\$\$", "\n\n", FENCE.sub("\n\n", text))
    text = re.sub(r"(?m)^(#|\||:{3,}|:[\w-]+:|%|\().*$", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`|\$[^$]*\$", "Code", text)
    parts = re.split(r"\n\s*\n|\n(?=\s*[-*] )|\n(?=: )|\n(?=\d+\. )", text)
    return [" ".join(part.split()) for part in parts if part.split()]


def sentences(paragraph):
    return re.split(r"(?<=[.!?:;])[*\"')]*\s+", paragraph)


@pytest.mark.parametrize("name", NAMES)
def test_sentences_and_paragraphs_are_short(name):
    found = paragraphs((DOCS / name).read_text())
    long = [part for part in found if len(part.split()) > MOST_WORDS_OF_A_PARAGRAPH]
    assert not long, f"paragraphs of more than {MOST_WORDS_OF_A_PARAGRAPH} words"
    long = [s for part in found for s in sentences(part) if len(s.split()) > MOST_WORDS_OF_A_SENTENCE]
    assert not long, f"sentences of more than {MOST_WORDS_OF_A_SENTENCE} words"


@pytest.mark.parametrize("name", NAMES)
def test_code_fits_the_page(name):
    blocks = FENCE.finditer((DOCS / name).read_text())
    code = [block[3] for block in blocks if not block[2].startswith("{")]
    wide = [line for text in code for line in text.splitlines() if len(line) > COLUMNS]
    assert not wide, f"lines of code of more than {COLUMNS} columns"


def test_what_is_long_is_found():
    long = " ".join(["word"] * 31)
    assert [len(s.split()) for s in sentences(f"Short. {long}. [{long}](page.md)")] == [1, 31, 31]
    assert paragraphs(f"```python\n{long}\n```\n\n# {long}\n\nOne `{long}` word.") == ["One Code word."]
