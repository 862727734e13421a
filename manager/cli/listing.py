"""Shows a root as a table: every step in it, and everything else that lies there. Reads only, and owns no rule."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.filesize import decimal
from rich.table import Table

from safepoint.formats.storage import LocalStorage
from safepoint.manager.step_listing import RecordCache, parse_name, read_listing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from safepoint.manager.step_listing import CommittedStep

__all__ = ["Row", "list_root", "root_table"]

CONTROL_FOLDER = ".safepoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One name in a root.

    Attributes:
        name: the directory, relative to the root.
        kind: what it is, for people.
        committed: the step, where it is one.
        num_bytes: what its files hold, as far as they are there.
    """

    name: str
    kind: str
    committed: CommittedStep | None = None
    num_bytes: int


def list_root(root: Path) -> list[Row]:
    """Return what lies in a root: committed steps in the order in which they were committed, then the rest by name.

    Raises:
        StorageError: the root cannot be read.
    """
    storage = LocalStorage(root)
    listing = read_listing(storage, RecordCache())
    rows = [
        Row(name=step.prefix, kind="committed", committed=step, num_bytes=step.record.num_bytes)
        for step in listing.steps
    ]
    shown = {row.name for row in rows} | {CONTROL_FOLDER}
    broken = {problem.prefix: problem.error.message for problem in listing.problems}
    for entry in sorted(storage.list(""), key=lambda entry: entry.name):
        if entry.name not in shown:
            kind = broken.get(entry.name) or _describe(entry.name)
            rows.append(Row(name=entry.name, kind=kind, num_bytes=_num_bytes_below(root / entry.name)))
    return rows


def root_table(rows: Sequence[Row], title: str) -> Table:
    """Return a table of rows; the newest committed step is marked."""
    table = Table(title=title, title_justify="left")
    for heading in ("directory", "what it is", "metrics"):
        table.add_column(heading)
    table.add_column("size", justify="right")
    committed = [row for row in rows if row.committed is not None]
    for row in rows:
        size = decimal(row.num_bytes)
        if row.committed is None:
            table.add_row(row.name, row.kind, "", size, style="yellow")
            continue
        record = row.committed.record
        processes = "1 process" if record.process_count == 1 else f"{record.process_count} processes"
        latest = ", latest" if row is committed[-1] else ""
        kind = f"{row.kind}, {record.mode} by {processes}{latest}"
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in sorted(record.metrics.items()))
        table.add_row(row.name, kind, metrics, size)
    return table


def _describe(name: str) -> str:
    own = parse_name(name)
    if own is None:
        return "not ours"
    return {
        "step": "no commit record",
        "tmp": "not committed",
        "old": "replaced",
        "trash": "being deleted",
    }[own.kind]


def _num_bytes_below(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    files = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return sum(os.lstat(file).st_size for file in files)
