"""How a step becomes visible, and how it disappears: the one place where a root is changed.

There are two ways: where directories can be renamed in one step, a step appears by that (`rename_commit`); elsewhere by
its record, which is put last and only if nothing has changed meanwhile (`marker_commit`). Both end in the same record,
and what one left behind the other clears up. With `step_listing`, `unsettled` and `sweeping` this is the only code that
knows; it must not know what is in a step's files, who writes them, or which steps are worth keeping.
"""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING, Literal

from safepoint.formats.checksum import digest
from safepoint.formats.layout import MANIFEST_NAME
from safepoint.manager.collecting import paused_collection
from safepoint.manager.commit_protocol import may_be_set_aside
from safepoint.manager.errors import (
    CheckpointError,
    InvalidArgumentError,
    StepExistsError,
    StorageError,
)
from safepoint.manager.marker_commit import MarkerCommit
from safepoint.manager.progress import QUIET
from safepoint.manager.rename_commit import RenameCommit
from safepoint.manager.second_opinion import StepVerifier, verify_with
from safepoint.manager.step_listing import CommittedStep, StepProblem, is_attempt
from safepoint.manager.step_reading import StepReader
from safepoint.manager.sweeping import IN_USE

if TYPE_CHECKING:
    from collections.abc import Collection

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.layout import Scope
    from safepoint.formats.manifest import Manifest
    from safepoint.formats.storage import Storage
    from safepoint.manager.commit_protocol import CommitProtocol
    from safepoint.manager.progress import Progress

__all__ = ["CommitKind", "CommittedStep", "Committer", "StepProblem"]

logger = logging.getLogger("safepoint")

CommitKind = Literal["rename", "marker"]


class Committer(StepReader):
    """The steps of one root, and how they change.

    What `StepReader` does is for every process; what changes the root is for its owner alone, which is the primary,
    or each process where roots are private.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        scope: Scope = "shared",
        process_index: int = 0,
        process_count: int = 1,
        commit: CommitKind | None = None,
    ) -> None:
        """Remember the root.

        Args:
            storage: of the root.
            scope: whose records are written.
            process_index: of this process.
            process_count: how many processes write to one attempt in this root.
            commit: how; None for what suits the storage.

        Raises:
            InvalidArgumentError: the storage has no rename.
        """
        super().__init__(storage, private_to=process_index if scope == "per_process" else None)
        self._scope = scope
        self._process_index = process_index
        self._protocol = self._make_protocol(commit, process_count)

    def _make_protocol(self, commit: CommitKind | None, process_count: int) -> CommitProtocol:
        if commit == "marker" or (commit is None and not self._storage.renames):
            return MarkerCommit(self._storage, self, process_count=process_count)
        if not self._storage.renames:
            raise InvalidArgumentError(
                'commit="rename" needs a file system; object stores rename nothing',
                path=self._storage.location,
                hint='Leave `commit` away, or say "marker".',
            )
        return RenameCommit(self._storage, self)

    def verify(
        self,
        step: int | None = None,
        *,
        reader: StepVerifier = "safepoint",
        deadline_secs: float = 600.0,
        progress: Progress = QUIET,
    ) -> list[CheckpointError]:
        """Let a reader read a step, or all, and return what is wrong; see `verify_with`."""
        return verify_with(
            reader,
            self._storage,
            step=step,
            private_to=self._private_to,
            deadline_secs=deadline_secs,
            progress=progress,
        )

    # Making

    def prefix_of(self, step: int, attempt: str) -> str:
        """Return the directory, relative to the root, in which an attempt writes."""
        return self._protocol.prefix_of(step, attempt)

    def begin(self, step: int, attempt: str) -> str:
        """Make the directory of an attempt, and the root if need be; return it, relative to the root.

        Called by: the root's owner, before any process writes.

        Raises:
            StepExistsError: something that is not a step of ours has the step's name; nothing was made.
            StorageError: the root is a file, read-only, full, …
        """
        if not is_attempt(attempt):
            raise InvalidArgumentError(f"an attempt is 16 to 32 hexadecimal digits, got {attempt!r}", step=step)
        try:
            self._storage.make_dir("")
            self._check_name_is_free(step)
            self._protocol.begin(step, attempt)
        except CheckpointError as error:
            raise error.with_context(step=step, outcome="not_committed") from None
        return self.prefix_of(step, attempt)

    def resume(self, step: int, attempt: str) -> bool:
        """Go on with an attempt that was begun and not published, its records removed; False when there is none.

        Called by: the root's owner, who spared the attempt when it `recover`ed.
        """
        return self._protocol.resume(step, attempt)

    def _check_name_is_free(self, step: int) -> None:
        """Refuse early what `publish` could not replace."""
        listing = self.listing_of(step)
        name = str(step)
        if name not in listing.occupied or name in listing.tombstones:
            return
        if any(known.prefix == name for known in listing.steps):
            return
        problem = next((problem for problem in listing.problems if problem.prefix == name), None)
        if problem is None and self._protocol.is_free(name):
            return
        if problem is not None and may_be_set_aside(problem):
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
            return self._protocol.publish(record, replace)
        except StorageError as error:
            if error.outcome is not None:
                raise error.with_context(step=record.step) from None
            raise self.lost_or(error, record.step, prefix) from error
        except CheckpointError as error:
            raise error.with_context(step=record.step, outcome="not_committed") from None

    def drop_replaced(self, replaced: CommittedStep) -> None:
        """Hide what `publish_beside` replaced. A failure is logged: the next owner sweeps it."""
        try:
            self._protocol.drop_replaced(replaced)
        except StorageError as error:
            logger.warning("cannot hide the replaced %s: %s", self._storage.describe(replaced.prefix), error)

    def _check_record(self, record: CommitRecord) -> None:
        private = self._scope == "per_process"
        if record.scope != self._scope or record.process_index != (self._process_index if private else None):
            raise InvalidArgumentError(f"a record of scope {record.scope!r} does not belong in a {self._scope} root")

    def lost_or(self, error: StorageError, step: int, prefix: str) -> CheckpointError:
        """Return the error of a lost attempt if its directory is gone, else `error`; not committed either way.

        Called by: whoever could not write there.
        """
        if error.errno == errno.ENOENT:
            parent, _, name = prefix.rpartition("/")
            try:
                if not any(entry.name == name for entry in self._storage.list(parent)):
                    return self._protocol.lost(step, prefix)
            except StorageError as second:
                logger.debug("cannot list %s: %s", self._storage.describe(parent), second)
        return error.with_context(step=step, outcome="not_committed")

    # Removing

    def abandon(self, step: int, attempt: str) -> bool:
        """Give an attempt up, so that nobody can publish it any more, and delete what it wrote.

        Called by: anybody who was told that the save failed.

        Returns:
            True when this call did it; False when the attempt was published or given up before.
        """
        return self._protocol.abandon(step, attempt)

    def hide(self, step: CommittedStep) -> bool:
        """Take a committed step out of the listing at once; `delete_hidden` frees its space.

        Returns:
            True when this call did it; False when it was gone, or is in use and will be tried again.
        """
        try:
            return self._protocol.hide(step)
        except StorageError as error:
            if error.errno not in IN_USE:
                raise error.with_context(step=step.record.step) from None
            logger.warning("step %d cannot be deleted now: %s", step.record.step, error)
            return False

    def hide_damaged(self, problem: StepProblem) -> bool:
        """Take away what has the name of a step and a record that cannot be read, as `hide` does.

        Returns:
            True when this call did it; False when it was gone.
        """
        return self._protocol.hide_damaged(problem)

    def delete_hidden(self) -> list[str]:
        """Delete what is hidden; return the names that could not be, which the next call tries again.

        Slow: meant for a thread of its own, beside everything else.
        """
        return self._protocol.delete_hidden()

    def recover(self, *, spare: Collection[str] = ()) -> list[str]:
        """Put right what an earlier owner left in the middle; return what was done, one line each.

        Attempts that nobody should be working on any more are hidden, so that none of them can be published; a step
        whose replacement was interrupted gets its name back. `delete_hidden` then frees the space.

        Called by: the root's owner, when it became that, before its first save.

        Args:
            spare: attempts that their writer, this process, goes on with.
        """
        return self._protocol.recover(spare)
