"""How Sphinx makes the site: `make docs`. The sources are the Markdown files of the repository.

Pages link to files by their paths, as on GitHub. So the source folder is the repository, of which
Sphinx takes what `include_patterns` names.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

from sphinx.util.inspect import signature, stringify_signature

ROOT = Path(__file__).parents[1]
# models/ and train/, whose flags have a page, are run from the repository.
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

project = "collective_matmul"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "benchmarks/reports/**"]
exclude_patterns = ["docs/examples/**", "docs/templates/**"]
# Autosummary looks for relative paths in the source folder, and the builder in this one.
templates_path = [str(ROOT / "docs/templates")]

# Anchors of headings, as GitHub makes them.
myst_heading_anchors = 4

# Docstrings name functions and arguments in single backticks. What has a page becomes a link.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autosummary_imported_members = True
# Attributes are described in the docstring of their class.
napoleon_use_ivar = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "collective_matmul"
html_copy_source = False


def setup(app: Any) -> None:
    """Connects what this file adds to Sphinx."""
    # Pages of names that there are no longer would be built again.
    shutil.rmtree(ROOT / "docs/reference/generated", ignore_errors=True)
    app.connect("autodoc-process-docstring", escape_stars)
    app.connect("autodoc-process-signature", constructor_signature)
    app.connect("autodoc-skip-member", is_tuple_field)
    app.connect("source-read", add_flags)
    app.connect("build-finished", add_front_page)


def escape_stars(*event: Any) -> None:
    """Keeps the stars of shapes such as [K, *N], which are emphasis in reStructuredText."""
    lines: list[str] = event[-1]
    is_literal = False
    for number, line in enumerate(lines):
        if line.strip():
            # A literal block is indented, and ends with the next line that is not.
            is_literal &= line.startswith(" ")
            if not is_literal:
                lines[number] = re.sub(r"(?<=[\[ ])\*(?=[\w,\]])", r"\\*", line)
            is_literal |= line.endswith("::")


def constructor_signature(
    app: Any, what: str, name: str, member: Any, *event: Any
) -> tuple[str, str] | None:
    """Shows the arguments of nnx modules: their metaclass takes any."""
    if what != "class" or type(member).__call__ is type.__call__:
        return None
    return stringify_signature(
        signature(member.__init__, bound_method=True), unqualified_typehints=True
    ), ""


def is_tuple_field(*event: Any) -> bool | None:
    """Leaves out the fields of named tuples, whose docstrings are Python's own."""
    return True if type(event[3]).__name__ == "_tuplegetter" else None


def add_flags(app: Any, page: str, source: list[str]) -> None:
    """Appends the tables of all flags to their page."""
    if page == "docs/reference/flags":
        import flag_tables

        source[0] += flag_tables.pages()


def add_front_page(app: Any, exception: Exception | None) -> None:
    """Makes a front page that leads to the index, which is in a folder."""
    if exception is None:
        front = '<meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        (Path(app.outdir) / "index.html").write_text(front, encoding="utf-8")
