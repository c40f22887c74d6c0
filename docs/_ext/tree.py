"""The order of the pages, from ``page_tree`` in conf.py: in a page, it would show as code on a Git host.

``page_tree`` maps the captions of the sidebar to pages. A tuple is a page, then the pages below it.
"""

from collections.abc import Iterable
from typing import Any

from sphinx.util.typing import ExtensionMetadata


def block(pages: Iterable[str], caption: str = "") -> str:
    """Return the directive that puts pages below the one in which it stands."""
    named = f":caption: {caption}\n" if caption else ""
    return f"\n\n```{{toctree}}\n:hidden:\n{named}\n" + "\n".join(pages) + "\n```\n"


def blocks(tree: dict[str, list[Any]], root: str) -> dict[str, str]:
    """Return what is added to each page that has pages below it."""
    found = {root: ""}
    for caption, entries in tree.items():
        families = [entry if isinstance(entry, tuple) else (entry,) for entry in entries]
        found[root] += block([head for head, *_ in families], caption)
        found |= {head: block(below) for head, *below in families if below}
    return found


def append(app: Any, docname: str, source: list[str]) -> None:
    """Add the pages below a page to its text."""
    source[0] += blocks(app.config.page_tree, app.config.root_doc).get(docname, "")


def setup(app: Any) -> ExtensionMetadata:
    app.add_config_value("page_tree", {}, "env", dict)
    app.connect("source-read", append)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
