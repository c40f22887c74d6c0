"""The tables in ``results/``, which commands have written, are pages that others link, not in the sidebar."""

from pathlib import PurePosixPath
from typing import Any

from sphinx.util.typing import ExtensionMetadata


def headed(app: Any, docname: str, source: list[str]) -> None:
    """Give a page of tables a title, the name of its file, and keep it out of the sidebar."""
    path = PurePosixPath(docname)
    if path.parts[0] == "results":
        name = path.parent.name if path.name == "table" else path.name
        title = name.replace("-", " ").replace("_", " ").capitalize()
        source[0] = f"---\norphan: true\n---\n\n# {title}\n\n{source[0]}"


def setup(app: Any) -> ExtensionMetadata:
    app.connect("source-read", headed)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
