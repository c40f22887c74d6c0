"""Sphinx configuration."""

import gemproj

project = "gemproj"
author = "The gemproj developers"
copyright = "2026, the gemproj developers"
version = release = gemproj.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
]
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
autosummary_generate = True
numpydoc_show_class_members = False
autodoc_typehints = "none"  # the docstrings say it better
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"gemproj {release}"
