"""Every Python snippet of the documents runs, as it stands.

The snippets of one document run in order, as one script in an empty directory: a later one may use what an earlier one
made. What cannot run is not fenced as Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.source_tree import ROOT

FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def documents_with_snippets() -> list[str]:
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
    return sorted(str(path.relative_to(ROOT)) for path in paths if FENCE.search(path.read_text()))


def script_of(document: str) -> str:
    """Return the snippets, each on the lines on which it stands in the document, so that a traceback points there."""
    text = (ROOT / document).read_text()
    lines: list[str] = []
    for match in FENCE.finditer(text):
        first = text.count("\n", 0, match.start(1))
        lines += [""] * (first - len(lines)) + match[1].splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("document", documents_with_snippets())
def test_snippets_run(document: str, tmp_path: Path) -> None:
    script = tmp_path / Path(document).name
    script.write_text(script_of(document))
    folder = tmp_path / "empty"
    folder.mkdir()

    ended = subprocess.run(
        [sys.executable, "-P", "-W", "error", str(script)],
        cwd=folder,
        env={**os.environ, "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr


def test_links_inside_the_repository_lead_somewhere() -> None:
    broken = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text())
        if "://" not in target and not (document.parent / target).exists()
    ]

    assert broken == []


def test_every_guarantee_of_the_readme_names_a_test_that_exists() -> None:
    named = re.findall(r"\[(test_\w+)\]\(([^)]+)\)", (ROOT / "README.md").read_text())

    assert named
    assert [f"{file}::{test}" for test, file in named if f"def {test}(" not in (ROOT / file).read_text()] == []
