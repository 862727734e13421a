"""Each type of error has its section in the documents, each quoted message is one that the code has; links lead on."""

from __future__ import annotations

import ast
import re
import traceback

import pytest

import safepoint.manager  # noqa: F401 - defines all errors
from safepoint.formats.errors import CheckpointError, CorruptDataError, error_from_json
from safepoint.manager.errors import StepNotFoundError

from support.source_tree import ROOT, module_files

DOCUMENT = ROOT / "docs" / "troubleshooting.md"
REFERENCE = re.compile(r"docs/([\w/-]+\.md)(#[\w-]+)?")


def headings(text: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", text, re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings, as MyST and code hosts make them."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)}


def texts_of_the_code() -> list[str]:
    found = []
    for path in module_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):  # f-strings, and plain ones that are joined to them
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
    return found


def test_every_type_of_error_has_a_section_and_every_section_a_type() -> None:
    ours = {name for name, kind in CheckpointError.registry.items() if kind.__module__.startswith("safepoint.")}

    assert sorted(headings(DOCUMENT.read_text())[1:]) == sorted(ours)


def test_every_quoted_message_is_one_that_the_code_has() -> None:
    texts = texts_of_the_code()
    rows = re.findall(r"^\| (`.*?) \|", DOCUMENT.read_text(), re.MULTILINE)
    quoted = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 30
    unknown = [message for message in quoted if not any(is_in(message, text) for text in texts)]

    assert unknown == []


def is_in(message: str, text: str) -> bool:
    position = 0
    for part in message.split("…"):
        position = text.find(part, position)
        if position < 0:
            return False
    return True


def test_what_messages_point_to_is_there() -> None:
    missing = []
    for path in module_files():
        for name, anchor in REFERENCE.findall(path.read_text()):
            document = ROOT / "docs" / name
            if not document.exists() or (anchor and anchor[1:] not in anchors(document.read_text())):
                missing.append(f"{path.relative_to(ROOT)}: docs/{name}{anchor}")

    assert missing == []


@pytest.mark.parametrize("kind", sorted(CheckpointError.registry.values(), key=lambda kind: kind.__name__))
def test_every_error_points_to_its_section(kind: type[CheckpointError]) -> None:
    name, _, anchor = kind("x").section.removeprefix("docs/").partition("#")

    if kind.__module__.startswith("safepoint."):
        assert anchor in anchors((ROOT / "docs" / name).read_text())


def test_a_traceback_shows_where_to_read_on_and_the_message_stays_as_it_is() -> None:
    error = StepNotFoundError("step 3 is not committed here", step=3, hint="Look.")
    shown = "".join(traceback.format_exception(error))

    assert shown.endswith("[step 3]\n  Look.\nSee docs/troubleshooting.md#stepnotfounderror\n")
    assert "troubleshooting" not in str(error)
    again = error_from_json(CorruptDataError("x").to_json())
    assert again.__notes__ == ["See docs/troubleshooting.md#corruptdataerror"]


def test_links_between_the_documents_lead_to_a_heading() -> None:
    broken = []
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([^)#\s]*\.md)?#([\w-]+)\)", text):
            other = document.parent / target if target else document
            if other.exists() and anchor not in anchors(other.read_text()):
                broken.append(f"{document.relative_to(ROOT)}: {target}#{anchor}")

    assert broken == []
