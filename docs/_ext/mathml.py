"""Formulas as MathML, written when the pages are built: they need no script, no font and no network."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.errors import ExtensionError
from sphinx.util.typing import ExtensionMetadata

WORDS_ON_PURPOSE = re.compile(r"\\(text|mathrm|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")


def mathml(latex: str, display: str = "inline") -> str:
    """Return one formula as a ``math`` element; raise where it is prose, or cannot be converted."""
    if re.search(r"[A-Za-z]{4,}\s+[A-Za-z]{4,}", WORDS_ON_PURPOSE.sub("", latex)):
        raise ExtensionError(
            f"prose in the formula {latex!r}: a $$ in the middle of a paragraph, or one $ too many?"
        )
    try:
        # The converter has no \arg.
        result = convert(re.sub(r"\\arg\b", r"\\operatorname{arg}", latex), display=display)
    except Exception as error:
        raise ExtensionError(f"cannot convert the formula {latex!r}: {error!r}") from error
    if "\\" in result:
        raise ExtensionError(f"a command is not known in the formula {latex!r}: {result}")
    # The bars of a norm are as high as each other: one with an exponent would not stretch with its partner.
    return result.replace("<mo>&#x02016;</mo>", '<mo stretchy="false">&#x02016;</mo>')


def visit_inline(translator, node: nodes.math) -> None:
    translator.body.append(f'<span class="math">{mathml(node.astext())}</span>')
    raise nodes.SkipNode


def visit_block(translator, node: nodes.math_block) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(mathml(node.astext(), "block") + "</div>\n")
    raise nodes.SkipNode


def setup(app) -> ExtensionMetadata:
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
