"""Committing by a rename: the attempt's directory gets the step's name when everything in it is durable.

Deleting goes the same way back: the name goes first, by a rename, and the content after it. Of several that rename one
directory (publish it, abandon it, take over the root) the first wins, and the others learn that they lost.

What fails when, in `publish`:

    before the rename   the attempt stays, unlisted, and is abandoned or swept later      outcome not_committed
    in the rename       whoever looks finds the attempt's record under one of two names   outcome by looking, or unknown
    after the rename    the step is there; only its durability or an old one's removal    outcome committed
                        is in doubt
"""

from __future__ import annotations

import errno
import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.layout import COMMIT_NAME, LAYOUT_VERSION, MANIFEST_NAME
from safepoint.manager import sweeping
from safepoint.manager.commit_protocol import CommitProtocol, may_be_set_aside
from safepoint.manager.errors import CheckpointError, Outcome, StorageError
from safepoint.manager.step_listing import CommittedStep
from safepoint.manager.step_reading import attempt_at
from safepoint.manager.unsettled import told

if TYPE_CHECKING:
    from collections.abc import Collection

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.manager.step_listing import StepProblem

__all__ = ["RenameCommit"]

logger = logging.getLogger("safepoint")


class RenameCommit(CommitProtocol):
    """For file systems."""

    @override
    def prefix_of(self, step: int, attempt: str) -> str:
        return f"{step}.tmp-{attempt}"

    @override
    def begin(self, step: int, attempt: str) -> None:
        self._storage.make_dir(self.prefix_of(step, attempt), exist_ok=False)

    @override
    def is_free(self, name: str) -> bool:
        return False  # a rename replaces nothing

    @override
    def resume(self, step: int, attempt: str) -> bool:
        prefix = self.prefix_of(step, attempt)
        if not any(entry.name == prefix and entry.is_dir for entry in self._storage.list("")):
            return False
        for name in (COMMIT_NAME, MANIFEST_NAME):
            self._storage.delete(f"{prefix}/{name}")
        return True

    @override
    def publish(self, record: CommitRecord, replaced: CommittedStep | None) -> CommittedStep | None:
        prefix = self.prefix_of(record.step, record.attempt)
        record = replace(record, version=LAYOUT_VERSION, files="", fence=None)
        self._storage.put(f"{prefix}/{COMMIT_NAME}", record.to_bytes())
        self._storage.sync_dir(prefix)
        aside = self._move_aside(record, replaced)
        try:
            self._rename_in(record, prefix)
        except CheckpointError as error:
            if aside is not None and error.outcome == "not_committed":
                self._put_back(aside, str(record.step))
            raise
        try:
            self._storage.sync_dir("")
        except StorageError as error:
            raise error.with_context(step=record.step, outcome="committed") from None
        return None if replaced is None else CommittedStep(replaced.record, aside or replaced.prefix)

    @override
    def drop_replaced(self, replaced: CommittedStep) -> None:
        sweeping.to_trash(self._storage, replaced.prefix, replaced.record.attempt)

    def _move_aside(self, record: CommitRecord, replaced: CommittedStep | None) -> str | None:
        """Free the step's name for the attempt; return where that went which had it.

        From here to the rename that follows, the step is listed under its `.old-` name.
        """
        name = str(record.step)
        if replaced is not None:
            # A replaced step that is listed as `.old-` leaves the name free already.
            target = f"{name}.old-{record.attempt}"
            return target if replaced.prefix == name and self._storage.rename_dir(name, target) else None
        listing = self._reader.listing_of(record.step)
        if name in listing.tombstones:  # of a save by markers that was given up here
            sweeping.to_trash(self._storage, name, record.attempt)
            return None
        problem = next((problem for problem in listing.problems if problem.prefix == name), None)
        if problem is not None and may_be_set_aside(problem):
            target = f"{name}.damaged-{record.attempt}"
            if self._storage.rename_dir(name, target):
                logger.warning(
                    "step %s was damaged and is being saved again; the damaged one is kept as %s (%s)",
                    name,
                    self._storage.describe(target),
                    problem.error.message,
                )
                return target
        return None

    def _rename_in(self, record: CommitRecord, prefix: str) -> None:
        """The commit itself."""
        try:
            if self._storage.rename_dir(prefix, str(record.step)):
                return
        except StorageError as error:
            if error.errno == errno.EEXIST:
                raise self.exists(record.step) from error
            outcome = self._find_outcome(record, prefix)
            if outcome == "committed":
                return  # the answer was lost, the rename was not
            error.outcome = outcome
            raise error.with_context(step=record.step) from None
        raise self.lost(record.step, prefix)

    def _find_outcome(self, record: CommitRecord, prefix: str) -> Outcome:
        try:
            if attempt_at(self._storage, str(record.step)) == record.attempt:
                return "committed"
            return "not_committed" if attempt_at(self._storage, prefix) == record.attempt else "unknown"
        except CheckpointError:
            return "unknown"

    def _put_back(self, aside: str, name: str) -> None:
        try:
            if self._storage.rename_dir(aside, name):
                self._storage.sync_dir("")
        except StorageError as error:
            # Nothing is lost: `.old-` counts as the step, and the next owner puts it back.
            logger.warning("cannot rename %s back to %s: %s", self._storage.describe(aside), name, error)

    @override
    def abandon(self, step: int, attempt: str) -> bool:
        hidden = sweeping.to_trash(self._storage, self.prefix_of(step, attempt), attempt)
        if hidden is None:
            return False
        sweeping.delete(self._storage, hidden)
        return True

    @override
    def hide(self, step: CommittedStep) -> bool:
        return sweeping.to_trash(self._storage, step.prefix, step.record.attempt) is not None

    @override
    def recover(self, spare: Collection[str]) -> list[str]:
        done = sweeping.recover(self._storage, self._reader.listing(), spare=spare)
        # What saves by markers left here goes before a rename can put another step in its place.
        self._unsettled.hold(spare)
        marks = self._unsettled.fence_all()
        self._unsettled.settle_all()
        return [*done, *told(marks)]

    @override
    def hide_damaged(self, problem: StepProblem) -> bool:
        return sweeping.to_trash(self._storage, problem.prefix, secrets.token_hex(8)) is not None

    @override
    def delete_hidden(self) -> list[str]:
        return sweeping.delete_hidden(self._storage)
