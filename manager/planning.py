"""The second meeting of a save: every process brings what it holds, and learns what it writes.

Owns what travels, and what is taken from the saves before instead of being worked out again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safepoint.formats.registry import get_format
from safepoint.manager.collecting import paused_collection
from safepoint.manager.coordination import run_together
from safepoint.manager.directing import Direction, SaveDecision, direct_save, load_tables, write_job
from safepoint.manager.shared_memory import share_for
from safepoint.manager.state import FlatState, flatten
from safepoint.manager.writing import PlannedFile, plan_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safepoint.formats.manifest import TreePath
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.session import Session

__all__ = ["Planned", "lay_out_files", "plan_together"]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a process knows after the meeting; only the primary has the decision."""

    flat: FlatState
    direction: Direction
    decision: SaveDecision | None


def plan_together(session: Session, state: Mapping[str, Any], begin: Callable[[str], None]) -> Planned:
    """Flatten the state, meet, and return this process's part.

    Called by: all processes.

    Args:
        session: of the manager.
        state: to be saved.
        begin: called on the primary with the attempt, before the others learn of it.
    """
    coordinator = session.coordinator
    deadline_secs = session.options.deadline_secs
    is_alone = coordinator.process_count == 1
    flats: list[FlatState] = []
    decisions: list[SaveDecision] = []

    @paused_collection()
    def prepare() -> bytes:
        flat = flatten(
            state,
            process_index=coordinator.process_index,
            process_count=coordinator.process_count,
            share=share_for(session.options.format),
        )
        flats.append(flat)
        if is_alone:
            return b""
        return coordinator.share_blob(flat.table().to_bytes(), deadline_secs=deadline_secs).encode()

    @paused_collection()
    def decide(payloads: Sequence[bytes]) -> list[bytes]:
        tables = (
            [flats[0].table()]
            if is_alone
            else load_tables([payload.decode() for payload in payloads], coordinator, deadline_secs)
        )
        decision = direct_save(
            tables, options=session.options, memo=session.memos.layout, part_bytes=session.storage.part_bytes
        )
        decisions.append(decision)
        begin(decision.directions[0].attempt)
        return [
            b"" if process == coordinator.process_index else direction.to_bytes()
            for process, direction in enumerate(decision.directions)
        ]

    answer = run_together(coordinator, "save-plan", deadline_secs, prepare, decide)
    if decisions:
        own = decisions[0].directions[coordinator.process_index]
        return Planned(flat=flats[0], direction=own, decision=decisions[0])
    with paused_collection():
        return Planned(flat=flats[0], direction=Direction.from_bytes(answer), decision=None)


@paused_collection()
def lay_out_files(
    session: Session,
    direction: Direction,
    decision: SaveDecision | None,
    specs: Mapping[TreePath, ArraySpec],
    metrics: Mapping[str, float],
) -> list[PlannedFile]:
    """Return the files that this process writes."""
    file_format = get_format(session.options.format)

    def make() -> list[PlannedFile]:
        job = write_job(direction, decision, session.coordinator, metrics, part_bytes=session.storage.part_bytes)
        return plan_files(direction.assignments, specs, file_format=file_format, job=job)

    if not file_format.plans_by_geometry:
        return make()
    return session.memos.files.get((direction.mode, direction.assignments, specs), make)
