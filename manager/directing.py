"""What the primary decides when a save begins: do all agree, is the step to be written, by whom, in which mode.

Runs on the primary inside the first meeting of a save; its answer is all that the others need. Writes nothing.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from safepoint.formats.registry import get_format
from safepoint.manager.errors import DisagreementError, StepExistsError
from safepoint.manager.merging import merge_tables
from safepoint.manager.planner import SavePlan, WriteAssignment, choose_mode, plan_save
from safepoint.manager.policies import OnExists, StepInfo, decide_existing
from safepoint.manager.state import LeafTable
from safepoint.manager.wire import assignments_from_json, assignments_to_json
from safepoint.manager.writing import plan_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.manifest import Mode, Node, TreePath
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.commit import CommittedStep, Committer
    from safepoint.manager.coordination import Coordinator
    from safepoint.manager.options import ManagerOptions

__all__ = ["Direction", "Lineage", "SaveDecision", "SaveRequest", "direct_save", "require_same"]


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What one process brings to the beginning of a save."""

    step: int
    root: str
    mode: str
    format: str
    on_exists: OnExists
    blocking: bool
    table_digest: str
    wait_secs: float
    next_sequence: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Direction:
    """The primary's answer to one process."""

    attempt: str = ""
    mode: Mode = "consolidated"
    mode_reason: str = ""
    sequence: int = 0
    skip_reason: str | None = None
    wait_secs: float = 0.0
    gathers: bool = False
    """Whether any process has to send parts to another."""
    assignments: tuple[WriteAssignment, ...] = ()
    """What this process writes."""
    sends: tuple[WriteAssignment, ...] = ()
    """What this process sends to the writer, in the writer's order."""

    def to_bytes(self) -> bytes:
        """Return the answer as it travels."""
        value = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("assignments", "sends")
        }
        for name in ("assignments", "sends"):
            value[name] = assignments_to_json(getattr(self, name))
        return json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Direction:
        """Return the answer that `to_bytes` made."""
        value = json.loads(data)
        for name in ("assignments", "sends"):
            value[name] = assignments_from_json(value[name])
        return cls(**value)


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What decides whether a committed step is this run's own, or one of an abandoned branch."""

    restored: StepInfo | None
    committed: frozenset[str]
    """Attempts that this run committed since it was last restored."""

    def action(self, on_exists: OnExists, existing: CommittedStep) -> Literal["skip", "replace", "error"]:
        """Return what a save does about this step."""
        ours = existing.record.attempt in self.committed
        return decide_existing(
            on_exists, existing.info, run=existing.record.run if ours else "", restored=self.restored
        )


@dataclass(frozen=True, kw_only=True)
class SaveDecision:
    """All that the primary decided; `directions` is what the others learn of it."""

    directions: list[Direction]
    specs: Mapping[TreePath, ArraySpec] = field(default_factory=dict)
    """Every leaf of any process."""
    structure: Mapping[TreePath, Node] = field(default_factory=dict)
    replaces: CommittedStep | None = None


def direct_save(
    requests: Sequence[SaveRequest],
    *,
    options: ManagerOptions,
    coordinator: Coordinator,
    committer: Committer,
    lineage: Lineage,
) -> SaveDecision:
    """Return the answer for each process, and what the primary needs later.

    Raises:
        DisagreementError: the processes want different things, or hold contradictory leaves.
        StepExistsError: the step is committed already and is not to be replaced.
        IncompleteCoverageError: a part of a leaf is held by nobody.
    """
    check_agreement(requests, options=options)
    wait_secs = max(request.wait_secs for request in requests)
    if wait_secs > 0:
        return SaveDecision(directions=[Direction(wait_secs=wait_secs)] * len(requests))
    step = requests[0].step
    existing = next((item for item in committer.list_steps() if item.record.step == step), None)
    if existing is not None:
        action = lineage.action(requests[0].on_exists, existing)
        if action == "skip":
            return SaveDecision(directions=[Direction(skip_reason="the step is committed already")] * len(requests))
        if action == "error":
            raise _step_exists(existing)
    tables = load_tables([request.table_digest for request in requests], coordinator, options.deadline_secs)
    merged = merge_tables(tables)
    specs = [table.arrays for table in tables]
    mode, reason = choose_mode(
        options.mode, process_count=len(requests), table_by_process=specs, scope=options.root_scope
    )
    plan = plan_save(specs, mode, options.root_scope)
    sends = order_sends(plan, merged.arrays, options, len(requests))
    attempt = secrets.token_hex(8)
    sequence = max(request.next_sequence for request in requests)
    directions = [
        Direction(
            attempt=attempt,
            mode=mode,
            mode_reason=reason,
            sequence=sequence,
            gathers=any(sends),
            assignments=plan.written_by(process),
            sends=tuple(sends[process]),
        )
        for process in range(len(requests))
    ]
    return SaveDecision(directions=directions, specs=merged.arrays, structure=merged.nodes, replaces=existing)


def _step_exists(existing: CommittedStep) -> StepExistsError:
    record = existing.record
    return StepExistsError(
        f"step {record.step} was committed by another run ({record.run}) on {record.created}",
        step=record.step,
        path=existing.prefix,
        outcome="not_committed",
        hint='Restore from it first, save with on_exists="replace" or "skip", or use another root for another run.',
    )


def check_agreement(requests: Sequence[SaveRequest], *, options: ManagerOptions) -> None:
    """Check that all processes want the same step saved in the same way to the same root."""
    names = ["step", "mode", "format", "on_exists", "blocking"]
    if options.root_scope == "shared":
        names.insert(1, "root")
    for name in names:
        require_same(name, [getattr(request, name) for request in requests], doing="save")


def require_same(name: str, values: Sequence[object], *, doing: str) -> None:
    """Raise DisagreementError, naming who brought what, unless all values are equal."""
    holders: dict[object, list[int]] = {}
    for process, value in enumerate(values):
        holders.setdefault(value, []).append(process)
    if len(holders) == 1:
        return
    brought = tuple((f"{name} {value!r}", tuple(processes)) for value, processes in holders.items())
    text = "; ".join(f"{what} on {_processes(who)}" for what, who in brought)
    raise DisagreementError(
        f"the processes came to this {doing} with a different {name}: {text}",
        brought=brought,
        outcome="not_committed" if doing == "save" else None,
        hint=f"Every process must call {doing} with the same {name}.",
    )


def _processes(indices: Sequence[int]) -> str:
    return ("process " if len(indices) == 1 else "processes ") + ", ".join(map(str, indices))


def load_tables(digests: Sequence[str], coordinator: Coordinator, deadline_secs: float) -> list[LeafTable]:
    """Return the leaf table of each process; equal tables are fetched, and are, one object."""
    loaded = {
        digest: LeafTable.from_bytes(coordinator.fetch_blob(digest, deadline_secs=deadline_secs))
        for digest in dict.fromkeys(digests)
    }
    return [loaded[digest] for digest in digests]


def order_sends(
    plan: SavePlan, specs: Mapping[TreePath, ArraySpec], options: ManagerOptions, process_count: int
) -> list[list[WriteAssignment]]:
    """Return, per process, the parts that it sends, in the order in which the writers load them."""
    sends: list[list[WriteAssignment]] = [[] for _ in range(process_count)]
    for writer in range(process_count):
        assignments = plan.written_by(writer)
        if all(part.source == writer for part in assignments):
            continue
        files = plan_files(
            assignments,
            specs,
            mode=plan.mode,
            file_format=get_format(options.format),
            process_index=writer,
            process_count=process_count,
        )
        for file in files:
            for piece in file.pieces:
                for part in piece.parts:
                    if part.source != writer:
                        sends[part.source].append(part)
    return sends
