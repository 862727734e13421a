"""What a way to commit has to do; `rename_commit` and `marker_commit` are the two there are.

The names of steps, the reading of records and the order of a save are the same for both, and lie elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from safepoint.manager.errors import AttemptLostError, StepExistsError, StorageError, UnsupportedVersionError
from safepoint.manager.unsettled import Unsettled

if TYPE_CHECKING:
    from collections.abc import Collection

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.storage import Storage
    from safepoint.manager.step_listing import CommittedStep, StepProblem
    from safepoint.manager.step_reading import StepReader

__all__ = ["CommitProtocol", "may_be_set_aside"]


class CommitProtocol(ABC):
    """How attempts become steps in one root, and how steps go. `Committer` says what each call promises."""

    def __init__(self, storage: Storage, reader: StepReader) -> None:
        self._storage = storage
        self._reader = reader
        self._unsettled = Unsettled(storage)

    @abstractmethod
    def prefix_of(self, step: int, attempt: str) -> str:
        """Return the directory, relative to the root, in which an attempt writes."""

    @abstractmethod
    def begin(self, step: int, attempt: str) -> None:
        """Make the directory of an attempt; the root is there."""

    @abstractmethod
    def is_free(self, name: str) -> bool:
        """Say whether a step may be saved where something of its name lies that is neither a record nor a tombstone."""

    @abstractmethod
    def resume(self, step: int, attempt: str) -> bool:
        """Go on with an attempt that was begun earlier and is not published; return False when there is none."""

    @abstractmethod
    def publish(self, record: CommitRecord, replaced: CommittedStep | None) -> CommittedStep | None:
        """Commit; return the replaced step, hidden behind the new one, as `drop_replaced` takes it."""

    @abstractmethod
    def drop_replaced(self, replaced: CommittedStep) -> None:
        """Hide what was replaced for good."""

    @abstractmethod
    def abandon(self, step: int, attempt: str) -> bool:
        """Give an attempt up and delete its files; return False when it was published or given up before."""

    @abstractmethod
    def hide(self, step: CommittedStep) -> bool:
        """Take a step out of the listing; return False when it was gone."""

    @abstractmethod
    def hide_damaged(self, problem: StepProblem) -> bool:
        """Take away what has a record that cannot be read; return False when it was gone."""

    @abstractmethod
    def delete_hidden(self) -> list[str]:
        """Delete what is hidden; return what could not be deleted now."""

    @abstractmethod
    def recover(self, spare: Collection[str]) -> list[str]:
        """Put right what was left in the middle, in whichever way; return a line for each."""

    # Said by both

    def lost(self, step: int, prefix: str) -> AttemptLostError:
        """Return the error for a publisher that was beaten."""
        return AttemptLostError(
            "the attempt was abandoned, or another manager took the root over, before the step was published",
            step=step,
            path=self._storage.describe(prefix),
            outcome="not_committed",
            hint="Look for another job on this root; this one was silent for too long, or was told to stop.",
        )

    def exists(self, step: int) -> StepExistsError:
        """Return the error for a step that is committed and not to be replaced."""
        return StepExistsError(
            "the step is there already",
            step=step,
            path=self._storage.describe(str(step)),
            outcome="not_committed",
        )


def may_be_set_aside(problem: StepProblem) -> bool:
    """Say whether the step may be saved anew: it is ours, and damaged beyond reading, not merely beyond our reading."""
    return not problem.is_link and not isinstance(problem.error, UnsupportedVersionError | StorageError)
