"""Large objects: written as one piece from gathered blocks, read in ranges.

Owns the memory of an upload and its place in the byte budget. Knows nothing about directories.
"""

from __future__ import annotations

import ctypes
import errno
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.checksum import digest
from safepoint.formats.errors import StorageError
from safepoint.formats.storage.base import FileReader
from safepoint.formats.storage.block_writer import BlockFile
from safepoint.formats.storage.buffers import copy_bytes
from safepoint.formats.storage.object_client import MISSING
from safepoint.formats.storage.object_errors import deadline_error
from safepoint.formats.storage.system import storage_error

if TYPE_CHECKING:
    from safepoint.formats.storage.flight import ByteBudget
    from safepoint.formats.storage.object_client import ObjectClient

__all__ = ["ObjectFile", "ObjectReader"]


_BYTES_WORTH_A_TRIM = 8 << 20


class ObjectFile(BlockFile):
    """A new object, sent when it is whole, if its name is still free then."""

    alignment = 1

    def __init__(
        self, client: ObjectClient, key: str, *, num_bytes: int, budget: ByteBudget, path: str, deadline_secs: float
    ) -> None:
        """Wait for a place in the budget and take memory for the whole object.

        Args:
            client: of the store.
            key: of the object.
            num_bytes: its size.
            budget: of bytes in flight.
            path: in full, for messages.
            deadline_secs: how long to wait for other uploads to end, see `ByteBudget.take`.

        Raises:
            StorageError: ETIMEDOUT: none of the uploads before this one ended within the deadline.
        """
        self.path = path
        self._client = client
        self._key = key
        self._budget = budget
        try:
            self._taken_bytes = budget.take(num_bytes, deadline_secs=deadline_secs)
        except TimeoutError:
            raise deadline_error(
                f"begin to write while {budget.taken_bytes:,} bytes are in flight", path, deadline_secs=deadline_secs
            ) from None
        self._content = bytearray(num_bytes)

    @override
    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        copy_bytes(memoryview(self._content)[offset : offset + num_bytes], block[:num_bytes])

    @override
    def finish(self) -> None:
        num_bytes, whole = len(self._content), digest(self._content)
        with self._budget.two_copies:  # the client makes its own
            request = self._client.start_write(self._key, self._content, version=MISSING)
            self._content = bytearray()
        try:
            written = self._client.written(request)
        except StorageError:
            if not self._holds(num_bytes, whole):
                raise
        else:
            if not written and not self._holds(num_bytes, whole):
                self._client.keys(self._key)  # raises where there is no such bucket, which also looks like that
                raise storage_error(OSError(errno.EEXIST, ""), "write", self.path)
        self._release()

    @override
    def discard(self) -> None:
        self._content = bytearray()
        self._release()

    def _holds(self, num_bytes: int, whole: str) -> bool:
        """Say whether the object is what we sent: an earlier try may have been carried out and its answer lost."""
        try:
            if self._client.size(self._key, expected=num_bytes) != num_bytes:
                return False
            found = self._client.read(self._key)
        except StorageError:
            return False
        return found is not None and digest(found.data) == whole

    def _release(self) -> None:
        if self._taken_bytes >= _BYTES_WORTH_A_TRIM:
            _return_free_memory()
        self._budget.give(self._taken_bytes)
        self._taken_bytes = 0


class ObjectReader(FileReader):
    """Reads ranges of an object."""

    def __init__(self, client: ObjectClient, key: str, *, num_bytes: int, path: str) -> None:
        self.num_bytes = num_bytes
        self._client = client
        self._key = key
        self._path = path

    @override
    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.read_parts_into(offset, [buffer])

    @override
    def read_parts_into(self, offset: int, parts: list[memoryview]) -> None:
        num_bytes = sum(len(part) for part in parts)
        data = memoryview(self._read(offset, offset + num_bytes) if num_bytes else b"")
        position = 0
        for part in parts:
            copy_bytes(part, data[position : position + len(part)])
            position += len(part)

    @override
    def close(self) -> None:
        pass

    def _read(self, start: int, end: int) -> bytes:
        found = self._client.read_range(self._key, start, end)
        if found is None:
            raise storage_error(OSError(errno.ENOENT, ""), "read", self._path)
        return found


def _return_free_memory() -> None:
    """Give the system back what the client freed.

    glibc keeps it otherwise, an upload for each thread that ever began one: the client's copies are of small pieces.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
