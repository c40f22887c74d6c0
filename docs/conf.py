"""Sphinx configuration."""

import sys
from pathlib import Path

from numpydoc.xref import DEFAULT_LINKS

import gemproj

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "gemproj"
author = "The gemproj developers"
copyright = "2026, the gemproj developers"
version = release = gemproj.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "asv_pages",
    "checks",
    "drawing",
    "mathml",
    "results",
    "tree",
]
exclude_patterns = ["_build", "gallery"]  # the gallery is built in gallery_pages

# The sidebar: at most fifteen entries. A tuple is a page, then the pages below it.
page_tree = {
    "Start": [
        "keep_chat",
        ("training", "api_training"),
        "promises",
        "safety",
        ("frameworks", "api_frameworks"),
        "cost",
        "faq",
    ],
    "Evidence": ["replay", ("study", "demo", "boards")],
    "The projection": [
        ("project", "gallery_pages/index", "api_solver"),
        "migrate",
        "accuracy",
        "how_it_works",
        "performance",
    ],
    "The project": [("contributing", "tested_versions", "changelog")],
}

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
numpydoc_show_class_members = False
autodoc_typehints = "none"  # the docstrings say it better

# Names in docstrings become links: our own, and those of others that the inventories list, text files written
# by hand, so that a build needs no network.
default_role = "py:obj"
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "inventories/python.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable", "inventories/torch.txt"),
}
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {word: word for word in DEFAULT_LINKS}  # no links for int, str, array and the like
for name in ["Gram", "Method"]:
    numpydoc_xref_aliases[name] = f"gemproj.{name}"
for name in ["Keeper", "PerExample", "Projection", "Promise"]:
    numpydoc_xref_aliases[name] = f"gemproj.torch.{name}"
for line in (Path(__file__).parent / "inventories/torch.txt").read_text(encoding="utf-8").splitlines()[3:]:
    name = line.split()[0]
    numpydoc_xref_aliases[name] = f":obj:`{name}`"

html_math_renderer = "mathml"

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "gallery_pages",
    "filename_pattern": r"plot_.*\.py$",
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("looks.scrape",),
    "reset_modules": ("looks.reset",),
    "copyfile_regex": "",
    "backreferences_dir": "gallery_pages/uses",
    "doc_module": ("gemproj",),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 10**6,
    "write_computation_times": False,
}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-output) > div.highlight > pre"

html_theme = "furo"
html_title = f"gemproj {release}"
html_static_path = ["_static"]
html_favicon = "_static/icon.svg"
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5e9c", "color-brand-content": "#0b5e9c"},
    "dark_css_variables": {"color-brand-primary": "#6cb6f0", "color-brand-content": "#6cb6f0"},
}
