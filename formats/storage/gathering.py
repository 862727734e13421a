"""GatheringWriter: a writer that keeps the whole file in memory and hands it on at the end."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.checksum import digest
from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.storage.base import FileWriter, WrittenFile

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["GatheringWriter"]


class GatheringWriter(FileWriter):
    """Gathers a file of a known size.

    Args:
        path: in full, for messages.
        num_bytes: of the file.
        block_bytes: of its digested blocks.
    """

    def __init__(self, path: str, *, num_bytes: int, block_bytes: int) -> None:
        self._full_path = path
        self._num_bytes = num_bytes
        self._block_bytes = block_bytes
        self._data = bytearray()
        self._open = True

    @abstractmethod
    def _keep(self, data: bytes) -> None:
        """Put the whole file where it belongs."""

    @abstractmethod
    def _discard(self) -> None:
        """Take away what `__init__` made, if anything."""

    @override
    def append(self, data: Buffer) -> None:
        self._check_open()
        view = memoryview(data)
        if not view.c_contiguous:
            raise InvalidArgumentError("a writer takes C-contiguous memory only")
        if len(self._data) + view.nbytes > self._num_bytes:
            raise self._wrong_size("more")
        self._data += view.tobytes()

    @override
    def finish(self) -> WrittenFile:
        self._check_open()
        data = bytes(self._data)
        try:
            if len(data) != self._num_bytes:
                raise self._wrong_size("fewer")
            self._keep(data)
        except BaseException:
            self.abort()
            raise
        self._open = False
        starts = range(0, len(data), self._block_bytes)
        digests = tuple(digest(data[start : start + self._block_bytes]) for start in starts)
        return WrittenFile(num_bytes=len(data), block_bytes=self._block_bytes, digests=digests)

    @override
    def abort(self) -> None:
        if self._open:
            self._open = False
            self._discard()

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidArgumentError("this writer was finished or aborted already")

    def _wrong_size(self, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{what} bytes appended than announced", path=self._full_path)
