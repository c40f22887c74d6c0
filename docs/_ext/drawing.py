"""``{drawing} name``: name-light.svg and name-dark.svg as one figure, the text below as its caption."""

from html import unescape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata


class Drawing(SphinxDirective):
    """A figure with a file for light and one for dark pages; its alt text is the title of the files."""

    required_arguments = 1
    has_content = True
    option_spec = {"alt": directives.unchanged_required, "class": directives.class_option}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        alt = self.options.get("alt") or title(Path(self.env.relfn2path(f"{name}-light.svg")[1]))
        figure = nodes.figure(align="default")
        for mode in ("light", "dark"):
            classes = [f"only-{mode}", *self.options.get("class", [])]
            figure += nodes.image(uri=f"{name}-{mode}.svg", alt=alt, classes=classes)
        if not alt:
            raise self.error(f"{name}-light.svg has no title, and no alt text is given")
        if self.content:
            text = nodes.Element()
            self.state.nested_parse(self.content, self.content_offset, text)
            figure += nodes.caption("", "", *text[0].children)
        self.set_source_info(figure)
        return [figure]


def title(file: Path) -> str:
    """Return the title of an SVG file."""
    return unescape(file.read_text(encoding="utf-8").partition("<title>")[2].partition("</title>")[0])


def setup(app: Any) -> ExtensionMetadata:
    app.add_directive("drawing", Drawing)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
