"""One open local file: written in blocks past the page cache where the file system allows it, and read.

Owns direct I/O: it is tried, not configured, and given up for the file at the first refusal. Direct writes are whole
pages, so the last block is padded and the file cut to its size at the end. Knows nothing about digests and threads.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.checksum import digest_of_parts
from safepoint.formats.errors import CorruptDataError
from safepoint.formats.storage.base import FileReader
from safepoint.formats.storage.block_writer import BlockFile
from safepoint.formats.storage.buffers import ALIGNMENT
from safepoint.formats.storage.system import (
    UNSUPPORTED,
    SystemCalls,
    raised_as_storage_error,
    read_fully,
    write_fully,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

__all__ = ["CREATE_FLAGS", "LocalBlockFile", "LocalFileReader", "allows_direct", "map_descriptor"]

CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_DIRECT_FLAG = getattr(os, "O_DIRECT", 0)
_DIGESTED_BYTES = 1 << 20
_SMALLEST_DIRECT_BYTES = 1 << 20  # below, the one fsync is all of the time


def allows_direct(path: str | os.PathLike[str]) -> bool:
    """Say whether the file system of this file, which is there, takes writes past the page cache.

    Raises:
        OSError: it cannot be opened for writing.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _set_direct(descriptor, on=True)
    finally:
        os.close(descriptor)


def _set_direct(descriptor: int, *, on: bool) -> bool:
    """Turn direct I/O on or off for an open file; say whether it is on."""
    if not _DIRECT_FLAG:
        return False
    try:
        # Not at the open: there, some file systems create the file and then refuse it.
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT_FLAG if on else flags & ~_DIRECT_FLAG)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        return False
    return on


class LocalBlockFile(BlockFile):
    """A new file; holds its directory open, so that it removes its own file and no other, wherever that was moved."""

    def __init__(
        self, directory: int, name: str, *, path: str, num_bytes: int, block_bytes: int, calls: SystemCalls
    ) -> None:
        """Create the file under the umask.

        Args:
            directory: descriptor of its directory; duplicated.
            name: its name there.
            path: it in full, for messages.
            num_bytes: its size.
            block_bytes: size of the blocks that it will be written in.
            calls: the system calls.

        Raises:
            OSError: FileExistsError when something is there already.
        """
        self.path = path
        self._name = name
        self._num_bytes = num_bytes
        self._calls = calls
        self._directory = os.dup(directory)
        try:
            self._descriptor = os.open(name, CREATE_FLAGS, 0o666, dir_fd=self._directory)
        except BaseException:
            os.close(self._directory)
            raise
        worthwhile = block_bytes % ALIGNMENT == 0 and num_bytes >= _SMALLEST_DIRECT_BYTES
        self._direct = worthwhile and _set_direct(self._descriptor, on=True)
        self.alignment = ALIGNMENT if self._direct else 1

    @override
    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        with self._errors():
            if self._direct and len(block) % ALIGNMENT == 0:
                try:
                    return write_fully(self._calls, self._descriptor, block, offset)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                self._direct = _set_direct(self._descriptor, on=False)
            return write_fully(self._calls, self._descriptor, block[:num_bytes], offset)

    @override
    def finish(self) -> None:
        with self._errors():
            if os.fstat(self._descriptor).st_size != self._num_bytes:  # the padding of the last block
                os.ftruncate(self._descriptor, self._num_bytes)
            self._calls.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
        os.close(self._directory)

    @override
    def discard(self) -> None:
        with suppress(OSError):
            os.unlink(self._name, dir_fd=self._directory)
        if self._descriptor >= 0:
            with suppress(OSError):
                os.close(self._descriptor)
        os.close(self._directory)

    def _errors(self) -> AbstractContextManager[None]:
        return raised_as_storage_error("write", self.path, needed_bytes=self._num_bytes, free_bytes=self._free_bytes)

    def _free_bytes(self) -> int | None:
        """What there would be for this file, did it not hold some already."""
        try:
            system, own = os.fstatvfs(self._descriptor), os.fstat(self._descriptor)
        except OSError:
            return None
        return system.f_bavail * system.f_frsize + own.st_blocks * 512


class LocalFileReader(FileReader):
    """Reads through the page cache unless told not to: faster than direct reads, also of cold files, for more CPU."""

    def __init__(self, descriptor: int, num_bytes: int, *, path: str, calls: SystemCalls) -> None:
        """Take over an open descriptor of a regular file of `num_bytes`; `path` is for messages."""
        self.num_bytes = num_bytes
        self._descriptor = descriptor
        self._path = path
        self._calls = calls
        self._direct = False

    @override
    def read_into(self, offset: int, buffer: memoryview) -> None:
        with raised_as_storage_error("read", self._path):
            try:
                count = read_fully(self._calls, self._descriptor, buffer, offset)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                self._direct = _set_direct(self._descriptor, on=False)  # the end of the file is no whole page
                count = read_fully(self._calls, self._descriptor, buffer, offset)
        if count < len(buffer):
            raise CorruptDataError(
                f"the file ends at byte {offset + count:,}; {len(buffer):,} bytes from {offset:,} on were expected",
                path=self._path,
                hint="It was cut short after it was written: restore another step, or a copy of this one.",
            )

    @override
    def bypass_cache(self) -> None:
        with raised_as_storage_error("read", self._path):
            self._direct = _set_direct(self._descriptor, on=True)

    @override
    def expect_in_order(self) -> None:
        self._calls.expect_in_order(self._descriptor)

    @override
    def read_digested(self, offset: int, blocks: list[list[memoryview]]) -> list[str]:
        digests = []
        for parts in blocks:
            digests.append(digest_of_parts(self._pieces(offset, parts)))
            offset += sum(map(len, parts))
        return digests

    def _pieces(self, offset: int, parts: list[memoryview]) -> Iterator[memoryview]:
        """Read what fits a core's cache, and yield it while it is there."""
        for part in parts:
            size = max(1, len(part)) if self._direct else _DIGESTED_BYTES  # what bypasses the cache likes long reads
            for start in range(0, len(part), size):
                piece = part[start : start + size]
                self.read_into(offset, piece)
                offset += len(piece)
                yield piece

    def identity(self) -> tuple[int, ...]:
        """Return what tells this file from another that has its name later.

        Raises:
            OSError: it cannot be looked at.
        """
        found = os.fstat(self._descriptor)
        return found.st_ino, found.st_mtime_ns, found.st_size

    @override
    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def map_descriptor(descriptor: int, num_bytes: int) -> memoryview | None:
    """Map an open file, so that changes stay in this process; None where the file system has no mappings."""
    if not num_bytes:
        return memoryview(b"")
    try:
        return memoryview(mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_COPY))
    except OSError:
        return None
