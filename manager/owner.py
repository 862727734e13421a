"""Who may write to a root: one manager at a time, told by the file `.safepoint/owner`.

The file names the owner, and its modification time is the owner's heartbeat (on object stores it is written again for
each). It is taken over when its owner is gone,
which can be seen at once on the same host, or when the heartbeat has not changed for twice the deadline on *our*
monotonic clock: clocks of two hosts are never compared. A verdict may be wrong (an owner that was stopped for long
enough wakes up again). That costs it a save, never a step: it asks `verify` before it publishes, and the new owner
hid its unfinished attempts when it took over, so that the rename which publishes finds nothing.

Knows nothing about steps. Reading a root needs no owner.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.storage import LocalStorage, Storage
from safepoint.manager.errors import AttemptLostError, CheckpointError, RootInUseError
from safepoint.manager.holder import BEAT_SECS, Holder
from safepoint.manager.owner_file import LOCK_SECS, LocalOwnerFile, ObjectOwnerFile
from safepoint.manager.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.manager.holder import Seen
    from safepoint.manager.owner_file import Hold, OwnerFile

__all__ = ["Acquired", "Holder", "Owner", "Refused", "Wait", "current_holder"]

logger = logging.getLogger("safepoint")


@dataclass(frozen=True, slots=True)
class Acquired:
    """The root is ours; `is_new` when it was not a call earlier, so that debris may lie there."""

    is_new: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """Another manager, alive, owns the root."""

    holder: Holder

    def to_error(self, root: str, *, step: int | None = None) -> RootInUseError:
        """Return the error for a caller who wanted to write."""
        return RootInUseError(
            f"the root is owned by {self.holder}",
            step=step,
            path=root,
            outcome=None if step is None else "not_committed",
            hint="Close that manager, or give this run a root of its own. Restoring needs no ownership.",
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """Whether the owner is alive cannot be told yet: call `acquire` again after `secs`.

    Attributes:
        secs: when to ask again, in seconds.
        holder: the owner so far.
        remaining_secs: how long it may stay silent before its root is taken over, in seconds.
    """

    secs: float
    holder: Holder
    remaining_secs: float


def _file_of(root: str | os.PathLike[str] | Storage) -> OwnerFile:
    return ObjectOwnerFile(root) if isinstance(root, Storage) else LocalOwnerFile(LocalStorage(root))


def current_holder(root: str | os.PathLike[str] | Storage) -> Holder | None:
    """Return who claims to own a root, alive or not; None where nobody does. Changes nothing.

    Args:
        root: a directory, or the storage of a root that is none.

    Raises:
        StorageError: the owner file cannot be read.
    """
    seen = _file_of(root).look()
    return None if seen is None else seen.holder


class Owner:
    """This manager's claim to write to a root. Thread-safe; released when it is garbage collected, or at exit."""

    def __init__(
        self,
        root: str | os.PathLike[str] | Storage,
        *,
        deadline_secs: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember the root; touches nothing.

        Args:
            root: a directory, made when it is first acquired, or the storage of a root that is none.
            deadline_secs: twice this time without a heartbeat and another owner's root is ours.
            clock: seconds, only ever counting up.
        """
        self._file = _file_of(root)
        self._deadline_secs = deadline_secs
        self._beat_secs = min(BEAT_SECS, deadline_secs / 10)
        self._clock = clock
        self._mutex = threading.Lock()
        self._tenure: _Tenure | None = None
        self._watched: tuple[Seen, float] | None = None
        self._shut_since: float | None = None

    def acquire(self) -> Acquired | Refused | Wait:
        """Become the owner, if nobody else is. Returns at once; called again by the owner it confirms.

        Raises:
            StorageError: the root is a file, read-only, full, …
        """
        with self._mutex:
            if self._tenure is not None:
                if self._tenure.is_mine(self._file.look()):
                    return Acquired(is_new=False)
                self._end()
            self._file.make_room()
            with self._file.guarded(within_secs=min(LOCK_SECS, self._deadline_secs)) as locked:
                seen = self._file.look()
                remaining = self._respect_for_lock(locked=locked)
                if remaining > 0:
                    return Wait(self._beat_secs, Holder() if seen is None else seen.holder, remaining)
                refusal = None if seen is None else self._judge(seen)
                return self._take(seen) if refusal is None else refusal

    def _respect_for_lock(self, *, locked: bool) -> float:
        """Return how much longer a lock is waited for that another process holds, in seconds.

        It is held for moments only, so one that is held for as long as an owner may be silent is that of a process
        which was stopped meanwhile. Without it things are as where the file system has none.
        """
        if locked:
            self._shut_since = None
            return 0.0
        if self._shut_since is None:
            self._shut_since = self._clock()
        return 2 * self._deadline_secs - (self._clock() - self._shut_since)

    def _judge(self, seen: Seen) -> Refused | Wait | None:
        """Return why the root cannot be taken, or None when its owner is gone."""
        process = seen.holder.process
        state = "unknown" if process is None else process.state()
        if state == "gone":
            return None
        if state == "running":
            return Refused(seen.holder)
        now = self._clock()
        if self._watched is None or self._watched[0] != seen:
            beats = self._watched is not None
            self._watched = (seen, now)
            if beats:
                return Refused(seen.holder)
        remaining = 2 * self._deadline_secs - (now - self._watched[1])
        if remaining <= 0:
            return None
        # Two of its heartbeats are enough to see that it lives; a dead one is looked at until the end.
        return Wait(min(remaining, max(2 * seen.holder.beat_secs, 0.1)), seen.holder, remaining)

    def _take(self, seen: Seen | None) -> Acquired | Wait:
        mine = Holder(
            process=ProcessIdentity.current(),
            since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            beat_secs=self._beat_secs,
            nonce=secrets.token_hex(16),
        )
        if seen is not None:
            logger.warning("taking over the root %s from %s, which is gone", self._file.location, seen.holder)
        tenure = _Tenure.begin(self._file, mine, seen)
        if tenure is None:  # another one was faster
            return Wait(self._beat_secs, Holder(), 2 * self._deadline_secs)
        self._tenure = tenure
        self._watched = None
        tenure.finalizer = weakref.finalize(self, tenure.end)
        return Acquired(is_new=True)

    def verify(self) -> None:
        """Check that the root is still ours. Call it right before something that only the owner may do.

        Raises:
            AttemptLostError: it is not, or never was.
        """
        with self._mutex:
            try:
                seen = self._file.look()
            except CheckpointError as error:
                raise error.with_context(outcome="not_committed") from None
            if self._tenure is None or not self._tenure.is_mine(seen):
                now = "nobody" if seen is None else str(seen.holder)
                raise AttemptLostError(
                    f"the root is not owned by this manager any more, but by {now}",
                    path=self._file.location,
                    outcome="not_committed",
                    hint="This process was silent for twice the deadline, or its owner file was removed.",
                )

    def release(self) -> None:
        """Give the root up; does nothing when it is not ours. Problems are logged: a successor finds us gone anyway."""
        with self._mutex:
            self._end()

    def _end(self) -> None:
        tenure, self._tenure = self._tenure, None
        if tenure is not None:
            tenure.finish()


class _Tenure:
    """One ownership, from the file's creation to its removal, with the thread that keeps the heart beating."""

    def __init__(self, file: OwnerFile, hold: Hold, holder: Holder) -> None:
        self._file = file
        self._hold = hold
        self._holder = holder
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="safepoint-owner", daemon=True)
        self.finalizer: Callable[[], object] = self.end

    @classmethod
    def begin(cls, file: OwnerFile, holder: Holder, seen: Seen | None) -> _Tenure | None:
        """Write the file and start the heartbeat, or return None when it turns out to be somebody else's."""
        hold = file.take(seen, holder)
        if hold is None:
            return None
        tenure = cls(file, hold, holder)
        tenure._thread.start()
        return tenure

    def is_mine(self, seen: Seen | None) -> bool:
        """Say whether this is our owner file. A forked child inherits nothing."""
        return seen is not None and seen.holder.nonce == self._holder.nonce and self._pid == os.getpid()

    def _beat(self) -> None:
        while not self._stop.wait(self._holder.beat_secs):
            try:
                self._hold.beat()
            except (CheckpointError, OSError) as error:
                logger.warning("cannot renew the ownership of %s: %s", self._file.location, error)

    def finish(self) -> None:
        """Call `end`, once."""
        self.finalizer()

    def end(self) -> None:
        """Stop the heartbeat and remove the owner file if it is still ours."""
        self._stop.set()
        if self._pid == os.getpid():
            self._thread.join(timeout=LOCK_SECS)
            try:
                with self._file.guarded():
                    if self.is_mine(self._file.look()):
                        self._hold.remove()
            except (CheckpointError, OSError) as error:
                logger.warning("cannot remove the owner file of %s: %s", self._file.location, error)
        if not self._thread.is_alive():
            self._hold.close()
