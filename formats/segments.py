"""What somebody wants of a step's files: byte ranges, and where each of them goes.

Knows files by index and leaves by a name for messages; nothing of blocks, digests and storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.storage.buffers import copy_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from safepoint.formats.entries import FileEntry

__all__ = ["ReadSegment", "Scatter", "by_file"]


class Scatter(Protocol):
    """Many small places that one byte range goes to; they are given verified bytes only."""

    def __len__(self) -> int:
        """Return the number of bytes that go there."""

    def put(self, start: int, data: memoryview) -> None:
        """Take bytes, of which the first is byte `start` of the range; `data` is writable, and valid for the call only.

        Called by: any of the reading threads, and by several at once; once for each byte.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSegment:
    """A byte range that somebody wants.

    Attributes:
        file: index into the files.
        offset: its first byte in that file.
        target: where it goes; its length is the segment's. Memory is writable, contiguous, of format "B", and is read
            into before the bytes are verified.
        leaf: dotted path of the leaf, for messages.
    """

    file: int
    offset: int
    target: memoryview | Scatter
    leaf: str

    @property
    def end(self) -> int:
        """The first byte behind it in the file."""
        return self.offset + len(self.target)

    def memory(self, start: int, end: int) -> memoryview | None:
        """Return where bytes `start` to `end` of the file can be read to, or None where they are to be `put`."""
        target = self.target
        return target[start - self.offset : end - self.offset] if isinstance(target, memoryview) else None

    def put(self, block: memoryview, start: int) -> None:
        """Take its own part of a block whose first byte is byte `start` of the file."""
        first, last = max(start, self.offset), min(start + len(block), self.end)
        part = block[first - start : last - start]
        if isinstance(self.target, memoryview):
            copy_bytes(self.target[first - self.offset : last - self.offset], part)
        else:
            self.target.put(first - self.offset, part)


def by_file(segments: Iterable[ReadSegment], files: Sequence[FileEntry]) -> dict[int, list[ReadSegment]]:
    """Return the segments that want anything, checked, by the index of their file.

    Raises:
        InvalidArgumentError: a segment that lies in no file, or whose target cannot be filled.
    """
    found: dict[int, list[ReadSegment]] = {}
    for segment in segments:
        _check_segment(segment, files)
        if len(segment.target):
            found.setdefault(segment.file, []).append(segment)
    return found


def _check_segment(segment: ReadSegment, files: Sequence[FileEntry]) -> None:
    """Refuse a segment that cannot be read.

    Raises:
        InvalidArgumentError: it lies in no file, or its target cannot be filled.
    """
    target = segment.target
    if isinstance(target, memoryview) and (
        target.readonly or not target.c_contiguous or target.format != "B" or target.ndim != 1
    ):
        raise InvalidArgumentError("a read needs writable, contiguous memory, seen as bytes", leaf=segment.leaf)
    inside = 0 <= segment.file < len(files) and segment.offset >= 0
    if not (inside and segment.end <= files[segment.file].num_bytes):
        raise InvalidArgumentError(
            f"bytes {segment.offset} to {segment.end} of file {segment.file} are not in the step", leaf=segment.leaf
        )
