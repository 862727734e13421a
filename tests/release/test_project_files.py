"""The files about the project, for people and for machines, agree with it."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from safepoint.manager.cli.app import app

from support.source_tree import ROOT

yaml = pytest.importorskip("yaml")

TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return found


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())

    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)
    assert citation["title"] == project()["name"]
    assert citation["version"] == project()["version"]
    assert citation["license"] == project()["license"]
    assert citation["authors"] == project()["authors"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_issue_forms_are_well_formed_and_ask_for_commands_that_exist(path: Any) -> None:
    text = path.read_text()
    form = yaml.safe_load(text)
    if path.name == "config.yml":
        assert form["blank_issues_enabled"] is True
        return
    commands = {command.name for command in app.registered_commands}

    assert {"name", "description", "body"} <= set(form)
    identities = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(identities) == len(set(identities)) > 0
    assert all(part["attributes"].get("label") for part in form["body"] if part["type"] != "markdown")
    assert set(re.findall(r"safepoint (\w+) ROOT", text)) <= commands
    for name in re.findall(r"\b(docs/\w+\.md|[A-Z]+\.md)", text):
        assert (ROOT / name).exists(), name


def test_there_are_forms_and_a_way_to_report_what_is_no_issue() -> None:
    assert [path.name for path in TEMPLATES] == ["bug.yml", "config.yml", "wish.yml"]
    assert (ROOT / "SECURITY.md").exists()


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## \[([^\]]+)\](?:: (\S+))?", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)

    assert first is not None
    assert project()["version"] in first.groups()
