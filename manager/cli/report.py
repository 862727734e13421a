"""The command that makes a page of a root: report."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from safepoint.manager.cli.arguments import (
    AsJson,
    KeepBestOption,
    KeepEveryOption,
    KeepLastOption,
    Root,
    policy_of,
)
from safepoint.manager.cli.output import counted, print_json, print_line, reporting
from safepoint.manager.cli.progress import shown_progress
from safepoint.manager.errors import StorageError
from safepoint.manager.report import collect, render
from safepoint.manager.step_paths import open_root

if TYPE_CHECKING:
    from safepoint.manager.report import RootFacts

__all__ = ["report_command"]

_WITH_STEP = ("saves", "runs", "restores", "faults")


@reporting
def report_command(
    root: Root,
    *,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page; replaced if it is there.")
    ] = Path("report.html"),
    keep_last: KeepLastOption = None,
    keep_every: KeepEveryOption = None,
    keep_best: KeepBestOption = None,
    as_json: AsJson = False,
) -> None:
    """Make one page of a root: how long saves took, sizes, why each step stays, who wrote what, restores and faults.

    The page is one file: it asks for nothing from anywhere, and can be sent to others. Why a step stays is told by the
    policy that the latest save left in its record, or by the one given here. Nothing in the root is changed.

    Examples:
        safepoint report runs/gpt -o report.html

        safepoint report runs/gpt --keep-last 3 --keep-every 1000

        safepoint report runs/gpt --json | jq '.faults[].text'
    """
    storage = open_root(root)
    with shown_progress(quiet=as_json) as progress:
        facts = collect(storage, policy_of(keep_last, keep_every, keep_best), progress=progress)
    page = render(facts).encode()
    _write(output, page)
    if as_json:
        print_json(_document(facts) | {"page": os.path.abspath(output), "num_bytes": len(page)})
        return
    found = (len(facts.kept), "step"), (len(facts.restores), "restore"), (len(facts.faults), "fault")
    counts = ", ".join(counted(number, what) for number, what in found)
    print_line(f"{output}: {counts}")


def _document(facts: RootFacts) -> dict[str, Any]:
    return {"root": facts.root, "policy": facts.policy} | {
        name: [asdict(one) for one in getattr(facts, name)] for name in _WITH_STEP
    }


def _write(path: Path, page: bytes) -> None:
    """Write the page beside its name first, so that whoever reads it meanwhile sees a whole one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            temporary.write_bytes(page)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise StorageError(
            f"cannot write the page: {error.strerror}",
            path=str(path),
            errno=error.errno,
            hint="Name another file with -o.",
        ) from error
