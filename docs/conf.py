# SPDX-License-Identifier: Apache-2.0
"""Sphinx: the pages of docs/*.md and those of the public functions. `sphinx-build -W docs build/docs` makes them."""

import re
from pathlib import Path

from sphinx.addnodes import pending_xref

import fused_topk

DOCS = Path(__file__).parent

project = html_title = "fused_topk"
version = release = fused_topk.__version__
html_theme = "furo"
html_show_sourcelink = html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["tables.css"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# Links to headings, as repository hosts make them.
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# A long signature has a line for each parameter.
maximum_signature_line_length = 88
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


# Documents that lie elsewhere in the repository, and the pages that include them.
_PAGES = {
    str((page.parent / path).resolve().with_suffix("")): page.relative_to(DOCS).with_suffix("").as_posix()
    for page in DOCS.rglob("*.md")
    for path in re.findall(r"^```{include} (\S+)$", page.read_text(), re.MULTILINE)
}


def setup(app):
    app.connect("doctree-read", _link_pages)
    app.connect("autodoc-process-signature", _without_gone)
    # A named tuple's docstring describes its fields; each field's own docstring is "Alias for field number 0".
    app.connect("autodoc-skip-member", lambda app, kind, name, member, skip, options: _is_field(member) or skip)


def _link_pages(app, doctree):
    """A link to a document elsewhere, which the repository's host follows, leads to its page."""
    for link in doctree.findall(pending_xref):
        link["reftarget"] = _PAGES.get(link["reftarget"], link["reftarget"])


def _without_gone(app, kind, name, member, options, signature, returned):
    """`**gone` is there for an error that names an old argument."""
    return re.sub(r", \*\*gone: [~\w.]+", "", signature or "") or signature, returned


def _is_field(member):
    return (getattr(member, "__doc__", None) or "").startswith("Alias for field number")
