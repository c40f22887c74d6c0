"""docs/faq.md: the messages that it quotes are those of the library."""

import ast
import re
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEADINGS = re.findall(r"(?m)^### (.*)$", (ROOT / "docs" / "faq.md").read_text())
QUOTED = [message for heading in HEADINGS for message in re.findall(r'"([^"]+)"', heading)]
MOST_VARYING = 3  # words of a message that differ from case to case, such as names and numbers


def words(text):
    return re.findall(r"[^\W\d]\w*", text)


@cache
def messages():
    """Return the words of all texts in the source of the library, without what is filled in."""
    found = []
    for path in (ROOT / "gemproj").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [part.value for part in parts if isinstance(part, ast.Constant)]
            found.append(words(" ".join(text for text in texts if isinstance(text, str))))
    return found


def known(message):
    """Return how many words of a message stand in one text of the library, in this order, at most."""
    matchers = (SequenceMatcher(None, text, words(message), autojunk=False) for text in messages() if text)
    return max(sum(block.size for block in matcher.get_matching_blocks()) for matcher in matchers)


def test_messages_are_quoted():
    assert len(QUOTED) > 12


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_library(message):
    for part in re.split(r"\.\.\. |;", message):
        assert known(part) >= len(words(part)) - MOST_VARYING
        assert known(part) >= 0.5 * len(words(part))
