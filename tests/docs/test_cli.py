from __future__ import annotations

import re

from safepoint.manager.cli.app import app

from support.cli_document import DOCUMENT, rendered


def test_the_documented_output_is_what_the_commands_print() -> None:
    text = DOCUMENT.read_text()

    assert rendered(text) == text, "run `python tests/support/cli_document.py`, and look at what changed"


def test_every_command_is_documented() -> None:
    names = {command.name for command in app.registered_commands}

    assert names <= set(re.findall(r"`([a-z]+)`", DOCUMENT.read_text().split("## Exit status", maxsplit=1)[0])) | {
        "unpin"
    }
