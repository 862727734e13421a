"""Which committed steps go after a save, and deleting them behind the training loop.

A step is hidden first, by a rename that takes no time, and only then deleted, by a thread of its own; a failure of
either costs disk space for a while and never the save. Which steps go is decided by `policies`.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from safepoint.manager.errors import CheckpointError
from safepoint.manager.policies import Policy, steps_to_delete

if TYPE_CHECKING:
    from collections.abc import Collection

    from safepoint.manager.commit import CommittedStep, Committer
    from safepoint.manager.step_reading import StepReader

__all__ = ["RetentionWorker", "unkept_steps"]

logger = logging.getLogger("safepoint")

_IDLE_SECS = 10.0


def unkept_steps(reader: StepReader, keep: Policy, *, protected: Collection[str] = ()) -> list[CommittedStep]:
    """Return the committed steps that may go: no policy keeps them, nobody pinned them, none is the latest.

    Args:
        reader: of the root.
        keep: what is kept.
        protected: attempts that stay whatever the policies say.
    """
    steps = reader.list_steps()
    spared = {*protected, *reader.pinned_attempts()}
    doomed = {info.attempt for info in steps_to_delete([step.info for step in steps], keep, protected=spared)}
    return [step for step in steps if step.record.attempt in doomed]


class RetentionWorker:
    """Hides what no policy keeps, at once; deletes what is hidden, later."""

    def __init__(self, committer: Committer, keep: Policy) -> None:
        self._committer = committer
        self._keep = keep
        self._wanted = threading.Condition()
        self._pending = False
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None

    def apply(self, *, protected: Collection[str]) -> list[int]:
        """Hide the steps that no policy keeps and return their numbers.

        Called by: processes that write commit records, after a commit.

        Args:
            protected: attempts that stay whatever the policies say; pinned ones are added.
        """
        hidden: list[int] = []
        try:
            for step in unkept_steps(self._committer, self._keep, protected=protected):
                self._committer.hide(step)
                hidden.append(step.record.step)
        except CheckpointError as error:
            logger.warning("could not remove an old step, will try again after the next save: %s", error)
        self.delete_soon()
        return hidden

    def delete_soon(self) -> None:
        """Wake the thread that deletes what is hidden."""
        with self._wanted:
            if self._closed:
                return
            self._pending = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="safepoint-retention", daemon=True)
                self._thread.start()
            self._wanted.notify_all()

    def close(self, timeout_secs: float) -> None:
        """Wait at most so long for deletions under way; what is left is swept by the next run."""
        with self._wanted:
            self._wanted.wait_for(lambda: not self._pending and not self._busy, timeout=timeout_secs)
            self._closed = True
            self._wanted.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=1.0)

    def _run(self) -> None:
        while True:
            with self._wanted:
                self._wanted.wait_for(lambda: self._pending or self._closed, timeout=_IDLE_SECS)
                if self._closed or not self._pending:  # so that a manager which nobody closes leaves no thread for ever
                    self._thread = None
                    return
                self._pending = False
                self._busy = True
            try:
                self._committer.delete_hidden()
            except CheckpointError as error:
                logger.warning("could not delete a hidden step, will try again after the next save: %s", error)
            finally:
                with self._wanted:
                    self._busy = False
                    self._wanted.notify_all()
