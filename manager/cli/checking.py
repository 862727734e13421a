"""`safepoint doctor`: what is installed, what a root is like, and whether a save would work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from safepoint.formats.storage.opening import is_url
from safepoint.manager.cli.arguments import AsJson  # noqa: TC001 - typer looks it up
from safepoint.manager.cli.output import PROBLEM, new_table, print_json, print_table, reporting, safe
from safepoint.manager.cli.trying import try_save
from safepoint.manager.diagnosing import diagnose_machine, diagnose_root, diagnose_url
from safepoint.manager.options import full_root

__all__ = ["doctor_command"]

_STYLES = {"ok": "green", "note": "yellow", "problem": "red"}


@reporting
def doctor_command(
    root: Annotated[
        str | None, typer.Argument(help="Root to look at, there or not; none: the machine only.", show_default=False)
    ] = None,
    *,
    as_json: AsJson = False,
) -> int | None:
    """Tell what is installed, on what device a save would run, and how a root is: writable, free space, speed.

    Writes 64 MiB and a small step beside the steps of the root, and removes both again. The exit status is 1 where a
    save would fail.

    Examples:
        safepoint doctor

        safepoint doctor runs/gpt --json
    """
    findings = list(diagnose_machine())
    if root is not None:
        findings += diagnose_url(root) if is_url(root) else diagnose_root(Path(root).absolute())
        if any(one.name == "writable" and one.level == "ok" for one in findings):
            findings.append(try_save(full_root(root)))
    failed = any(one.level == "problem" for one in findings)
    if as_json:
        print_json(
            {
                "ok": not failed,
                "findings": [
                    {"name": one.name, "level": one.level, "text": one.text, "data": one.data} for one in findings
                ],
            }
        )
        return PROBLEM if failed else None
    table = new_table("", "", "")
    table.show_header = False
    table.columns[0].min_width = max(map(len, _STYLES))
    for one in findings:
        table.add_row(Text(one.level, style=_STYLES[one.level]), one.name, safe(one.text))
    print_table(table)
    return PROBLEM if failed else None
