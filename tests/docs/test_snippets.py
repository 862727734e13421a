"""Every Python snippet of the documents runs, as it stands.

The snippets of one document run in order, as one script in an empty directory: a later one may use what an earlier one
made. What cannot run is not fenced as Python.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from support.snippets import documents_with_snippets, run_snippets
from support.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("document", documents_with_snippets())
def test_snippets_run(document: str, tmp_path: Path) -> None:
    run_snippets(document, tmp_path)


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
