"""MemoryObjects: an object store in memory, as the reference of what object stores promise, for tests and examples.

A flat map from keys to contents. Nothing is renamed; directories are what keys have in front of a "/".
"""

from __future__ import annotations

import errno
import itertools
import threading
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from safepoint.formats.checksum import BLOCK_BYTES
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, StorageError
from safepoint.formats.storage.base import (
    PART_BYTES,
    Entry,
    FileReader,
    FileWriter,
    Storage,
    VersionedBytes,
    split_name,
    split_path,
)
from safepoint.formats.storage.gathering import GatheringWriter
from safepoint.formats.storage.memory import MemoryReader
from safepoint.formats.storage.system import storage_error

if TYPE_CHECKING:
    from collections.abc import Hashable


__all__ = ["MemoryObjects"]

_generations = itertools.count(1)


class _Object(NamedTuple):
    data: bytes
    generation: int


class MemoryObjects(Storage):
    """Objects in this process's memory."""

    renames = False

    def __init__(self, location: str = "memory:", *, part_bytes: int = PART_BYTES) -> None:
        """Start empty.

        Args:
            location: for messages.
            part_bytes: how large data files should be at most.
        """
        self.location = location
        self.part_bytes = part_bytes
        self._objects: dict[str, _Object] = {}
        self._lock = threading.RLock()

    @override
    def make_dir(self, path: str, *, exist_ok: bool = True) -> None:
        split_path(path)
        if not exist_ok and self.list(path):
            raise self._error(errno.EEXIST, "create the directory", path)

    @override
    def list(self, path: str) -> list[Entry]:
        start = f"{path}/" if split_path(path) else ""
        entries: dict[tuple[str, bool], Entry] = {}
        with self._lock:
            for key, found in self._objects.items():
                if key.startswith(start):
                    name, below, _ = key[len(start) :].partition("/")
                    entry = Entry(name, bool(below), () if below else (found.generation,))
                    entries[name, bool(below)] = entry
        return list(entries.values())

    @override
    def size(self, path: str, *, expected: int | None = None) -> int | None:
        found = self._get(path)
        return None if found is None else len(found.data)

    @override
    def get(self, path: str, *, max_bytes: int) -> bytes:
        found = self.read_versioned(path, max_bytes=max_bytes)
        if found is None:
            raise self._error(errno.ENOENT, "read", path)
        return found.data

    @override
    def put(self, path: str, data: bytes) -> None:
        if not self.put_if_absent(path, data):
            raise self._error(errno.EEXIST, "write", path)

    @override
    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._lock:
            if self._get(path) is not None:
                return False
            self.replace(path, data)
            return True

    @override
    def replace(self, path: str, data: bytes) -> None:
        split_name(path)
        with self._lock:
            self._objects[path] = _Object(bytes(data), next(_generations))

    @override
    def read_versioned(self, path: str, *, max_bytes: int) -> VersionedBytes | None:
        found = self._get(path)
        if found is None:
            return None
        if len(found.data) > max_bytes:
            raise CorruptDataError(
                f"the file has {len(found.data):,} bytes where at most {max_bytes:,} are expected",
                path=self.describe(path),
            )
        return VersionedBytes(found.data, found.generation)

    @override
    def put_if_unchanged(self, path: str, data: bytes, version: Hashable) -> bool:
        with self._lock:
            found = self._get(path)
            if found is None or found.generation != version:
                return False
            self.replace(path, data)
            return True

    @override
    def delete_if_unchanged(self, path: str, version: Hashable) -> bool:
        with self._lock:
            found = self._get(path)
            if found is not None and found.generation != version:
                return False
            self._objects.pop(path, None)
            return True

    @override
    def rename_dir(self, source: str, target: str) -> bool:
        split_name(source)
        split_name(target)
        raise self._error(errno.EOPNOTSUPP, f"rename {self.describe(source)} to this name", target)

    @override
    def sync_dir(self, path: str) -> None:
        split_path(path)

    @override
    def delete(self, path: str) -> None:
        split_name(path)
        with self._lock:
            self._objects.pop(path, None)

    @override
    def delete_tree(self, path: str) -> None:
        split_name(path)
        with self._lock:
            for key in [key for key in self._objects if key == path or key.startswith(f"{path}/")]:
                del self._objects[key]

    @override
    def delete_dir(self, path: str) -> bool:
        split_name(path)
        return not self.list(path)

    @override
    def free_bytes(self) -> int | None:
        return None

    @override
    def open_writer(self, path: str, *, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> FileWriter:
        if num_bytes < 0 or block_bytes <= 0:
            raise InvalidArgumentError(f"cannot write {num_bytes} bytes in blocks of {block_bytes}")
        if self._get(path) is not None:
            raise self._error(errno.EEXIST, "write", path)
        return _ObjectWriter(self, path, num_bytes=num_bytes, block_bytes=block_bytes)

    @override
    def open_reader(self, path: str, *, num_bytes: int | None = None) -> FileReader:
        found = self._get(path)
        if found is None:
            raise self._error(errno.ENOENT, "read", path)
        return MemoryReader(found.data, self.describe(path))

    def _get(self, path: str) -> _Object | None:
        split_name(path)
        with self._lock:
            return self._objects.get(path)

    def _error(self, number: int, action: str, path: str) -> StorageError:
        return storage_error(OSError(number, ""), action, self.describe(path))


class _ObjectWriter(GatheringWriter):
    """Puts the file at the end: until then nobody sees anything of it."""

    def __init__(self, storage: MemoryObjects, path: str, *, num_bytes: int, block_bytes: int) -> None:
        super().__init__(storage.describe(path), num_bytes=num_bytes, block_bytes=block_bytes)
        self._storage = storage
        self._path = path

    @override
    def _keep(self, data: bytes) -> None:
        self._storage.put(self._path, data)

    @override
    def _discard(self) -> None:
        pass
