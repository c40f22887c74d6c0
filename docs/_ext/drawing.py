"""Pictures with a file for light and one for dark pages: ``<picture>`` of Git hosts, or ``{drawing} name``.

On these pages a reader chooses light or dark by a button, which a ``<picture>`` does not see. So each becomes
two images, of which the theme shows one.
"""

import re
from html import unescape
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.transforms import Transform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

PICTURE = re.compile(r'(?s)<picture>.*?srcset="([^"]+)".*?<img src="([^"]+)" alt="([^"]+)"')


def both(light: str, dark: str, alt: str, classes: Any = ()) -> list[nodes.image]:
    """Return the images for light and for dark pages."""
    files = {"only-light": light, "only-dark": dark}
    return [nodes.image(uri=file, alt=alt, classes=[mode, *classes]) for mode, file in files.items()]


class Pictures(Transform):
    """Replaces each paragraph that is a ``<picture>`` by the two images."""

    default_priority = 100  # before images are collected

    def apply(self, **kwargs: Any) -> None:
        for paragraph in list(self.document.findall(nodes.paragraph)):
            parts = [part for part in paragraph.children if isinstance(part, nodes.raw)]
            found = PICTURE.match("".join(part.astext() for part in parts))
            if found:
                dark, light, alt = map(unescape, found.groups())
                paragraph.children = []
                paragraph += both(light, dark, alt)


class Drawing(SphinxDirective):
    """A figure with a file for light and one for dark pages; its alt text is the title of the files."""

    required_arguments = 1
    has_content = True
    option_spec = {"alt": directives.unchanged_required, "class": directives.class_option}  # noqa: RUF012

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        alt = self.options.get("alt") or title(Path(self.env.relfn2path(f"{name}-light.svg")[1]))
        if not alt:
            raise self.error(f"{name}-light.svg has no title, and no alt text is given")
        figure = nodes.figure(align="default")
        figure += both(f"{name}-light.svg", f"{name}-dark.svg", alt, self.options.get("class", []))
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
    app.add_transform(Pictures)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
