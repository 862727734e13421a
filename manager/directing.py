"""What the primary decides once a save is admitted: in which mode, and who writes what.

Runs on the primary inside the second meeting of a save; its answer is all that the others need. Writes nothing.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from safepoint.formats.base import LeafParts, WriteJob
from safepoint.formats.region import Region
from safepoint.formats.registry import get_format
from safepoint.manager.merging import merge_tables
from safepoint.manager.outline import outline_state
from safepoint.manager.planner import SavePlan, WriteAssignment, choose_mode, plan_save
from safepoint.manager.replicas import shared_regions
from safepoint.manager.state import LeafTable
from safepoint.manager.wire import assignments_from_json, assignments_to_json
from safepoint.manager.writing import plan_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.base import Format
    from safepoint.formats.manifest import JSON, Mode, Node, TreePath
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.coordination import Coordinator
    from safepoint.manager.options import ManagerOptions, RequestedMode
    from safepoint.manager.remembering import Memo

__all__ = ["Direction", "SaveDecision", "SaveLayout", "direct_save", "load_tables", "write_job"]


_PARTS = ("assignments", "sends", "compares")


@dataclass(frozen=True, kw_only=True)
class Direction:
    """The primary's answer to one process."""

    attempt: str = ""
    mode: Mode = "consolidated"
    mode_reason: str = ""
    gathers: bool = False
    """Whether any process has to send parts to another."""
    assignments: tuple[WriteAssignment, ...] = ()
    """What this process writes."""
    sends: tuple[WriteAssignment, ...] = ()
    """What this process sends to the writer, in the writer's order."""
    compares: tuple[WriteAssignment, ...] = ()
    """What this process holds like another one, if replicas are to be compared."""
    notes: tuple[JSON, ...] = ()
    """The format's, about the leaf of each assignment; null where an earlier one is of the same leaf. Or nothing."""

    def notes_by_path(self) -> dict[TreePath, JSON]:
        """Return the format's note about each leaf that this process writes."""
        pairs = zip(self.assignments, self.notes, strict=bool(self.notes))
        return {assignment.path: note for assignment, note in pairs if note is not None}

    def to_bytes(self) -> bytes:
        """Return the answer as it travels."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _PARTS}
        for name in _PARTS:
            value[name] = assignments_to_json(getattr(self, name))
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Direction:
        """Return the answer that `to_bytes` made."""
        value = json.loads(data)
        for name in _PARTS:
            value[name] = assignments_from_json(value[name])
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class SaveDecision:
    """All that the primary decided; `directions` is what the others learn of it."""

    directions: list[Direction]
    specs: Mapping[TreePath, ArraySpec] = field(default_factory=dict)
    """Every leaf of any process."""
    structure: Mapping[TreePath, Node] = field(default_factory=dict)
    leaves: Sequence[LeafParts] = ()
    notes: Mapping[TreePath, JSON] = field(default_factory=dict)
    """The format's, about every leaf."""


@dataclass(frozen=True, kw_only=True)
class SaveLayout:
    """Who writes, sends and compares what, by process."""

    mode: Mode
    mode_reason: str
    assignments: list[tuple[WriteAssignment, ...]]
    sends: list[tuple[WriteAssignment, ...]]
    compares: list[tuple[WriteAssignment, ...]]
    leaves: Sequence[LeafParts]
    notes: Mapping[TreePath, JSON]


def direct_save(
    tables: Sequence[LeafTable], *, options: ManagerOptions, memo: Memo[SaveLayout], part_bytes: int | None = None
) -> SaveDecision:
    """Return the answer for each process, and what the primary needs later.

    Args:
        tables: what each process holds; equal ones are one object.
        options: of the manager.
        memo: of the saves before.
        part_bytes: how large a file should be at most, on this storage.

    Raises:
        DisagreementError: the processes hold contradictory leaves.
        IncompleteCoverageError: a part of a leaf is held by nobody.
    """
    merged = merge_tables(tables)
    if get_format(options.format).plans_by_geometry:
        layout = memo.get(
            tuple(table.arrays for table in tables), lambda: _lay_out(tables, merged, options, part_bytes)
        )
    else:
        layout = _lay_out(tables, merged, options, part_bytes)
    attempt = secrets.token_hex(8)
    directions = [
        Direction(
            attempt=attempt,
            mode=layout.mode,
            mode_reason=layout.mode_reason,
            gathers=any(layout.sends),
            assignments=layout.assignments[process],
            sends=layout.sends[process],
            compares=layout.compares[process],
            notes=tuple(notes_for(layout.assignments[process], layout.notes)),
        )
        for process in range(len(tables))
    ]
    return SaveDecision(
        directions=directions,
        specs=merged.arrays,
        structure=merged.nodes,
        leaves=layout.leaves,
        notes=layout.notes,
    )


def _lay_out(
    tables: Sequence[LeafTable], merged: LeafTable, options: ManagerOptions, part_bytes: int | None
) -> SaveLayout:
    count = len(tables)
    held = [table.arrays for table in tables]
    file_format = get_format(options.format)
    requested, requested_reason = allowed_mode(options.mode, file_format)
    mode, reason = choose_mode(requested, process_count=count, table_by_process=held, scope=options.root_scope)
    plan = plan_save(held, mode, options.root_scope)
    leaves = leaf_parts(plan, merged.arrays)
    notes = file_format.arrange(leaves, lambda: outline_state(merged.nodes))
    sends = order_sends(plan, merged, file_format, notes, count, part_bytes=part_bytes)
    compares = shared_regions(held) if options.check_replicas == "error" else [[] for _ in held]
    return SaveLayout(
        mode=mode,
        mode_reason=requested_reason or reason,
        assignments=[plan.written_by(process) for process in range(count)],
        sends=[tuple(parts) for parts in sends],
        compares=[tuple(parts) for parts in compares],
        leaves=leaves,
        notes=notes,
    )


def leaf_parts(plan: SavePlan, specs: Mapping[TreePath, ArraySpec]) -> list[LeafParts]:
    """Return every leaf with the regions in which it is written."""
    regions: dict[TreePath, list[Region]] = {path: [] for path in specs}
    for assignment in plan.assignments:
        regions[assignment.path].append(assignment.region)
    return [
        LeafParts(
            path=path,
            dtype=spec.dtype,
            shape=spec.shape,
            regions=tuple(regions[path]) if plan.mode == "sharded" else (Region.whole(spec.shape),),
        )
        for path, spec in specs.items()
    ]


def write_job(
    direction: Direction,
    decision: SaveDecision | None,
    coordinator: Coordinator,
    metrics: Mapping[str, float],
    *,
    part_bytes: int | None = None,
) -> WriteJob:
    """Return what the format is told of the save, beside what this process writes; the primary knows the decision."""
    job = WriteJob(
        mode=direction.mode,
        process_index=coordinator.process_index,
        process_count=coordinator.process_count,
        notes=direction.notes_by_path(),
        part_bytes=part_bytes,
    )
    if decision is None:
        return job
    return replace(
        job,
        notes=decision.notes,
        leaves=decision.leaves,
        outline=lambda: outline_state(decision.structure),
        metrics=metrics,
        time_nsecs=time.time_ns(),
    )


def notes_for(assignments: Sequence[WriteAssignment], notes: Mapping[TreePath, JSON]) -> list[JSON]:
    """Return the note about each assignment's leaf, once a leaf."""
    if not notes:
        return []
    seen: set[TreePath] = set()
    found = []
    for assignment in assignments:
        found.append(None if assignment.path in seen else notes[assignment.path])
        seen.add(assignment.path)
    return found


def allowed_mode(requested: RequestedMode, file_format: Format) -> tuple[RequestedMode, str]:
    """Return the mode to choose from, "auto" being the only one of the format where it has but one; and why."""
    if requested == "auto" and len(file_format.modes) == 1:
        return file_format.modes[0], f"the only mode of the format {file_format.name}"
    return requested, ""


def load_tables(digests: Sequence[str], coordinator: Coordinator, deadline_secs: float) -> list[LeafTable]:
    """Return the leaf table of each process; equal tables are fetched, and are, one object."""
    loaded = {
        digest: LeafTable.from_bytes(coordinator.fetch_blob(digest, deadline_secs=deadline_secs))
        for digest in dict.fromkeys(digests)
    }
    return [loaded[digest] for digest in digests]


def order_sends(
    plan: SavePlan,
    merged: LeafTable,
    file_format: Format,
    notes: Mapping[TreePath, JSON],
    process_count: int,
    *,
    part_bytes: int | None = None,
) -> list[list[WriteAssignment]]:
    """Return, per process, the parts that it sends, in the order in which the writers load them."""
    sends: list[list[WriteAssignment]] = [[] for _ in range(process_count)]
    for writer in range(process_count):
        assignments = plan.written_by(writer)
        if all(part.source == writer for part in assignments):
            continue
        files = plan_files(
            assignments,
            merged.arrays,
            file_format=file_format,
            job=WriteJob(
                mode=plan.mode,
                process_index=writer,
                process_count=process_count,
                notes=notes,
                outline=lambda: outline_state(merged.nodes),
                part_bytes=part_bytes,
            ),
        )
        for file in files:
            for piece in file.pieces:
                for part in piece.parts:
                    if part.source != writer:
                        sends[part.source].append(part)
    return sends
