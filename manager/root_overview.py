"""Everything that lies in a root, by what it is: steps and why they stay, what is broken, left over, or not ours.

Reads directory entries, commit records and pins; changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME
from safepoint.formats.storage import LocalStorage
from safepoint.manager.disk_usage import bytes_of_each, num_bytes_below, num_bytes_in
from safepoint.manager.pins import CONTROL_DIR, pinned_steps
from safepoint.manager.policy_text import recorded_policy
from safepoint.manager.step_listing import parse_name
from safepoint.manager.step_reading import StepReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from safepoint.formats.storage import Storage
    from safepoint.formats.tombstone import Tombstone
    from safepoint.manager.policies import Policy
    from safepoint.manager.step_listing import CommittedStep, Listing, OwnName

__all__ = ["Overview", "RootEntry", "overview"]

EntryKind = Literal["committed", "problem", "no record", "unfinished", "replaced", "deleted", "not ours"]

_KINDS: dict[str, EntryKind] = {
    "step": "no record",
    "tmp": "unfinished",
    "old": "replaced",
    "trash": "deleted",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RootEntry:
    """One name in a root.

    Attributes:
        name: of the directory or file.
        kind: "committed": a step. "problem": it has the name and a record of a step and is none. "no record": a number
            for a name, and no record. "unfinished": a save that has not committed, under way or left. "replaced": a
            step that another attempt took the place of. "deleted": hidden, and being deleted. "not ours": not touched.
        step: the number in its name, if it is of ours.
        num_bytes: what it holds; of a step what its record says.
        own_bytes: of these, what no entry before it has, too: all together they are what the root takes on disk.
        committed: the step, where it is one.
        kept: why it stays, as far as that is known here: latest, pinned, and what the policy says.
        left_by: the later commit of a lower step that left this one's branch, if there is one.
        problem: what is wrong with it.
    """

    name: str
    kind: EntryKind
    step: int | None = None
    num_bytes: int = 0
    own_bytes: int = 0
    committed: CommittedStep | None = None
    kept: tuple[str, ...] = ()
    left_by: int | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """A root.

    Attributes:
        root: its path.
        entries: committed steps in the order of their commits, then the rest by name.
        pinned_absent: pinned steps that are not committed.
    """

    root: str
    entries: tuple[RootEntry, ...]
    pinned_absent: tuple[int, ...]

    @property
    def steps(self) -> tuple[RootEntry, ...]:
        """The committed steps, in the order of their commits."""
        return tuple(entry for entry in self.entries if entry.committed is not None)

    @property
    def shares_files(self) -> bool:
        """Whether some of the steps have files of others."""
        return any(entry.own_bytes != entry.num_bytes for entry in self.steps)

    @property
    def problems(self) -> tuple[RootEntry, ...]:
        """What should be a step and is none."""
        return tuple(entry for entry in self.entries if entry.problem is not None)


def overview(storage: Storage, keep: Policy | None = None) -> Overview:
    """Look at a root.

    Args:
        storage: of the root.
        keep: a policy whose reasons are told; None takes the one under which the latest step was saved, if it is known.

    Raises:
        StorageError: the root cannot be listed.
    """
    listing = StepReader(storage).listing()
    if keep is None and listing.steps:
        keep = recorded_policy(listing.steps[-1].record)
    pinned = pinned_steps(storage)
    entries = _steps(listing, pinned, keep)
    shown = {entry.name for entry in entries} | {CONTROL_DIR}
    problems = {problem.prefix: problem.error.message for problem in listing.problems}
    for found in sorted(storage.list(""), key=lambda found: found.name):
        if found.name in shown:
            continue
        problem = problems.get(found.name)
        own = parse_name(found.name) if found.is_dir or problem is not None else None
        entries.append(
            RootEntry(
                name=found.name,
                kind="problem" if problem is not None else _kind(own, listing.tombstones.get(found.name)),
                step=None if own is None else own.step,
                num_bytes=num_bytes_in(storage, found.name),
                problem=problem,
            )
        )
    committed = {step.record.step for step in listing.steps}
    return Overview(
        root=storage.location,
        entries=tuple(_with_own_bytes(storage, entries)),
        pinned_absent=tuple(sorted(pinned.difference(committed))),
    )


def _with_own_bytes(storage: Storage, entries: Sequence[RootEntry]) -> list[RootEntry]:
    """Tell for each entry what of it is its own; the files are looked at only where some are shared."""
    has_links = any(entry.committed is not None and entry.committed.record.linked_bytes for entry in entries)
    if not has_links or not isinstance(storage, LocalStorage):
        return [replace(entry, own_bytes=entry.num_bytes) for entry in entries]
    paths = [storage.root / entry.name for entry in entries]
    own = zip(entries, bytes_of_each(paths), strict=True)
    return [replace(entry, own_bytes=size - _record_bytes(entry, storage.root)) for entry, size in own]


def _record_bytes(entry: RootEntry, root: Path) -> int:
    """Return the size of a step's records, which are not among its bytes."""
    step = entry.committed
    if step is None:
        return 0
    records = (root / step.prefix / COMMIT_NAME, root / step.files_prefix / MANIFEST_NAME)
    return sum(map(num_bytes_below, records))


def _steps(listing: Listing, pinned: frozenset[int], keep: Policy | None) -> list[RootEntry]:
    reasons = {} if keep is None else keep.keep([step.info for step in listing.steps])
    left = _left_by(listing.steps)
    entries = []
    for step in listing.steps:
        number = step.record.step
        why = [
            "latest" if step is listing.steps[-1] else "",
            "pinned" if number in pinned else "",
            reasons.get(number, ""),
        ]
        entries.append(
            RootEntry(
                name=step.prefix,
                kind="committed",
                step=number,
                num_bytes=step.record.num_bytes,
                committed=step,
                kept=tuple(filter(None, why)),
                left_by=left.get(number),
            )
        )
    return entries


def _kind(own: OwnName | None, tombstone: Tombstone | None) -> EntryKind:
    if tombstone is not None:
        return "deleted" if tombstone.state == "deleted" else "unfinished"
    return "not ours" if own is None else _KINDS[own.kind]


def _left_by(steps: Sequence[CommittedStep]) -> dict[int, int]:
    """Return for each step of a branch that was left the lowest step that a run went back to and committed later."""
    found: dict[int, int] = {}
    lowest: int | None = None
    for step in reversed(steps):
        number = step.record.step
        if lowest is not None and lowest < number:
            found[number] = lowest
        lowest = number if lowest is None else min(lowest, number)
    return found
