"""LocalStorage: a directory of a mounted file system.

Every name is reached by the walk of `walking`, through directory descriptors, so that a symbolic link below the root (a
step may come from anywhere) leads nowhere, whoever swaps it in at whatever moment. The root itself may be a link: that
is the user's choice. Holds no descriptors between calls, so it may be forked and copied.

Writing and reading of large files: `local_file`, `block_writer`. Removal of trees: `removal`.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.checksum import BLOCK_BYTES, digest
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
from safepoint.formats.storage.block_writer import BlockWriter
from safepoint.formats.storage.buffers import BUFFERS
from safepoint.formats.storage.file_lock import held_lock
from safepoint.formats.storage.linking import link_between
from safepoint.formats.storage.local_file import CREATE_FLAGS, LocalBlockFile, LocalFileReader, map_descriptor
from safepoint.formats.storage.local_rename import rename_if_there
from safepoint.formats.storage.removal import remove_tree
from safepoint.formats.storage.system import UNSUPPORTED, SystemCalls, raised_as_storage_error, write_fully
from safepoint.formats.storage.walking import OpenDirectory, OpenParent, open_directory, refuse_dead_link

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

__all__ = ["LocalStorage"]

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO must not hold us up
_LOCK_SECS = 30.0  # around two renames; whoever holds it longer is stopped, or its file system is
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ENODEV})


class LocalStorage(Storage):
    """Storage in a local directory, made by `make_dir("")` if it is not there."""

    def __init__(self, root: str | os.PathLike[str], *, calls: SystemCalls | None = None) -> None:
        """Remember where the root is; touches nothing.

        Args:
            root: directory; made absolute now, so that a later chdir does not move it.
            calls: system calls to use instead of the real ones (tests).
        """
        self.root = Path(os.path.abspath(os.fspath(root)))
        self.location = str(self.root)
        self._calls = calls or SystemCalls()

    @override
    def make_dir(self, path: str, *, exist_ok: bool = True) -> None:
        with self._errors("create the directory", path):
            if path == "":
                self._make_root(exist_ok=exist_ok)
                return
            with self._parent(path) as (parent, name):
                try:
                    os.mkdir(name, 0o777, dir_fd=parent)
                except FileExistsError:
                    found = os.stat(name, dir_fd=parent, follow_symlinks=False)
                    if not (exist_ok and stat.S_ISDIR(found.st_mode)):
                        raise

    def _make_root(self, *, exist_ok: bool) -> None:
        missing = []
        place = self.root
        refuse_dead_link(place)
        while not place.exists():
            missing.append(place)
            place = place.parent
        if not place.is_dir() or not (missing or exist_ok):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
        for directory in reversed(missing):
            with suppress(FileExistsError):
                directory.mkdir(0o777)
            parent = open_directory(str(directory.parent), ())
            try:
                self._sync_names(parent)
            finally:
                os.close(parent)

    @override
    def list(self, path: str) -> list[Entry]:
        entries = []
        with (
            self._errors("list", path),
            self._not_there_yet(),
            self._directory(split_path(path)) as directory,
            os.scandir(directory) as scan,
        ):
            for entry in scan:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # gone since it was listed
                    continue
                identity = (found.st_ino, found.st_mtime_ns, found.st_size)
                entries.append(Entry(entry.name, stat.S_ISDIR(found.st_mode), identity, stat.S_ISLNK(found.st_mode)))
        return entries

    @contextmanager
    def _not_there_yet(self) -> Iterator[None]:
        """Take a directory that is not there for an empty one, but no root behind a link that leads nowhere."""
        try:
            yield
        except FileNotFoundError:
            refuse_dead_link(self.root)

    @override
    def size(self, path: str, *, expected: int | None = None) -> int | None:
        try:
            with self._reading("look at", path), self._parent(path) as (parent, name):
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise
        if not stat.S_ISREG(found.st_mode):
            raise self._not_a_file(path)
        return found.st_size

    @override
    def get(self, path: str, *, max_bytes: int) -> bytes:
        with self.open_reader(path) as reader:
            return self._whole(reader, path, max_bytes)

    @override
    def put(self, path: str, data: bytes) -> None:
        with self._writing(path, len(data)), self._parent(path) as (parent, name):
            self._create(parent, name, data)

    @override
    def put_if_absent(self, path: str, data: bytes) -> bool:
        with self._writing(path, len(data)), self._written_aside(path, data) as (parent, temp, name):
            try:
                self._publish_if_absent(parent, temp, name, data)
            except FileExistsError:
                return False
            self._sync_names(parent)
        return True

    def _publish_if_absent(self, parent: int, temp: str, name: str, data: bytes) -> None:
        attempts: tuple[Callable[[], None], ...] = (
            partial(self._calls.link, parent, temp, name),
            partial(self._calls.rename_noreplace, parent, temp, parent, name),
        )
        for attempt in attempts:
            try:
                return attempt()
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
        # Neither is to be had here: exclusive still, though a reader may see the file before it is complete.
        return self._create(parent, name, data)

    @override
    def replace(self, path: str, data: bytes) -> None:
        with self._writing(path, len(data)), self._written_aside(path, data) as (parent, temp, name):
            os.rename(temp, name, src_dir_fd=parent, dst_dir_fd=parent)
            self._sync_names(parent)

    @override
    def read_versioned(self, path: str, *, max_bytes: int) -> VersionedBytes | None:
        try:
            with self.open_reader(path) as reader:
                data = self._whole(reader, path, max_bytes)
                return VersionedBytes(data, (*reader.identity(), digest(data)))
        except StorageError as error:
            if error.errno == errno.ENOENT:
                return None
            raise

    @override
    def put_if_unchanged(self, path: str, data: bytes, version: Hashable) -> bool:
        with self._writing(path, len(data)), self._written_aside(path, data) as (parent, temp, name):
            with self._unchanged(parent, path, version) as unchanged:
                if unchanged is not True:
                    return False
                os.rename(temp, name, src_dir_fd=parent, dst_dir_fd=parent)
            self._sync_names(parent)
        return True

    @override
    def delete_if_unchanged(self, path: str, version: Hashable) -> bool:
        with self._errors("delete", path), suppress(FileNotFoundError), self._parent(path) as (parent, name):
            with self._unchanged(parent, path, version) as unchanged:
                if unchanged is False:
                    return False
                os.unlink(name, dir_fd=parent)
            self._sync_names(parent)
        return True

    @contextmanager
    def _unchanged(self, directory: int, path: str, version: Hashable) -> Iterator[bool | None]:
        """Say whether the file has that version, None when it is missing, and keep it so among those who ask."""
        with held_lock(directory, deadline_secs=_LOCK_SECS) as held:
            if not held:
                raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
            found = self.read_versioned(path, max_bytes=sys.maxsize)
            yield None if found is None else found.version == version

    @override
    def rename_dir(self, source: str, target: str) -> bool:
        *source_parents, source_name = split_name(source)
        action = f"rename {self.describe(source)} to this name"
        with self._errors(action, target), self._parent(target) as (target_dir, target_name):
            try:
                source_dir = self._open_directory(source_parents)
            except FileNotFoundError:
                return False
            try:
                return rename_if_there(self._calls, source_dir, source_name, target_dir, target_name)
            finally:
                os.close(source_dir)

    @override
    def sync_dir(self, path: str) -> None:
        with self._errors("sync the directory", path), self._directory(split_path(path)) as directory:
            self._sync_names(directory)

    @override
    def delete(self, path: str) -> None:
        with self._errors("delete", path), suppress(FileNotFoundError), self._parent(path) as (parent, name):
            os.unlink(name, dir_fd=parent)

    @override
    def delete_tree(self, path: str) -> None:
        with self._errors("delete", path), suppress(FileNotFoundError), self._parent(path) as (parent, name):
            remove_tree(parent, name)

    @override
    def delete_dir(self, path: str) -> bool:
        with self._errors("delete", path), suppress(FileNotFoundError), self._parent(path) as (parent, name):
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False
        return True

    @override
    def free_bytes(self) -> int | None:
        place = self.root
        while not place.exists() and place != place.parent:
            place = place.parent
        try:
            found = os.statvfs(place)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize

    @override
    def open_writer(self, path: str, *, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> FileWriter:
        if num_bytes < 0 or block_bytes <= 0:
            raise InvalidArgumentError(f"cannot write {num_bytes} bytes in blocks of {block_bytes}")
        with self._writing(path, num_bytes), self._parent(path) as (parent, name):
            file = LocalBlockFile(
                parent, name, path=self.describe(path), num_bytes=num_bytes, block_bytes=block_bytes, calls=self._calls
            )
        return BlockWriter(file, num_bytes=num_bytes, block_bytes=block_bytes, pool=BUFFERS)

    @override
    def open_reader(self, path: str, *, num_bytes: int | None = None) -> LocalFileReader:
        with self._reading("read", path), self._parent(path) as (parent, name):
            descriptor = os.open(name, _READ_FLAGS, dir_fd=parent)
            found = os.fstat(descriptor)
            if stat.S_ISREG(found.st_mode):
                return LocalFileReader(descriptor, found.st_size, path=self.describe(path), calls=self._calls)
            os.close(descriptor)
        raise self._not_a_file(path)

    @override
    def link_file(self, source: str, target: str) -> bool:
        *parents, name = split_name(source)
        with self._writing(target, 0), self._parent(target) as (target_dir, target_name):
            try:
                return link_between(self._calls, lambda: self._open_directory(parents), name, target_dir, target_name)
            except OSError as error:
                if error.errno not in _NOT_A_FILE:
                    raise
                raise self._not_a_file(source) from error

    @override
    def map_file(self, path: str) -> memoryview | None:
        with self._reading("map", path), self._parent(path) as (parent, name):
            descriptor = os.open(name, _READ_FLAGS, dir_fd=parent)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode):
                    return map_descriptor(descriptor, found.st_size)
            finally:
                os.close(descriptor)
        raise self._not_a_file(path)

    def _whole(self, reader: FileReader, path: str, max_bytes: int) -> bytes:
        if reader.num_bytes > max_bytes:
            raise CorruptDataError(
                f"the file has {reader.num_bytes:,} bytes where at most {max_bytes:,} are expected",
                path=self.describe(path),
                hint="It was not written by safepoint, or was changed since.",
            )
        data = bytearray(reader.num_bytes)
        reader.read_into(0, memoryview(data))
        return bytes(data)

    # Walking

    def _open_directory(self, parts: Sequence[str]) -> int:
        return open_directory(self.location, parts)

    def _directory(self, parts: Sequence[str]) -> OpenDirectory:
        return OpenDirectory(self.location, parts)

    def _parent(self, path: str) -> OpenParent:
        return OpenParent(self.location, path)

    # Writing small files

    def _create(self, parent: int, name: str, data: bytes) -> None:
        descriptor = os.open(name, CREATE_FLAGS, 0o666, dir_fd=parent)
        try:
            write_fully(self._calls, descriptor, memoryview(data), 0)
            self._calls.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                os.unlink(name, dir_fd=parent)
            raise
        finally:
            os.close(descriptor)

    @contextmanager
    def _written_aside(self, path: str, data: bytes) -> Iterator[tuple[int, str, str]]:
        """Write a temporary file beside `path`; yield their directory, its name and that of `path`."""
        temporary = f".tmp-{secrets.token_hex(8)}"
        with self._parent(path) as (parent, name):
            self._create(parent, temporary, data)
            try:
                yield parent, temporary, name
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=parent)

    def _sync_names(self, directory: int) -> None:
        try:
            self._calls.fsync(directory)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # some network mounts have no such operation
                raise

    # Errors

    def _errors(self, action: str, path: str) -> AbstractContextManager[None]:
        return raised_as_storage_error(action, self.describe(path))

    def _writing(self, path: str, num_bytes: int) -> AbstractContextManager[None]:
        return raised_as_storage_error("write", self.describe(path), needed_bytes=num_bytes, free_bytes=self.free_bytes)

    def _reading(self, action: str, path: str) -> AbstractContextManager[None]:
        def instead(error: OSError) -> CorruptDataError | None:
            return self._not_a_file(path) if error.errno in _NOT_A_FILE else None

        return raised_as_storage_error(action, self.describe(path), instead=instead)

    def _not_a_file(self, path: str) -> CorruptDataError:
        return CorruptDataError(
            "not a regular file inside the root",
            path=self.describe(path),
            hint="A link, directory or device was put in its place; symbolic links below the root are not followed.",
        )
