"""One step as tables and as JSON: its leaves, plain values and files."""

from __future__ import annotations

import math
import reprlib
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from rich.filesize import decimal

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.manifest import display_path
from safepoint.manager.cli.listing import age, metrics_text, record_document
from safepoint.manager.cli.output import counted, new_table, safe
from safepoint.manager.errors import CheckpointError
from safepoint.manager.leaf_values import plain_value
from safepoint.manager.nodes import alias_path
from safepoint.manager.tree_keys import key_to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from safepoint.formats.manifest import LeafEntry, Node, TreePath
    from safepoint.manager.step_paths import OpenStep

__all__ = ["file_table", "leaf_table", "step_document", "step_lines", "value_table"]


def step_lines(step: OpenStep) -> list[str]:
    """Return what the commit record says, line by line."""
    record = step.committed.record
    processes = "1 process" if record.process_count == 1 else f"{record.process_count} processes"
    files, leaves = counted(len(step.manifest.files), "file"), counted(record.num_leaves, "leaf")
    size = f"{decimal(record.num_bytes)} in {files}, {leaves}"
    since = age(record.created) or "an unknown time"
    lines = [
        f"step {record.step} of {step.storage.location}",
        f"{record.mode} by {processes}, {record.format}, {size}",
        f"committed {since} ago ({record.created}), number {record.sequence} in the order of commits",
        f"attempt {record.attempt} of run {record.run}",
    ]
    if record.linked_bytes:
        lines.append(f"{decimal(record.linked_bytes)} of it were linked from the step before, and not written")
    if record.scope == "per_process":
        lines.append(f"the part of process {record.process_index}: each process saved to a root of its own")
    if record.metrics:
        lines.append(f"metrics: {metrics_text(record.metrics)}")
    return lines


def _leaves(step: OpenStep, pattern: str) -> Iterator[LeafEntry]:
    return (entry for entry in step.manifest.leaves if fnmatchcase(display_path(entry.path), pattern))


def _nodes(step: OpenStep, pattern: str, *kinds: str) -> Iterator[tuple[TreePath, Node]]:
    for path, node in step.manifest.structure.items():
        if node.kind in kinds and fnmatchcase(display_path(path), pattern):
            yield path, node


def leaf_table(step: OpenStep, pattern: str, *, regions: bool) -> Table:
    """Return the arrays, one a row; with `regions`, one row for each region that is stored."""
    table = new_table("leaf", "dtype", "shape", "size", "where", right=("size",))
    files = step.manifest.files
    for entry in _leaves(step, pattern):
        size = decimal(math.prod(entry.shape) * ITEM_BYTES[entry.dtype])
        names = list(dict.fromkeys(files[shard.file].path for shard in entry.shards))
        where = names[0] if len(entry.shards) == 1 else f"{len(entry.shards)} regions in {len(names)} files"
        table.add_row(safe(display_path(entry.path)), entry.dtype, _shape(entry.shape), size, safe(where))
        for shard in entry.shards if regions else ():
            picked = ", ".join(f"{o}:{o + n}" for o, n in zip(shard.region.offsets, shard.region.shape, strict=True))
            place = f"{files[shard.file].path} at {shard.offset:,}"
            table.add_row("", "", f"[{picked}]", decimal(shard.num_bytes), safe(place), style="dim")
    for path, node in _nodes(step, pattern, "alias", "view"):
        table.add_row(safe(display_path(path)), "", "", "", safe(f"shares memory with {_shared(node)}"), style="dim")
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _shared(node: Node) -> str:
    try:
        return display_path(alias_path(node))
    except CheckpointError:
        return "?"


def value_table(step: OpenStep, pattern: str) -> Table | None:
    """Return the plain values; None where there are none."""
    table = new_table("value", "")
    for path, node in _nodes(step, pattern, "value"):
        table.add_row(safe(display_path(path)), safe(_value_text(node)))
    return table if table.row_count else None


def _value_text(node: Node) -> str:
    try:
        return reprlib.repr(plain_value(node))
    except CheckpointError:
        return reprlib.repr(node.data)


def file_table(step: OpenStep) -> Table:
    """Return the files; where some are shared with older steps, how often each was linked on."""
    names = ("size", "written by process", *(("links",) if step.manifest.linked_bytes else ()))
    table = new_table("file", *names, right=names)
    for file in step.manifest.files:
        numbers = (decimal(file.num_bytes), str(file.process_index), str(file.links))
        table.add_row(safe(file.path), *numbers[: len(names)])
    return table


def step_document(step: OpenStep, pattern: str, problem: CheckpointError | None) -> dict[str, Any]:
    """Return a step: its record, leaves with their regions, plain values as the manifest has them, and files."""
    files = step.manifest.files
    return {
        "root": step.storage.location,
        "step": step.step,
        "record": record_document(step.committed.record),
        "leaves": [
            {
                "path": display_path(entry.path),
                "keys": [key_to_json(key) for key in entry.path],
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "num_bytes": math.prod(entry.shape) * ITEM_BYTES[entry.dtype],
                "regions": [
                    {
                        "offsets": list(shard.region.offsets),
                        "shape": list(shard.region.shape),
                        "file": files[shard.file].path,
                        "offset": shard.offset,
                        "num_bytes": shard.num_bytes,
                    }
                    for shard in entry.shards
                ],
            }
            for entry in _leaves(step, pattern)
        ],
        "shared": [
            {"path": display_path(path), "with": _shared(node)} for path, node in _nodes(step, pattern, "alias", "view")
        ],
        "values": [{"path": display_path(path), "value": node.data} for path, node in _nodes(step, pattern, "value")],
        "files": [
            {
                "path": file.path,
                "num_bytes": file.num_bytes,
                "process_index": file.process_index,
                "attempt": file.attempt,
                "links": file.links,
            }
            for file in files
        ],
        "problem": None if problem is None else problem.message,
    }
