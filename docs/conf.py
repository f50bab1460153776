# SPDX-License-Identifier: Apache-2.0
"""Sphinx: pages of the public functions, from their docstrings. `sphinx-build -W docs build/docs` makes them."""

import fused_topk

project = "fused_topk"
version = release = fused_topk.__version__
html_theme = "alabaster"
exclude_patterns = ["*.md"]

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Contract"]
# The default role: what docstrings set between single backquotes is code, as in Markdown.
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [
    # Types of other projects, whose pages would have to be fetched to check links to them.
    (r"py:\w+", r"(torch|transformers|collections|contextlib|os)\..*|Tensor|optional"),
    # Parts of the package that users do not import.
    (r"py:\w+", r"whole_step|fused_topk\.generation\.choice\.warping\.Filter"),
]


def setup(app):
    # A named tuple's docstring describes its fields; each field's own docstring is "Alias for field number 0".
    app.connect("autodoc-skip-member", lambda app, kind, name, member, skip, options: _is_field(member) or skip)


def _is_field(member):
    return (getattr(member, "__doc__", None) or "").startswith("Alias for field number")
