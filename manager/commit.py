"""How a step becomes visible, and how it disappears; with `step_listing` and `sweeping` the only code that knows.

One rule carries it all: a directory named `<step>` with a commit record is a whole step, because it gets that name by
one rename after everything in it is durable. Deleting goes the same way back: the name goes first, by a rename, and
the content after it. Of several that rename one directory (publish it, abandon it, take over the root) the first
wins, and the others learn that they lost.

What fails when, in `Committer.publish`:

    before the rename   the attempt stays, unlisted, and is abandoned or swept later      outcome not_committed
    in the rename       whoever looks finds the attempt's record under one of two names   outcome by looking, or unknown
    after the rename    the step is there; only its durability or an old one's removal    outcome committed
                        is in doubt

It must not know what is in a step's files, who writes them, or which steps are worth keeping.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

from safepoint.formats.checksum import digest
from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME
from safepoint.manager import sweeping
from safepoint.manager.collecting import paused_collection
from safepoint.manager.errors import (
    AttemptLostError,
    CheckpointError,
    InvalidArgumentError,
    Outcome,
    StepExistsError,
    StorageError,
    UnsupportedVersionError,
)
from safepoint.manager.progress import QUIET
from safepoint.manager.step_listing import CommittedStep, StepProblem, is_attempt
from safepoint.manager.step_reading import StepReader, attempt_at
from safepoint.manager.verifying import verify_steps

if TYPE_CHECKING:
    from collections.abc import Collection

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.layout import Scope
    from safepoint.formats.manifest import Manifest
    from safepoint.formats.storage import Storage
    from safepoint.manager.progress import Progress

__all__ = ["CommittedStep", "Committer", "StepProblem"]

logger = logging.getLogger("safepoint")


class Committer(StepReader):
    """The steps of one root, and how they change.

    What `StepReader` does is for every process; what changes the root is for its owner alone, which is the primary,
    or each process where roots are private.
    """

    def __init__(self, storage: Storage, *, scope: Scope = "shared", process_index: int = 0) -> None:
        super().__init__(storage, private_to=process_index if scope == "per_process" else None)
        self._scope = scope
        self._process_index = process_index

    def verify(self, step: int | None = None, *, progress: Progress = QUIET) -> list[CheckpointError]:
        """Read every byte of a step, or of all, and return what is wrong; see `verify_steps`."""
        return verify_steps(self._storage, step=step, private_to=self._private_to, progress=progress)

    # Making

    @staticmethod
    def prefix_of(step: int, attempt: str) -> str:
        """Return the directory, relative to the root, in which an attempt writes."""
        return f"{step}.tmp-{attempt}"

    def begin(self, step: int, attempt: str) -> str:
        """Make the directory of an attempt, and the root if need be; return it, relative to the root.

        Called by: the root's owner, before any process writes.

        Raises:
            StepExistsError: something that is not a step of ours has the step's name; nothing was made.
            StorageError: the root is a file, read-only, full, …
        """
        if not is_attempt(attempt):
            raise InvalidArgumentError(f"an attempt is 16 to 32 hexadecimal digits, got {attempt!r}", step=step)
        prefix = self.prefix_of(step, attempt)
        try:
            self._storage.make_dir("")
            self._check_name_is_free(step)
            self._storage.make_dir(prefix, exist_ok=False)
        except CheckpointError as error:
            raise error.with_context(step=step, outcome="not_committed") from None
        return prefix

    def _check_name_is_free(self, step: int) -> None:
        """Refuse early what `publish` could not replace."""
        listing = self.listing()
        name = str(step)
        if name not in listing.occupied or any(known.prefix == name for known in listing.steps):
            return
        problem = next((problem for problem in listing.problems if problem.prefix == name), None)
        if problem is not None and _may_be_set_aside(problem):
            return
        if problem is not None and isinstance(problem.error, StorageError):
            raise problem.error
        raise StepExistsError(
            "something that is not a step of this safepoint has the name of this step"
            + (f": {problem.error.message}" if problem is not None else ""),
            step=step,
            path=self._storage.describe(name),
            hint="Move it out of the way; safepoint does not touch what is not its own.",
        )

    def write_manifest(self, step: int, attempt: str, manifest: Manifest) -> tuple[int, str]:
        """Write the manifest of an attempt, durably; return its size in bytes and its digest, for the record.

        Raises:
            AttemptLostError: the attempt was abandoned, or swept by another owner.
            StorageError: the storage failed.
        """
        with paused_collection():
            data = manifest.to_bytes()
        prefix = self.prefix_of(step, attempt)
        try:
            self._storage.put(f"{prefix}/{MANIFEST_NAME}", data)
        except StorageError as error:
            raise self.lost_or(error, step, prefix) from error
        return len(data), digest(data)

    def publish(self, record: CommitRecord, replace: CommittedStep | None = None) -> None:
        """Commit an attempt: after this the step is listed, whole, and survives a crash; the replaced one is gone.

        Called by: the root's owner, when all files are durable and the manifest is written.

        Args:
            record: the commit record.
            replace: the committed step of that number, to be replaced; None when there is none.

        Raises:
            AttemptLostError: the attempt was abandoned, or swept by another owner.
            StepExistsError: the step is there, and is not to be replaced.
            StorageError: the storage failed. All of them carry `outcome`.
        """
        replaced = self.publish_beside(record, replace)
        if replaced is not None:
            self.drop_replaced(replaced)

    def publish_beside(self, record: CommitRecord, replace: CommittedStep | None = None) -> CommittedStep | None:
        """Do as `publish` does, but keep the replaced step beside the new one: while that is hidden, it is the step.

        Returns:
            The replaced step, for `drop_replaced`, if there is one.
        """
        prefix = self.prefix_of(record.step, record.attempt)
        try:
            self._check_record(record)
            self._storage.put(f"{prefix}/{COMMIT_NAME}", record.to_bytes())
            self._storage.sync_dir(prefix)
            aside = self._move_aside(record, replace)
        except StorageError as error:
            raise self.lost_or(error, record.step, prefix) from error
        except CheckpointError as error:
            raise error.with_context(step=record.step, outcome="not_committed") from None
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
        return None if replace is None else CommittedStep(replace.record, aside or replace.prefix)

    def drop_replaced(self, replaced: CommittedStep) -> None:
        """Hide what `publish_beside` replaced. A failure is logged: the next owner sweeps it."""
        try:
            sweeping.to_trash(self._storage, replaced.prefix, replaced.record.attempt)
        except StorageError as error:
            logger.warning("cannot hide the replaced %s: %s", self._storage.describe(replaced.prefix), error)

    def _check_record(self, record: CommitRecord) -> None:
        private = self._scope == "per_process"
        if record.scope != self._scope or record.process_index != (self._process_index if private else None):
            raise InvalidArgumentError(f"a record of scope {record.scope!r} does not belong in a {self._scope} root")

    def _move_aside(self, record: CommitRecord, replace: CommittedStep | None) -> str | None:
        """Free the step's name for the attempt; return where that went which had it.

        From here to the rename that follows, the step is listed under its `.old-` name.
        """
        name = str(record.step)
        if replace is not None:
            # A replaced step that is listed as `.old-` leaves the name free already.
            target = f"{name}.old-{record.attempt}"
            return target if replace.prefix == name and self._storage.rename_dir(name, target) else None
        problem = next((problem for problem in self.problems() if problem.prefix == name), None)
        if problem is not None and _may_be_set_aside(problem):
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
        name = str(record.step)
        try:
            if self._storage.rename_dir(prefix, name):
                return
        except StorageError as error:
            if error.errno == errno.EEXIST:
                raise StepExistsError(
                    "the step is there already",
                    step=record.step,
                    path=self._storage.describe(name),
                    outcome="not_committed",
                ) from error
            outcome = self._find_outcome(record, prefix)
            if outcome == "committed":
                return  # the answer was lost, the rename was not
            error.outcome = outcome
            raise error.with_context(step=record.step) from None
        raise self._lost(record.step, prefix)

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

    def lost_or(self, error: StorageError, step: int, prefix: str) -> CheckpointError:
        """Return the error of a lost attempt if its directory is gone, else `error`; not committed either way.

        Called by: whoever could not write there.
        """
        if error.errno == errno.ENOENT:
            try:
                if not any(entry.name == prefix for entry in self._storage.list("")):
                    return self._lost(step, prefix)
            except StorageError as second:
                logger.debug("cannot list the root: %s", second)
        return error.with_context(step=step, outcome="not_committed")

    def _lost(self, step: int, prefix: str) -> AttemptLostError:
        return AttemptLostError(
            "the attempt was abandoned, or another manager took the root over, before the step was published",
            step=step,
            path=self._storage.describe(prefix),
            outcome="not_committed",
            hint="Look for another job on this root; this one was silent for too long, or was told to stop.",
        )

    # Removing

    def abandon(self, step: int, attempt: str) -> bool:
        """Give an attempt up, so that nobody can publish it any more, and delete what it wrote.

        Called by: anybody who was told that the save failed.

        Returns:
            True when this call did it; False when the attempt was published or given up before.
        """
        hidden = sweeping.to_trash(self._storage, self.prefix_of(step, attempt), attempt)
        if hidden is None:
            return False
        sweeping.delete(self._storage, hidden)
        return True

    def hide(self, step: CommittedStep) -> bool:
        """Take a committed step out of the listing at once; `delete_hidden` frees its space.

        Returns:
            True when this call did it; False when it was gone, or is in use and will be tried again.
        """
        try:
            return sweeping.to_trash(self._storage, step.prefix, step.record.attempt) is not None
        except StorageError as error:
            if error.errno not in sweeping.IN_USE:
                raise error.with_context(step=step.record.step) from None
            logger.warning("step %d cannot be deleted now: %s", step.record.step, error)
            return False

    def delete_hidden(self) -> list[str]:
        """Delete what is hidden; return the names that could not be, which the next call tries again.

        Slow: meant for a thread of its own, beside everything else.
        """
        return sweeping.delete_hidden(self._storage)

    def recover(self, *, spare: Collection[str] = ()) -> list[str]:
        """Put right what an earlier owner left in the middle; return what was done, one line each.

        Attempts that nobody should be working on any more are hidden, so that none of them can be published; a step
        whose replacement was interrupted gets its name back. `delete_hidden` then frees the space.

        Called by: the root's owner, when it became that, before its first save.

        Args:
            spare: attempts that their writer, this process, goes on with.
        """
        return sweeping.recover(self._storage, self.listing(), spare=spare)


def _may_be_set_aside(problem: StepProblem) -> bool:
    """Say whether the step may be saved anew: it is damaged beyond reading, not merely beyond our reading."""
    return not isinstance(problem.error, UnsupportedVersionError | StorageError)
