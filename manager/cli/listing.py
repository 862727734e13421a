"""A root as a table and as JSON: every step in it, why it stays, and everything else that lies there."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal
from rich.text import Text

from safepoint.manager.cli.output import new_table, safe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.manager.root_overview import Overview, RootEntry

__all__ = ["age", "entry_document", "listing_document", "metrics_text", "record_document", "root_table", "step_table"]

_KINDS = {
    "no record": "no commit record: not a step",
    "unfinished": "not committed",
    "replaced": "replaced",
    "deleted": "being deleted",
    "not ours": "not ours",
}


def root_table(entries: Sequence[RootEntry], title: str) -> Table:
    """Return everything in a root as one table, with a title."""
    table = new_table("directory", "what it is", "metrics", "size", right=("size",))
    table.title, table.title_justify = title, "left"
    committed = [entry for entry in entries if entry.committed is not None]
    for entry in entries:
        size = decimal(entry.num_bytes)
        if entry.committed is None:
            table.add_row(safe(entry.name), safe(_what(entry)), "", size, style="yellow")
            continue
        record = entry.committed.record
        processes = "1 process" if record.process_count == 1 else f"{record.process_count} processes"
        latest = ", latest" if entry is committed[-1] else ""
        kind = f"committed, {record.mode} by {processes}{latest}"
        table.add_row(safe(entry.name), kind, metrics_text(record.metrics), size)
    return table


def _what(entry: RootEntry) -> str:
    return entry.problem or _KINDS[entry.kind]


def step_table(shown: Overview, *, with_policy: bool) -> Table:
    """Return the steps of a root; where they share files, with what each has that none before it has."""
    sizes = ("size", "own") if shown.shares_files else ("size",)
    table = new_table("step", "age", *sizes, "mode", "format", "metrics", "kept because", right=("step", *sizes))
    for entry in shown.steps:
        record = _record(entry)
        why = ", ".join(entry.kept)
        if with_policy and not why:
            why = "no policy keeps it"
        if entry.left_by is not None:
            why = f"{why}; " if why else ""
            why += f"left by going back to {entry.left_by}"
        table.add_row(
            str(record.step),
            age(record.created),
            *map(decimal, (record.num_bytes, entry.own_bytes)[: len(sizes)]),
            f"{record.mode} ×{record.process_count}",
            record.format,
            metrics_text(record.metrics),
            Text(safe(why), style="dim" if entry.left_by is not None else ""),
        )
    return table


def other_table(shown: Overview) -> Table | None:
    """Return what is no step, None where there is nothing."""
    others = [entry for entry in shown.entries if entry.committed is None]
    if not others:
        return None
    table = new_table("directory", "size", "what it is", right=("size",))
    for entry in others:
        style = "red" if entry.problem is not None else "dim"
        table.add_row(safe(entry.name), decimal(entry.num_bytes), safe(_what(entry)), style=style)
    return table


def _record(entry: RootEntry) -> CommitRecord:
    assert entry.committed is not None
    return entry.committed.record


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return metrics for people."""
    return safe(", ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items())))


def age(created: str, *, now: datetime | None = None) -> str:
    """Return how long ago that was, roughly; "" where it is no time, or one to come."""
    try:
        then = datetime.fromisoformat(created)
    except ValueError:
        return ""
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    secs = ((now or datetime.now(UTC)) - then).total_seconds()
    if secs < 0:
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{int(secs / length)} {unit}"
    return f"{int(secs)} s"


def record_document(record: CommitRecord) -> dict[str, Any]:
    """Return a commit record as `docs/format.md` names its fields."""
    value: dict[str, Any] = json.loads(record.to_bytes())
    return {name: item for name, item in value.items() if name not in ("kind", "digest", "version")}


def entry_document(entry: RootEntry) -> dict[str, Any]:
    """Return one name of a root."""
    document: dict[str, Any] = {
        "name": entry.name,
        "kind": entry.kind,
        "step": entry.step,
        "num_bytes": entry.num_bytes,
        "own_bytes": entry.own_bytes,
    }
    if entry.committed is not None:
        document |= {
            "kept": list(entry.kept),
            "left_by": entry.left_by,
            "record": record_document(entry.committed.record),
        }
    return document | ({"problem": entry.problem} if entry.problem is not None else {})


def listing_document(shown: Overview) -> dict[str, Any]:
    """Return a root."""
    return {
        "root": shown.root,
        "latest": shown.steps[-1].step if shown.steps else None,
        "steps": [entry_document(entry) for entry in shown.steps],
        "others": [entry_document(entry) for entry in shown.entries if entry.committed is None],
        "pinned_absent": list(shown.pinned_absent),
    }
