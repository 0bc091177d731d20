"""Sphinx's settings for the website. docs/development/decisions.md says why it is Sphinx."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

import tenure

project = "Tenure"
author = "the Tenure maintainers"
version = release = tenure.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 6  # GitHub's anchors
default_role = "py:obj"  # so that `Node` in a docstring leads to Node

autoclass_content = "both"  # the settings of a node are described in its constructor
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = "Tenure"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_copyright = False
html_use_index = True
highlight_language = "none"  # a block without a language is a drawing or an output
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
html_theme_options = {"top_of_page_buttons": [], "light_css_variables": {"color-code-background": "#f6f8fa"}}


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", _sections)


def _sections(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Read `Args:` and `Raises:`.

    The extension `sphinx.ext.napoleon` would do it, but takes what stands before a colon in the docstring of a property
    for its type.
    """
    if what not in ("attribute", "data", "property"):
        lines[:] = GoogleDocstring(lines, Config(), what=what, name=name, obj=thing, options=options).lines()
