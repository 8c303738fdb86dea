"""How `make docs` builds the site: from the Markdown of the repository, docstrings and the help of commands.

The source folder is the repository, so that a link leads to the same file on the site and in the repository.
"""

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.parsers import Parser

from lockstep.cli.main import cli

os.environ.setdefault("KERAS_BACKEND", "jax")
# sphinx-click reads the commands that a group has.
cli.load_all()
ROOT = Path(__file__).parents[2]

# The home page is the README; this is the navigation beside it.
NAVIGATION = {
    "Start": ["docs/start", "docs/gallery"],
    "How to": [
        "docs/running",
        "docs/overnight",
        "docs/hosts",
        "docs/slow-links",
        "docs/cluster",
        "docs/ray",
        "docs/by-hand",
        "docs/notebooks",
        "docs/plain-scripts",
        "docs/every-worker",
        "docs/input",
        "docs/data",
        "docs/custom-loops",
        "docs/checkpoints",
        "docs/parameter-server",
        "docs/porting",
        "docs/from-horovod",
        "docs/from-torchrun",
        "docs/from-ray-train",
    ],
    "Reference": ["docs/api", "docs/commands", "docs/errors", "docs/run-folder"],
    "Explanation": ["docs/results", "docs/trust", "docs/reliability", "docs/scaling"],
    "Internals": ["docs/design", "docs/rooms", "docs/asynchronous", "docs/glossary"],
    "Operations": ["docs/operations", "docs/monitoring", "docs/doctor"],
    "Project": [
        "docs/benchmarks",
        "docs/compatibility",
        "docs/versions",
        "docs/versioning",
        "SECURITY",
        "CHANGELOG",
        "CONTRIBUTING",
    ],
    "Examples": sorted(
        str(file.relative_to(ROOT).with_suffix("")) for file in (ROOT / "examples").rglob("*.py")
    ),
}

project = "Lockstep"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
root_doc = "README"
source_suffix = {".md": "markdown", ".py": "python"}
include_patterns = ["*.md", "docs/*.md", "examples/**.py"]
exclude_patterns = ["site", "runs", ".*", "bench", "src", "tests"]

myst_heading_anchors = 6
default_role = "code"
smartquotes = False
highlight_language = "none"
# Sessions of shells contain output that no lexer understands; they are highlighted as far as possible.
suppress_warnings = ["misc.highlighting_failure"]

autodoc_default_options = {"members": True}
autoclass_content = "both"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = "Lockstep"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_additional_pages = {"index": "index.html"}
templates_path = ["."]
html_static_path = ["site.css"]
html_css_files = ["site.css"]


class ExampleParser(Parser):
    """Shows a Python file as a page: its code under its name."""

    supported = ("python",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        """Fill the document."""
        name = Path(document.current_source or "").name
        section = nodes.section(ids=[nodes.make_id(name)], names=[name])
        section += nodes.title(text=name)
        section += nodes.literal_block(text=inputstring, language="python")
        document += section


def add_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Append the navigation to the home page."""
    if docname == root_doc:
        for caption, pages in NAVIGATION.items():
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages) + "\n```\n"


def show_programs(app: Sphinx, docname: str, source: list[str]) -> None:
    """Show each program of the gallery below the link to it."""
    if docname == "docs/gallery":
        link = re.compile(r"^Program: \[\S+\]\((\S+)\)$", re.MULTILINE)
        source[0] = link.sub(r"\g<0>\n\n```{literalinclude} \1\n:language: python\n```", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register what is above."""
    app.add_source_parser(ExampleParser)
    app.connect("source-read", add_navigation)
    app.connect("source-read", show_programs)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
