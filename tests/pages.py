"""The code blocks of a Markdown page: how to find them, and how to run them as a reader would."""

import doctest
import linecache
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
FENCE = re.compile(
    r"(?ms)^(?P<indent> *)(?P<fence>`{3,})(?P<language>python|pycon|output) *\n(?P<code>.*?)^ *(?P=fence) *$"
)


class Block(NamedTuple):
    """One code block, and the line where its code begins, from 0."""

    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    """All blocks that run or are compared, in the order of the page, those in other directives included."""
    text, found = page.read_text(), []
    for match in FENCE.finditer(text):
        lines = match["code"].splitlines(keepends=True)
        indent = len(match["indent"])
        code = "".join(line[indent:] if line.strip() else "\n" for line in lines)
        found.append(Block(match["language"], code, text.count("\n", 0, match.start("code"))))
    return found


def run(page: Path, names: dict | None = None) -> dict:
    """Run a page from top to bottom in one namespace, which is returned.

    A ``python`` block is executed, a ``pycon`` block is compared with its own output, and an ``output`` block is
    what the ``python`` block before it has printed.
    """
    names = {"__name__": "__main__"} if names is None else names
    compared = doctest.OutputChecker()
    printed = ""
    linecache.cache.pop(str(page), None)
    for language, code, line in blocks(page):
        where = f"{page.name}, line {line + 1}"
        if language == "output":
            assert compared.check_output(code, printed, FLAGS), f"{where}: printed was\n{printed}"
        elif language == "python":
            stdout = StringIO()
            # Line numbers are those of the file, and so tracebacks show its lines.
            program = compile("\n" * line + code, str(page), "exec")
            with redirect_stdout(stdout):
                exec(program, names)
            printed = stdout.getvalue()
        else:
            examples = doctest.DocTestParser().get_examples(code)
            assert examples, f"{where}: no line begins with >>>"
            test = doctest.DocTest(examples, {}, page.name, str(page), line, code)
            test.globs = names  # the constructor would copy them
            report = StringIO()
            doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.write, clear_globs=False)
            assert not report.getvalue(), report.getvalue()
    return names
