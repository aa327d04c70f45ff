"""Settings of the documentation site; `make docs` builds it.

The source folder is the root of the repository, so that a relative link between pages is the same on GitHub and on the
site. Pages are those of `include_patterns`; docs/index.md orders them.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.search.en import SearchEnglish
from sphinx.util.nodes import make_refnode
from torch import nn

from polyhead.version import VERSION

project = "polyhead"
author = "The polyhead authors"
project_copyright = author
version = release = VERSION

extensions = ["myst_parser", "sphinx.ext.autodoc"]
smartquotes_action = "D"  # dashes; quotation marks stay as written
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "benchmarks/RESULTS.md",
    "docs/*.md",
    "docs/reference/*.rst",
    "docs/zh/*.md",
    "examples/README.md",
    "notebooks/README.md",
    "src/polyhead/sources/tiny/README.md",
    "tests/faults/results.md",
]
# Folders that are not searched for pages.
exclude_patterns = [".*", "build", "dist", "frontend", "src/polyhead/[!s]*", "src/polyhead/surgery"]

# ---- guides
myst_enable_extensions = ["html_image"]  # <img> with a width, which Markdown lacks
myst_heading_anchors = 4  # as on GitHub: [the section](page.md#the-section)

# ---- reference, from docstrings
nitpicky = True
PACKAGES = {page.stem for page in Path(__file__).parent.glob("reference/*.rst")}
default_role = "py:obj"
add_module_names = True
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "inherited-members": "Module,Exception,Protocol,Mapping,Sequence,tuple,dict,int",
    "exclude-members": "get_extra_state,set_extra_state",  # called by state_dict and load_state_dict
}

# ---- pages
html_theme = "furo"
html_title = "polyhead"
html_extra_path = ["site_root"]  # index.html, which leads to the page of root_doc
html_static_path = ["site_style"]
html_css_files = ["site.css"]
html_copy_source = False


@cache
def public_classes(env: BuildEnvironment) -> dict[str, set[tuple[str, str]]]:
    """Return the page and the anchor of each class, by its name without the module."""
    places: dict[str, set[tuple[str, str]]] = {}
    for name, entry in env.domains.python_domain.objects.items():
        if entry.objtype in ("class", "exception"):
            places.setdefault(name.rpartition(".")[2], set()).add((entry.docname, entry.node_id))
    return places


def link_code(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.Element
) -> nodes.Element | None:
    """Link `Name` in a docstring to the only public class of that name; other code is not a link.

    Nor is a type in a signature that is not public, or is of another library: only the packages of the reference export
    public names, and tests/test_reference.py checks that each has an entry.
    """
    if node["reftype"] == "class" and node["reftarget"].rpartition(".")[0] not in PACKAGES:
        return contnode
    if node["reftype"] != "obj":
        return None
    places = public_classes(env).get(node["reftarget"], ())
    if len(places) != 1:
        return contnode
    ((docname, anchor),) = places
    return make_refnode(app.builder, node["refdoc"], docname, anchor, contnode, node["reftarget"])


def list_no_members(app: Sphinx, domain: str, objtype: str, content: addnodes.desc_content) -> None:
    """Keep methods and attributes out of the table of contents beside the page, which lists classes and functions."""
    if objtype in ("attribute", "method", "property") and content.parent is not None:
        for signature in content.parent.findall(addnodes.desc_signature):
            signature["_toc_name"] = ""


class EnglishAndChinese(SearchEnglish):
    """Words for the search; Chinese, which is written without spaces, also in pairs of characters.

    The page matches a query of three characters or more anywhere in a word, a shorter one only with a whole word.
    """

    def split(self, input: str) -> list[str]:
        words = super().split(input)
        chinese = [run for word in words for run in re.findall(r"[\u4e00-\u9fff]{3,}", word)]
        return words + [run[start : start + 2] for run in chinese for start in range(len(run) - 1)]


def set_language(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.Node | None) -> None:
    """Declare the language of a Chinese page, by which browsers choose fonts and screen readers voices."""
    if page.endswith(".zh-CN") or page.startswith("docs/zh/"):
        context["language"] = "zh-CN"


def with_formulas(lines: list[str]) -> list[str]:
    """Mark indented paragraphs as code: a formula, a command or a line of a module."""
    marked: list[str] = []
    last, previous = "", ""  # the last line with text, and the line before
    for line in lines:
        if line.startswith("    ") and last and not last.startswith(" ") and not previous:
            marked += ["::", ""]
        marked.append(line)
        last, previous = line.rstrip() or last, line.strip()
    return marked


def google_sections(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Render Args, Returns, Raises and Example; leave out what PyTorch says of every `forward`.

    Without the extension napoleon, which reads the first words of "Number of heads: those of the config", in the
    docstring of a property, as the type of the property.
    """
    if inspect.getdoc(obj) == inspect.getdoc(getattr(nn.Module, name.rpartition(".")[2], None)):
        lines.clear()
    elif what not in ("attribute", "data", "property"):
        config = Config(napoleon_use_ivar=True)  # attributes have entries of their own already
        lines[:] = GoogleDocstring(with_formulas(lines), config, app, what, name, obj, options).lines()


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_search_language(EnglishAndChinese)
    app.connect("missing-reference", link_code)
    app.connect("autodoc-process-docstring", google_sections)
    app.connect("object-description-transform", list_no_members)
    app.connect("html-page-context", set_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
