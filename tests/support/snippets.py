"""The Python snippets of the documents, as scripts.

A document whose snippets need an optional package says so at its top: `<!-- needs: tensorboard -->`. Below a heading
`## …` it is said of the snippets up to the next one, which are left out where the package is missing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["documents_with_snippets", "run_snippets"]

_FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)
_SECTION = re.compile(r"^(?=## )", re.MULTILINE)


def documents_with_snippets() -> list[str]:
    """Return the documents, relative to the checkout."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in paths if _FENCE.search(path.read_text()))


def run_snippets(document: str, folder: Path) -> None:
    """Run the snippets of a document in order, as one script in an empty directory; skip where a package is missing."""
    text = (ROOT / document).read_text()
    top, *sections = _SECTION.split(text)
    if missing := _missing(top):
        pytest.skip(f"{missing} is not installed")
    text = "".join([top, *("\n" * part.count("\n") if _missing(part) else part for part in sections)])
    script = folder / os.path.basename(document)
    script.write_text(_script_of(text))
    empty = folder / "empty"
    empty.mkdir()
    ended = subprocess.run(
        [sys.executable, "-P", "-W", "error", str(script)],
        cwd=empty,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def _missing(part: str) -> str | None:
    """Return a package that a part of a document needs and that is not installed."""
    packages = (package for needs in _NEEDS.findall(part) for package in needs.split(", "))
    return next((package for package in packages if importlib.util.find_spec(package) is None), None)


def _script_of(text: str) -> str:
    """Return the snippets, each on the lines on which it stands in the document, so that a traceback points there."""
    lines: list[str] = []
    for match in _FENCE.finditer(text):
        first = text.count("\n", 0, match.start(1))
        lines += [""] * (first - len(lines)) + match[1].splitlines()
    return "\n".join(lines) + "\n"
