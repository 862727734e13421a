"""Committing by a marker, where nothing is renamed in one step: object stores, and mounts of them.

Everything of an attempt lies in a directory of its own inside the step's, `<step>/<attempt>/`, and the record is put
last, into the step's one slot (`slots`), only if the slot is still as the attempt found it when it began. Deleting puts
a tombstone there first, in the same way, and takes the files after it. Of several that change one slot the first wins,
and the others learn that they lost. What is to be deleted is told by marks (`unsettled`), never by a listing.

What fails when, in `publish`:

    before the put      the attempt stays, unlisted, and is abandoned or settled later    outcome not_committed
    in the put          the slot is fenced, so that a late put changes nothing: either    outcome by that, or unknown
                        the fence was first, or the record is there
    after the put       the step is there; only the removal of an old one is in doubt     outcome committed
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.commit_record import CommitRecord, fenced
from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME, MARKER_VERSION
from safepoint.formats.tombstone import Tombstone
from safepoint.manager import sweeping
from safepoint.manager.commit_protocol import CommitProtocol
from safepoint.manager.errors import CheckpointError, Outcome, StorageError
from safepoint.manager.slots import Slot, claim_slot, fence_attempt, read_slot, slot_path
from safepoint.manager.step_listing import CommittedStep, is_attempt, parse_name
from safepoint.manager.unsettled import Mark, read_marks, told

if TYPE_CHECKING:
    from collections.abc import Collection

    from safepoint.formats.storage import Storage
    from safepoint.manager.step_listing import StepProblem
    from safepoint.manager.step_reading import StepReader

__all__ = ["MarkerCommit"]

logger = logging.getLogger("safepoint")


class MarkerCommit(CommitProtocol):
    """For object stores."""

    def __init__(self, storage: Storage, reader: StepReader, *, process_count: int) -> None:
        """Start.

        Args:
            storage: of the root.
            reader: of its steps.
            process_count: how many processes write to one attempt.
        """
        super().__init__(storage, reader)
        self._process_count = process_count
        self._begun: dict[str, Slot] = {}
        self._given_up: set[str] = set()
        self._behind: dict[str, tuple[CommittedStep, Slot]] = {}
        """By attempt, what it replaced, until `drop_replaced`."""

    @override
    def prefix_of(self, step: int, attempt: str) -> str:
        return f"{step}/{attempt}"

    @override
    def begin(self, step: int, attempt: str) -> None:
        mark = _mark_of(step, attempt)
        while self._given_up:
            self._unsettled.let_go(self._given_up.pop())
        self._unsettled.hold([attempt])
        try:
            self._unsettled.put(mark)
            with self._unsettled.lock:  # the thread that deletes removes empty directories, and settled tombstones
                self._begun[attempt] = claim_slot(self._storage, step, attempt)
                self._storage.make_dir(mark.files_prefix)
        except BaseException:
            self._unsettled.let_go(attempt)
            raise

    @override
    def is_free(self, name: str) -> bool:
        if any(entry.name == name and not entry.is_dir for entry in self._storage.list("")):
            return False
        # Attempts beside each other harm nobody: one may be a step that is being copied to here, its record last.
        return all(is_attempt(entry.name) and entry.is_dir for entry in self._storage.list(name))

    @override
    def resume(self, step: int, attempt: str) -> bool:
        mark = _mark_of(step, attempt)
        if mark not in read_marks(self._storage) or not self._storage.list(mark.files_prefix):
            return False
        self.begin(step, attempt)
        self._storage.delete(f"{mark.files_prefix}/{MANIFEST_NAME}")
        return True

    @override
    def publish(self, record: CommitRecord, replaced: CommittedStep | None) -> CommittedStep | None:
        mark = _mark_of(record.step, record.attempt)
        slot = self._check_slot(record, replaced)
        record = replace(record, version=max(record.version, MARKER_VERSION), files=record.attempt, fence=None)
        for directory in (mark.files_prefix, mark.prefix, ""):
            self._storage.sync_dir(directory)
        if replaced is not None:
            self._unsettled.hold([replaced.record.attempt])
            self._behind[record.attempt] = (replaced, slot)
            self._unsettled.put(_mark_on(replaced, "replaced"))
        try:
            self._put_record(record, slot)
        except BaseException:
            if replaced is not None:
                self.drop_replaced(replaced)  # that was not: its mark goes when it is looked at next
            raise
        self._begun.pop(record.attempt, None)
        self._unsettled.remove(mark)
        self._unsettled.let_go(record.attempt)
        return replaced

    def _check_slot(self, record: CommitRecord, replaced: CommittedStep | None) -> Slot:
        """Return the slot as it was when the attempt began; refuse early what the put would refuse."""
        now = read_slot(self._storage, str(record.step))
        if now is None:
            raise self._beaten(record, now)
        content = now.content
        if isinstance(content, Tombstone) and (content.attempt, content.state) == (record.attempt, "claimed"):
            if replaced is not None and replaced.prefix == str(record.step):
                raise self._beaten(record, now)  # it is not there any more
            return now
        begun = self._begun.get(record.attempt)
        if begun is None or now.version != begun.version:
            raise self._beaten(record, now)
        if replaced is None or now.committed != replaced.record.attempt:
            raise self.exists(record.step)
        return now

    def _put_record(self, record: CommitRecord, slot: Slot) -> None:
        """The commit itself."""
        try:
            won = self._storage.put_if_unchanged(slot_path(str(record.step)), record.to_bytes(), slot.version)
        except StorageError as error:
            outcome = self._find_outcome(record)
            if outcome == "committed":
                return  # the answer was lost, the record was not
            error.outcome = outcome
            raise error.with_context(step=record.step) from None
        if not won:
            now = read_slot(self._storage, str(record.step))
            if now is None or now.committed != record.attempt:
                raise self._beaten(record, now)

    def _find_outcome(self, record: CommitRecord) -> Outcome:
        """Say what became of a put whose answer did not come, having made sure that it does not come later."""
        try:
            fence_attempt(self._storage, record.step, record.attempt)
            now = read_slot(self._storage, str(record.step))
        except CheckpointError:
            return "unknown"
        return "committed" if now is not None and now.committed == record.attempt else "not_committed"

    def _beaten(self, record: CommitRecord, now: Slot | None) -> CheckpointError:
        if now is not None and isinstance(now.content, CommitRecord) and now.content.fence != record.attempt:
            error = self.exists(record.step)
            error.hint = f"Attempt {now.content.attempt} committed it; this one came too late."
            return error
        return self.lost(record.step, self.prefix_of(record.step, record.attempt))

    @override
    def drop_replaced(self, replaced: CommittedStep) -> None:
        self._behind = {new: old for new, old in self._behind.items() if old[0] != replaced}
        self._unsettled.let_go(replaced.record.attempt)

    @override
    def abandon(self, step: int, attempt: str) -> bool:
        begun = self._begun.pop(attempt, None)
        self._given_up.add(attempt)  # what fails here, or has to wait for others, is settled after the next save
        return self._abandon(_mark_of(step, attempt), begun)

    def _abandon(self, mark: Mark, begun: Slot | None) -> bool:
        step, attempt = int(mark.prefix), mark.attempt
        slot = read_slot(self._storage, mark.prefix)
        # Whoever began it knows when it was beaten; others change the slot in doubt.
        is_open = slot is not None and (begun is None or begun.version == slot.version)
        won = is_open and fence_attempt(self._storage, step, attempt)
        slot = read_slot(self._storage, mark.prefix) if is_open and not won else slot
        is_committed = slot is not None and slot.committed == attempt
        if is_committed or self._process_count == 1:
            self._given_up.discard(attempt)
            self._unsettled.let_go(attempt)
            self._settle(mark)
        else:
            # Others may still be writing: the mark stays until they are known to have ended, when the next save begins.
            sweeping.delete(self._storage, mark.files_prefix)
        return won

    def _settle(self, mark: Mark) -> None:
        try:
            self._unsettled.settle(mark)
        except StorageError as error:
            logger.warning("cannot delete %s, will try again: %s", self._storage.describe(mark.files_prefix), error)

    @override
    def hide(self, step: CommittedStep) -> bool:
        attempt = step.record.attempt
        mark = _mark_on(step, "deleted")
        with self._unsettled.lock:
            slot = read_slot(self._storage, step.prefix)
            if slot is None or slot.committed != attempt:
                return False
            self._unsettled.put(mark)
            behind = self._behind.get(attempt)
            if behind is None or behind[0].prefix != step.prefix:
                data = Tombstone(step=step.record.step, attempt=attempt, state="deleted").to_bytes()
            else:  # what it replaced is the step again
                data = fenced(behind[1].data, attempt, path=step.prefix)
            if behind is not None:
                self.drop_replaced(behind[0])
            return self._storage.put_if_unchanged(slot_path(step.prefix), data, slot.version)

    @override
    def hide_damaged(self, problem: StepProblem) -> bool:
        attempt = secrets.token_hex(8)  # whose it was cannot be told; all that is nobody else's goes
        with self._unsettled.lock:
            slot = read_slot(self._storage, problem.prefix)
            if slot is None or slot.version is None:
                return False
            self._unsettled.put(Mark(kind="deleted", prefix=problem.prefix, attempt=attempt, files=""))
            data = Tombstone(step=problem.step, attempt=attempt, state="deleted").to_bytes()
            return self._storage.put_if_unchanged(slot_path(problem.prefix), data, slot.version)

    @override
    def delete_hidden(self) -> list[str]:
        return [*sweeping.delete_hidden(self._storage), *self._unsettled.settle_all()]

    @override
    def recover(self, spare: Collection[str]) -> list[str]:
        self._unsettled.hold(spare)
        done = told(self._unsettled.fence_all())
        # And what saves by a rename left here, before this root was one of markers, or was copied to here.
        for entry in self._storage.list(""):
            name = parse_name(entry.name)
            if not entry.is_dir or name is None or name.kind != "tmp" or name.attempt in (None, *spare):
                continue
            if not self._storage.renames:
                self._storage.delete(f"{entry.name}/{COMMIT_NAME}")
                sweeping.delete(self._storage, entry.name)
            elif sweeping.to_trash(self._storage, entry.name, str(name.attempt)) is None:
                continue
            done.append(f"removed an unfinished save of step {name.step} ({entry.name})")
        listing = self._reader.listing()
        done.extend(
            f"removed the replaced step {step.record.step} ({step.prefix})"
            for step in listing.superseded
            if self.hide(step)
        )
        marked = {(mark.prefix, mark.attempt) for mark in read_marks(self._storage)}
        for prefix, tombstone in listing.tombstones.items():
            if tombstone.attempt not in spare and (prefix, tombstone.attempt) not in marked:
                self._clear(prefix, tombstone)
        return done

    def _clear(self, prefix: str, tombstone: Tombstone) -> None:
        """Remove a tombstone that stands for nothing: a put that came late, or a copy. Touches nothing else."""
        with self._unsettled.lock:
            slot = read_slot(self._storage, prefix)
            if slot is not None and slot.content == tombstone:
                self._storage.delete_if_unchanged(slot_path(prefix), slot.version)
                self._storage.delete_dir(prefix)


def _mark_of(step: int, attempt: str) -> Mark:
    return Mark(kind="unfinished", prefix=str(step), attempt=attempt, files=attempt)


def _mark_on(step: CommittedStep, kind: str) -> Mark:
    files = step.record.files
    # A record that names another directory than its attempt's is not ours; what a mark cannot name stays.
    return Mark(
        kind="replaced" if kind == "replaced" else "deleted",
        prefix=step.prefix,
        attempt=step.record.attempt,
        files=files if is_attempt(files) else "",
    )
