"""Who may write to a root: one manager at a time, told by the file `.safepoint/owner`.

The file names the owner and its modification time is the owner's heartbeat. It is taken over when its owner is gone,
which can be seen at once on the same host, or when the heartbeat has not changed for twice the deadline on *our*
monotonic clock: clocks of two hosts are never compared. A verdict may be wrong (an owner that was stopped for long
enough wakes up again). That costs it a save, never a step: it asks `verify` before it publishes, and the new owner
hid its unfinished attempts when it took over, so that the rename which publishes finds nothing.

Knows nothing about steps. Reading a root needs no owner.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
import weakref
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.fields import canonical_json
from safepoint.formats.storage import LocalStorage
from safepoint.formats.storage.file_lock import held_lock
from safepoint.formats.storage.system import raised_as_storage_error
from safepoint.manager.control_dir import clear_control_dir
from safepoint.manager.errors import AttemptLostError, CheckpointError, RootInUseError, StorageError
from safepoint.manager.pins import CONTROL_DIR
from safepoint.manager.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Acquired", "Holder", "Owner", "Refused", "Wait", "current_holder"]

logger = logging.getLogger("safepoint")

_OWNER_FILE = f"{CONTROL_DIR}/owner"
_LOCK_FILE = f"{CONTROL_DIR}/lock"
_MAX_BYTES = 64 << 10

_BEAT_SECS = 15.0
"""Longest time between two heartbeats."""

_LOCK_SECS = 5.0
"""How long to wait for another process to get out of the few lines that the lock protects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who owns a root.

    Attributes:
        process: the owning process; None when the owner file cannot be read.
        since: when it became the owner, as text for people.
        beat_secs: its time between two heartbeats, in seconds.
        nonce: unique to one ownership.
    """

    process: ProcessIdentity | None = None
    since: str = "an unknown time"
    beat_secs: float = _BEAT_SECS
    nonce: str = ""

    def __str__(self) -> str:
        if self.process is None:
            return "an unknown process"
        return f"process {self.process.pid} on host {self.process.host}, since {self.since}"

    def to_bytes(self) -> bytes:
        """Return the content of the owner file."""
        process = None if self.process is None else self.process.to_json()
        return canonical_json(
            {"process": process, "since": self.since, "beat_secs": self.beat_secs, "nonce": self.nonce}
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Holder:
        """Return who owns the root; anything that is no owner file's content gives an unknown holder."""
        try:
            value = json.loads(data)
            return cls(
                process=ProcessIdentity.from_json(value["process"]),
                since=str(value["since"]),
                beat_secs=min(max(float(value["beat_secs"]), 0.0), _BEAT_SECS),
                nonce=str(value["nonce"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()


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


@dataclass(frozen=True, slots=True)
class _Seen:
    holder: Holder
    signature: tuple[int, ...]


def current_holder(root: str | os.PathLike[str]) -> Holder | None:
    """Return who claims to own a root, alive or not; None where nobody does. Changes nothing.

    Raises:
        StorageError: the owner file cannot be read.
    """
    seen = _look(LocalStorage(root).location)
    return None if seen is None else seen.holder


class Owner:
    """This manager's claim to write to a root. Thread-safe; released when it is garbage collected, or at exit."""

    def __init__(
        self, root: str | os.PathLike[str], *, deadline_secs: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Remember the root; touches nothing.

        Args:
            root: directory, made when it is first acquired.
            deadline_secs: twice this time without a heartbeat and another owner's root is ours.
            clock: seconds, only ever counting up.
        """
        self._storage = LocalStorage(root)
        self._root = self._storage.location
        self._deadline_secs = deadline_secs
        self._beat_secs = min(_BEAT_SECS, deadline_secs / 10)
        self._clock = clock
        self._mutex = threading.Lock()
        self._tenure: _Tenure | None = None
        self._watched: tuple[_Seen, float] | None = None

    def acquire(self) -> Acquired | Refused | Wait:
        """Become the owner, if nobody else is. Returns at once; called again by the owner it confirms.

        Raises:
            StorageError: the root is a file, read-only, full, …
        """
        with self._mutex:
            if self._tenure is not None:
                if self._tenure.is_mine(_look(self._root)):
                    return Acquired(is_new=False)
                self._end()
            self._storage.make_dir("")
            self._storage.make_dir(CONTROL_DIR)
            with _locked(self._root) as locked:
                seen = _look(self._root)
                if not locked:
                    return Wait(self._beat_secs, Holder() if seen is None else seen.holder, 2 * self._deadline_secs)
                refusal = None if seen is None else self._judge(seen)
                return self._take(seen) if refusal is None else refusal

    def _judge(self, seen: _Seen) -> Refused | Wait | None:
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

    def _take(self, seen: _Seen | None) -> Acquired | Wait:
        mine = Holder(
            process=ProcessIdentity.current(),
            since=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            beat_secs=self._beat_secs,
            nonce=secrets.token_hex(16),
        )
        if seen is None:
            self._storage.put_if_absent(_OWNER_FILE, mine.to_bytes())
        else:
            logger.warning("taking over the root %s from %s, which is gone", self._root, seen.holder)
            self._storage.replace(_OWNER_FILE, mine.to_bytes())
        tenure = _Tenure.begin(self._root, mine)
        if tenure is None:  # where the file system has no locks, another one may have been faster
            return Wait(self._beat_secs, Holder(), 2 * self._deadline_secs)
        self._tenure = tenure
        self._watched = None
        tenure.finalizer = weakref.finalize(self, tenure.end)
        clear_control_dir(self._root, now=tenure.began)
        return Acquired(is_new=True)

    def verify(self) -> None:
        """Check that the root is still ours. Call it right before something that only the owner may do.

        Raises:
            AttemptLostError: it is not, or never was.
        """
        with self._mutex:
            try:
                seen = _look(self._root)
            except CheckpointError as error:
                raise error.with_context(outcome="not_committed") from None
            if self._tenure is None or not self._tenure.is_mine(seen):
                now = "nobody" if seen is None else str(seen.holder)
                raise AttemptLostError(
                    f"the root is not owned by this manager any more, but by {now}",
                    path=self._root,
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

    def __init__(self, root: str, holder: Holder, descriptor: int) -> None:
        self._root = root
        self._holder = holder
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._stop = threading.Event()
        self.began = 0.0
        self._thread = threading.Thread(target=self._beat, name="safepoint-owner", daemon=True)
        self.finalizer: Callable[[], object] = self.end

    @classmethod
    def begin(cls, root: str, holder: Holder) -> _Tenure | None:
        """Start the heartbeat, or return None when the owner file turns out to be somebody else's."""
        with raised_as_storage_error("open the owner file", f"{root}/{_OWNER_FILE}"):
            descriptor = os.open(f"{root}/{_OWNER_FILE}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        tenure = cls(root, holder, descriptor)
        tenure.began = os.fstat(descriptor).st_mtime
        if not tenure.is_mine(_see(descriptor)):
            os.close(descriptor)
            return None
        tenure._thread.start()
        return tenure

    def is_mine(self, seen: _Seen | None) -> bool:
        """Say whether this is our owner file. A forked child inherits nothing."""
        return seen is not None and seen.holder.nonce == self._holder.nonce and self._pid == os.getpid()

    def _beat(self) -> None:
        # Through the descriptor: once the file was replaced by a successor's, ours touches nobody's heartbeat.
        while not self._stop.wait(self._holder.beat_secs):
            try:
                os.utime(self._descriptor)
            except OSError as error:
                logger.warning("cannot renew the ownership of %s: %s", self._root, error)

    def finish(self) -> None:
        """Call `end`, once."""
        self.finalizer()

    def end(self) -> None:
        """Stop the heartbeat and remove the owner file if it is still ours."""
        self._stop.set()
        if self._pid == os.getpid():
            self._thread.join(timeout=_LOCK_SECS)
            try:
                with _locked(self._root):
                    if self.is_mine(_look(self._root)):
                        with suppress(FileNotFoundError):
                            os.unlink(f"{self._root}/{_OWNER_FILE}")
            except (StorageError, OSError) as error:
                logger.warning("cannot remove the owner file of %s: %s", self._root, error)
        if not self._thread.is_alive():
            os.close(self._descriptor)


def _look(root: str) -> _Seen | None:
    """Return what the owner file says now, None when there is none."""
    path = f"{root}/{_OWNER_FILE}"
    with raised_as_storage_error("read the owner file", path):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            return _see(descriptor)
        finally:
            os.close(descriptor)


def _see(descriptor: int) -> _Seen:
    found = os.fstat(descriptor)
    data = os.pread(descriptor, _MAX_BYTES, 0)
    return _Seen(Holder.from_bytes(data), (found.st_ino, found.st_mtime_ns, found.st_size))


@contextmanager
def _locked(root: str) -> Iterator[bool]:
    """Keep others out of a few lines, where the file system has locks; yields False when one stays in them too long."""
    path = f"{root}/{_LOCK_FILE}"
    with raised_as_storage_error("open the lock file", path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with held_lock(descriptor, deadline_secs=_LOCK_SECS) as held:
            yield held
    finally:
        os.close(descriptor)
