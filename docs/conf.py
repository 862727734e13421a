"""The site: `./dev docs` builds it, without a warning, into build/site. Pages are Markdown; the API is docstrings."""

from __future__ import annotations

import importlib.util
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx.util.inspect import signature as signature_of
from sphinx.util.inspect import stringify_signature

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "safepoint"
author = "The safepoint authors"
project_copyright = author
try:
    release = metadata.version("safepoint")
except metadata.PackageNotFoundError:
    release = ""

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = False
default_role = "code"
highlight_language = "none"

autodoc_member_order = "bysource"
# What the page says of a class comes from its own docstrings, not from the package that it is made for.
autodoc_mock_imports = [] if importlib.util.find_spec("transformers") else ["transformers"]
autodoc_typehints = "none"
autoclass_content = "both"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "safepoint"
html_copy_source = False
html_show_sphinx = False

_LINK = re.compile(r"\[([^\]]+)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)")


def _keep_links_inside(app: Any, name: str, source: list[str]) -> None:
    """Turn links to files of the repository that are no pages into their names: the site does not have them."""
    del app
    page = DOCS / f"{name}.md"

    def replace(match: re.Match[str]) -> str:
        target = (page.parent / match[2]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        path = target.relative_to(ROOT) if target.is_relative_to(ROOT) else match[2]
        text = match[1].strip("`")
        return f"`{path}`" if text in str(path) else f"{match[1]} (`{path}`)"

    source[0] = _LINK.sub(replace, source[0])
    if name == "index":
        listed = set(source[0].split())
        others = sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in listed | {"index"})
        source[0] = source[0].replace("{{ others }}", "\n".join(others))


def _code_as_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make literal blocks of what is one in docstrings: examples, which are plain indented code, and drawings."""
    del app, what, name, obj, options
    drawn = next((index for index, line in enumerate(lines) if "├──" in line), None)
    if drawn is not None:
        end = next((index for index in range(drawn, len(lines)) if not lines[index].strip()), len(lines))
        lines[drawn - 1 : end] = ["::", "", *(f"    {line}" for line in lines[drawn - 1 : end])]
    for index, line in enumerate(lines):
        if line.strip() in ("Example:", "Examples:"):
            indent = line[: len(line) - len(line.lstrip())]
            lines[index : index + 1] = [f"{indent}.. code-block:: python", ""]
            return


def _own_constructor(app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returned: str) -> Any:
    """Show a class's own constructor where the stand-in for its base, of a package not installed here, hides it."""
    del app, name, options
    if what != "class" or signature != "(*args, **kwargs)" or "__init__" not in vars(obj):
        return None
    return stringify_signature(signature_of(obj.__init__, bound_method=True), show_annotation=False), returned


def setup(app: Any) -> None:
    """Connect these to Sphinx."""
    app.connect("source-read", _keep_links_inside)
    app.connect("autodoc-process-docstring", _code_as_code, priority=100)
    app.connect("autodoc-process-signature", _own_constructor)
