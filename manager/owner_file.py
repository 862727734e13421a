"""Where the owner file of a root lies, and how it is taken, kept alive and removed: locally, and on an object store.

Locally a lock keeps others out of the few lines that take the file, and a heartbeat touches it through its descriptor,
so that a successor's is never touched. On an object store each of these is a compare and set.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.storage.conditions import require_conditional_writes
from safepoint.formats.storage.file_lock import held_lock
from safepoint.formats.storage.system import raised_as_storage_error
from safepoint.manager.control_dir import clear_control_dir
from safepoint.manager.errors import AttemptLostError
from safepoint.manager.holder import Holder, Seen
from safepoint.manager.pins import CONTROL_DIR

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safepoint.formats.storage import Storage

__all__ = ["LOCK_SECS", "Hold", "LocalOwnerFile", "ObjectOwnerFile", "OwnerFile"]

_OWNER_FILE = f"{CONTROL_DIR}/owner"
_LOCK_FILE = f"{CONTROL_DIR}/lock"
_MAX_BYTES = 64 << 10

LOCK_SECS = 5.0
"""How long to wait for another process to get out of the few lines that the lock protects."""


class Hold(ABC):
    """An owner file that is ours."""

    @abstractmethod
    def beat(self) -> None:
        """Show that its owner lives.

        Raises:
            CheckpointError: that failed.
            OSError: that failed.
        """

    @abstractmethod
    def remove(self) -> None:
        """Remove the file; inside of `OwnerFile.guarded`, after a look."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open."""


class OwnerFile(ABC):
    """The owner file of one root, whoever's it is."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.location = storage.location

    def make_room(self) -> None:
        """Make the root and the control directory.

        Raises:
            StorageError: the root is a file, read-only, full, …
        """
        self._storage.make_dir("")
        self._storage.make_dir(CONTROL_DIR)

    @abstractmethod
    def guarded(self, *, within_secs: float = LOCK_SECS) -> AbstractContextManager[bool]:
        """Keep others out of a few lines, where that can be; yields False when one stays in them for so long."""

    @abstractmethod
    def look(self) -> Seen | None:
        """Return what the file says now, None when there is none.

        Raises:
            StorageError: it cannot be read.
        """

    @abstractmethod
    def take(self, seen: Seen | None, holder: Holder) -> Hold | None:
        """Write the file, if it is still the one that was seen; return None when another one was faster."""


class LocalOwnerFile(OwnerFile):
    """On a file system."""

    @override
    @contextmanager
    def guarded(self, *, within_secs: float = LOCK_SECS) -> Iterator[bool]:
        path = f"{self.location}/{_LOCK_FILE}"
        with raised_as_storage_error("open the lock file", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            with held_lock(descriptor, deadline_secs=within_secs) as held:
                yield held
        finally:
            os.close(descriptor)

    @override
    def look(self) -> Seen | None:
        path = f"{self.location}/{_OWNER_FILE}"
        with raised_as_storage_error("read the owner file", path):
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return None
            try:
                return _see(descriptor)
            finally:
                os.close(descriptor)

    @override
    def take(self, seen: Seen | None, holder: Holder) -> Hold | None:
        if seen is None:
            self._storage.put_if_absent(_OWNER_FILE, holder.to_bytes())
        else:
            self._storage.replace(_OWNER_FILE, holder.to_bytes())
        path = f"{self.location}/{_OWNER_FILE}"
        with raised_as_storage_error("open the owner file", path):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        if _see(descriptor).holder.nonce != holder.nonce:  # where the file system has no locks
            os.close(descriptor)
            return None
        clear_control_dir(self.location, now=os.fstat(descriptor).st_mtime)
        return _LocalHold(path, descriptor)


class _LocalHold(Hold):
    def __init__(self, path: str, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @override
    def beat(self) -> None:
        # Through the descriptor: once the file was replaced by a successor's, ours touches nobody's heartbeat.
        os.utime(self._descriptor)

    @override
    def remove(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    @override
    def close(self) -> None:
        os.close(self._descriptor)


def _see(descriptor: int) -> Seen:
    found = os.fstat(descriptor)
    data = os.pread(descriptor, _MAX_BYTES, 0)
    return Seen(Holder.from_bytes(data), (found.st_ino, found.st_mtime_ns, found.st_size))


class ObjectOwnerFile(OwnerFile):
    """On an object store: taken, renewed and removed only as long as nobody else changed it."""

    @override
    def make_room(self) -> None:
        super().make_room()
        require_conditional_writes(self._storage, f"{CONTROL_DIR}/conditions")

    @override
    def guarded(self, *, within_secs: float = LOCK_SECS) -> AbstractContextManager[bool]:
        del within_secs
        return nullcontext(enter_result=True)

    @override
    def look(self) -> Seen | None:
        found = self._storage.read_versioned(_OWNER_FILE, max_bytes=_MAX_BYTES)
        return None if found is None else Seen(Holder.from_bytes(found.data), found.version)

    @override
    def take(self, seen: Seen | None, holder: Holder) -> Hold | None:
        if seen is None:
            self._storage.put_if_absent(_OWNER_FILE, holder.to_bytes())
        else:
            self._storage.put_if_unchanged(_OWNER_FILE, holder.to_bytes(), seen.signature)
        now = self.look()
        if now is None or now.holder.nonce != holder.nonce:
            return None
        return _ObjectHold(self, self._storage, now)


class _ObjectHold(Hold):
    def __init__(self, file: ObjectOwnerFile, storage: Storage, seen: Seen) -> None:
        self._file = file
        self._storage = storage
        self._seen = seen

    @override
    def beat(self) -> None:
        mine = self._seen.holder
        self._storage.put_if_unchanged(
            _OWNER_FILE, replace(mine, beats=mine.beats + 1).to_bytes(), self._seen.signature
        )
        now = self._file.look()
        if now is None or now.holder.nonce != mine.nonce:
            raise AttemptLostError("another manager has taken the root over", path=self._file.location)
        self._seen = now

    @override
    def remove(self) -> None:
        now = self._file.look()
        if now is not None and now.holder.nonce == self._seen.holder.nonce:
            self._storage.delete_if_unchanged(_OWNER_FILE, now.signature)

    @override
    def close(self) -> None:
        pass
