"""MemoryStorage: the contract without a disk: for tests, and as the reference of what the contract means."""

from __future__ import annotations

import errno
import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.checksum import BLOCK_BYTES
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, StorageError
from safepoint.formats.storage.base import (
    Entry,
    FileReader,
    FileWriter,
    Storage,
    VersionedBytes,
    split_name,
    split_path,
)
from safepoint.formats.storage.gathering import GatheringWriter
from safepoint.formats.storage.system import storage_error

if TYPE_CHECKING:
    from collections.abc import Hashable


__all__ = ["MemoryReader", "MemoryStorage"]

_stamps = itertools.count(1)


@dataclass(eq=False, slots=True)
class _File:
    data: bytes
    stamp: int = field(default_factory=_stamps.__next__)


@dataclass(eq=False, slots=True)
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    stamp: int = field(default_factory=_stamps.__next__)
    changes: int = 0


class MemoryStorage(Storage):
    """Storage in this process's memory; the root is there after `make_dir("")`."""

    def __init__(self, location: str = "memory:", *, capacity_bytes: int | None = None) -> None:
        """Start without a root.

        Args:
            location: for messages.
            capacity_bytes: bytes that files may take in all; None for no limit.
        """
        self.location = location
        self._capacity_bytes = capacity_bytes
        self._root: _Directory | None = None
        self._lock = threading.RLock()

    @override
    def make_dir(self, path: str, *, exist_ok: bool = True) -> None:
        with self._lock:
            if path == "":
                if self._root is not None and not exist_ok:
                    raise self._error(errno.EEXIST, "create the directory", path)
                self._root = self._root or _Directory()
                return
            parent, name = self._parent(path, "create the directory")
            found = parent.entries.get(name)
            if found is not None and not (exist_ok and isinstance(found, _Directory)):
                raise self._error(errno.EEXIST, "create the directory", path)
            if found is None:
                self._set(parent, name, _Directory())

    @override
    def list(self, path: str) -> list[Entry]:
        with self._lock:
            found = self._find(path)
            if isinstance(found, _File):
                raise self._error(errno.ENOTDIR, "list", path)
            return [] if found is None else [_entry(name, child) for name, child in found.entries.items()]

    @override
    def size(self, path: str, *, expected: int | None = None) -> int | None:
        with self._lock:
            found = self._find_file(path)
            return None if found is None else len(found.data)

    @override
    def get(self, path: str, *, max_bytes: int) -> bytes:
        data = self._content(path)
        if len(data) > max_bytes:
            raise CorruptDataError(
                f"the file has {len(data):,} bytes where at most {max_bytes:,} are expected", path=self.describe(path)
            )
        return data

    @override
    def put(self, path: str, data: bytes) -> None:
        if not self.put_if_absent(path, data):
            raise self._error(errno.EEXIST, "write", path)

    @override
    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._lock:
            parent, name = self._parent(path, "write")
            if name in parent.entries:
                return False
            self._check_space(path, len(data))
            self._set(parent, name, _File(bytes(data)))
            return True

    @override
    def replace(self, path: str, data: bytes) -> None:
        with self._lock:
            parent, name = self._parent(path, "write")
            if isinstance(parent.entries.get(name), _Directory):
                raise self._error(errno.EISDIR, "write", path)
            self._check_space(path, len(data))
            self._set(parent, name, _File(bytes(data)))

    @override
    def read_versioned(self, path: str, *, max_bytes: int) -> VersionedBytes | None:
        with self._lock:
            found = self._find_file(path)
            return None if found is None else VersionedBytes(self.get(path, max_bytes=max_bytes), found.stamp)

    @override
    def put_if_unchanged(self, path: str, data: bytes, version: Hashable) -> bool:
        with self._lock:
            found = self._find_file(path)
            if found is None or found.stamp != version:
                return False
            self.replace(path, data)
            return True

    @override
    def delete_if_unchanged(self, path: str, version: Hashable) -> bool:
        with self._lock:
            found = self._find_file(path)
            if found is not None and found.stamp != version:
                return False
            self._drop(path, found)
            return True

    @override
    def rename_dir(self, source: str, target: str) -> bool:
        action = f"rename {self.describe(source)} to this name"
        with self._lock:
            split_name(source)
            target_parent, target_name = self._parent(target, action)
            found = self._find(source)
            if found is None:
                return False
            if isinstance(found, _File):
                raise self._error(errno.ENOTDIR, action, target)
            if target_name in target_parent.entries:
                raise self._error(errno.EEXIST, action, target)
            source_parent, source_name = self._parent(source, action)
            del source_parent.entries[source_name]
            source_parent.changes += 1
            self._set(target_parent, target_name, found)
            return True

    @override
    def sync_dir(self, path: str) -> None:
        with self._lock:
            found = self._find(path)
            if not isinstance(found, _Directory):
                raise self._error(errno.ENOENT if found is None else errno.ENOTDIR, "sync the directory", path)

    @override
    def delete(self, path: str) -> None:
        with self._lock:
            split_name(path)
            found = self._find(path)
            if isinstance(found, _Directory):
                raise self._error(errno.EISDIR, "delete", path)
            self._drop(path, found)

    @override
    def delete_tree(self, path: str) -> None:
        with self._lock:
            split_name(path)
            self._drop(path, self._find(path))

    @override
    def delete_dir(self, path: str) -> bool:
        with self._lock:
            split_name(path)
            found = self._find(path)
            if isinstance(found, _File):
                raise self._error(errno.ENOTDIR, "delete", path)
            if found is not None and found.entries:
                return False
            self._drop(path, found)
            return True

    @override
    def free_bytes(self) -> int | None:
        with self._lock:
            return None if self._capacity_bytes is None else max(0, self._capacity_bytes - _num_bytes(self._root))

    @override
    def open_writer(self, path: str, *, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> FileWriter:
        if num_bytes < 0 or block_bytes <= 0:
            raise InvalidArgumentError(f"cannot write {num_bytes} bytes in blocks of {block_bytes}")
        with self._lock:
            return _MemoryWriter(self, path, num_bytes=num_bytes, block_bytes=block_bytes)

    @override
    def open_reader(self, path: str, *, num_bytes: int | None = None) -> FileReader:
        return MemoryReader(self._content(path), self.describe(path))

    @override
    def link_file(self, source: str, target: str) -> bool:
        with self._lock:
            parent, name = self._parent(target, "write")
            found = self._find_file(source)
            if found is None:
                return False
            if name in parent.entries:
                raise self._error(errno.EEXIST, "write", target)
            self._set(parent, name, found)
            return True

    # Walking; the lock is held

    def _find(self, path: str) -> _File | _Directory | None:
        found: _File | _Directory | None = self._root
        for part in split_path(path):
            if found is None:
                return None
            if isinstance(found, _File):
                raise self._error(errno.ENOTDIR, "look at", path)
            found = found.entries.get(part)
        return found

    def _find_file(self, path: str) -> _File | None:
        split_name(path)
        try:
            found = self._find(path)
        except StorageError as error:
            raise self._not_a_file(path) from error
        if isinstance(found, _Directory):
            raise self._not_a_file(path)
        return found

    def _parent(self, path: str, action: str) -> tuple[_Directory, str]:
        *parents, name = split_name(path)
        found = self._find("/".join(parents))
        if not isinstance(found, _Directory):
            raise self._error(errno.ENOENT if found is None else errno.ENOTDIR, action, path)
        return found, name

    def _content(self, path: str) -> bytes:
        with self._lock:
            found = self._find_file(path)
            if found is None:
                raise self._error(errno.ENOENT, "read", path)
            return found.data

    def _set(self, parent: _Directory, name: str, entry: _File | _Directory) -> None:
        parent.entries[name] = entry
        parent.changes += 1

    def _drop(self, path: str, found: _File | _Directory | None) -> None:
        if found is not None:
            parent, name = self._parent(path, "delete")
            del parent.entries[name]
            parent.changes += 1

    # Errors

    def _check_space(self, path: str, num_bytes: int) -> None:
        free = self.free_bytes()
        if free is not None and num_bytes > free:
            raise storage_error(
                OSError(errno.ENOSPC, ""), "write", self.describe(path), needed_bytes=num_bytes, free_bytes=free
            )

    def _error(self, number: int, action: str, path: str) -> StorageError:
        return storage_error(OSError(number, ""), action, self.describe(path))

    def _not_a_file(self, path: str) -> CorruptDataError:
        return CorruptDataError("not a regular file inside the root", path=self.describe(path))

    def _store(self, path: str, file: _File, data: bytes) -> None:
        """Give a file that was opened for writing its content, wherever its directory is now."""
        with self._lock:
            self._check_space(path, len(data))
            file.data = data
            file.stamp = next(_stamps)

    def _discard(self, parent: _Directory, name: str, file: _File) -> None:
        with self._lock:
            if parent.entries.get(name) is file:
                del parent.entries[name]
                parent.changes += 1


class _MemoryWriter(GatheringWriter):
    def __init__(self, storage: MemoryStorage, path: str, *, num_bytes: int, block_bytes: int) -> None:
        super().__init__(storage.describe(path), num_bytes=num_bytes, block_bytes=block_bytes)
        storage.put(path, b"")
        self._storage = storage
        self._path = path
        self._parent, self._name = storage._parent(path, "write")  # noqa: SLF001 - one class in two parts
        self._file = _File(b"")
        self._parent.entries[self._name] = self._file

    @override
    def _keep(self, data: bytes) -> None:
        self._storage._store(self._path, self._file, data)  # noqa: SLF001

    @override
    def _discard(self) -> None:
        self._storage._discard(self._parent, self._name, self._file)  # noqa: SLF001


class MemoryReader(FileReader):
    """Reads bytes in memory; `path` is for messages."""

    def __init__(self, data: bytes, path: str) -> None:
        self._data = data
        self._path = path
        self.num_bytes = len(data)

    @override
    def read_into(self, offset: int, buffer: memoryview) -> None:
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        if len(part) < len(buffer):
            raise CorruptDataError(f"the file ends at byte {len(self._data):,}", path=self._path)

    @override
    def close(self) -> None:
        pass


def _entry(name: str, found: _File | _Directory) -> Entry:
    changes = found.changes if isinstance(found, _Directory) else 0
    return Entry(name, isinstance(found, _Directory), (found.stamp, changes))


def _num_bytes(found: _File | _Directory | None) -> int:
    if found is None:
        return 0
    if isinstance(found, _File):
        return len(found.data)
    return sum(_num_bytes(child) for child in found.entries.values())
