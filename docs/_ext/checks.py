"""Looks through the built pages: links to nowhere, pictures without words, formulas that were not set."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.errors import ExtensionError
from sphinx.util.typing import ExtensionMetadata

# Whose text is shown as it is written.
VERBATIM = {"pre", "code", "script", "style", "title", "annotation"}
VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


class Page(HTMLParser):
    """What is checked of one page: anchors, links, pictures without words, text with a backslash."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.faults: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {name for name in (found.get("id"), found.get("name")) if name}
        self.links |= {found[key] or "" for key in ("href", "src") if key in found}
        if tag == "img" and "alt" not in found:
            self.faults.append(f"the picture {found.get('src')} has no alt text")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while tag in self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "\\" in data and not VERBATIM & set(self._open):
            self.faults.append(f"a backslash in {' '.join(data.split())[:80]!r}: a formula that was not set?")


def faults(folder: Path) -> list[str]:
    """Return what is wrong with the pages of a folder, one line each."""
    ours = [path for path in sorted(folder.rglob("*.html")) if path.parent != folder / "benchmarks"]  # asv's
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in ours}
    found = []
    for path, page in pages.items():
        name = path.relative_to(folder).as_posix()
        found += [f"{name}: {fault}" for fault in page.faults]
        for link in sorted(page.links):
            scheme, host, to, _, anchor = urlsplit(link)
            if scheme or host:
                continue
            target = (path.parent / unquote(to)).resolve() if to else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                found.append(f"{name}: {link} is not there")
            elif "=" in anchor:  # a state, which a script reads
                continue
            elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
                found.append(f"{name}: no anchor {link}")
    for path in sorted(folder.glob("*.txt")):
        links = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8"))
        found += [f"{path.name}: {link} is not there" for link in links if not (folder / link).is_file()]
    return found


def missing(folder: Path) -> list[str]:
    """Return which files that the Markdown of a folder names, as links or pictures, are not there."""
    found = []
    for path in sorted(folder.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
        there = [link for link in links if not urlsplit(link).scheme]
        found += [f"{path.name}: {link} is not there" for link in there if not (folder / link).exists()]
    return found


def check(app, exception: Exception | None) -> None:
    """Fail a build of pages with faults, or beside a README with faults."""
    if exception is None and app.builder.name == "html":
        found = faults(Path(app.outdir).resolve()) + missing(Path(app.srcdir).parent)
        if found:
            raise ExtensionError("\n".join(["faults of the pages:", *found]))


def setup(app) -> ExtensionMetadata:
    app.connect("build-finished", check, priority=900)  # when all files are written
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
