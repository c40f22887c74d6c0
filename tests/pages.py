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
    r"(?ms)^(?P<indent> *)(?P<fence>`{3,})(?:(?P<language>python|pycon|output)|\{include\} (?P<file>snippets/\S+)) *\n"
    r"(?P<code>.*?)^ *(?P=fence) *$"
)


class Block(NamedTuple):
    """One code block, and where its code begins: the file, and the line (from 0)."""

    language: str
    code: str
    line: int
    file: Path


def blocks(page: Path) -> list[Block]:
    """All blocks that run or are compared, in the order of the page, those in tabs and snippets included."""
    text, found = page.read_text(), []
    for match in FENCE.finditer(text):
        if match["file"]:
            found += blocks(page.parent / match["file"])
            continue
        lines = match["code"].splitlines(keepends=True)
        indent = len(match["indent"])
        code = "".join(line[indent:] if line.strip() else "\n" for line in lines)
        found.append(Block(match["language"], code, text.count("\n", 0, match.start("code")), page))
    return found


def run(page: Path, names: dict | None = None) -> dict:
    """Run a page from top to bottom in one namespace, which is returned.

    A ``python`` block is executed, a ``pycon`` block is compared with its own output, and an ``output`` block is
    what the ``python`` block before it has printed.
    """
    names = {"__name__": "__main__"} if names is None else names
    compared = doctest.OutputChecker()
    printed = ""
    for language, code, line, file in blocks(page):
        linecache.cache.pop(str(file), None)
        where = f"{file.name}, line {line + 1}"
        if language == "output":
            assert compared.check_output(code, printed, FLAGS), f"{where}: printed was\n{printed}"
        elif language == "python":
            stdout = StringIO()
            # Line numbers are those of the file, and so tracebacks show its lines.
            program = compile("\n" * line + code, str(file), "exec")
            with redirect_stdout(stdout):
                exec(program, names)
            printed = stdout.getvalue()
        else:
            examples = doctest.DocTestParser().get_examples(code)
            assert examples, f"{where}: no line begins with >>>"
            test = doctest.DocTest(examples, {}, file.name, str(file), line, code)
            test.globs = names  # the constructor would copy them
            report = StringIO()
            doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.write, clear_globs=False)
            assert not report.getvalue(), report.getvalue()
    return names
