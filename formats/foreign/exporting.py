"""Files for other libraries, described before they are written, and written part by part: no array is in memory whole.

Knows no kind of checkpoint: what is in a file, its planner says.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import xxhash

from safepoint.formats.foreign.base import array_bytes, read_parts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from safepoint.formats.foreign.base import ForeignArray
    from safepoint.formats.storage import FileWriter, Storage

__all__ = ["ArrayData", "ExportFile", "ExportPlan", "write_export_file"]


@dataclass(frozen=True, kw_only=True)
class ArrayData:
    """The bytes of an array, in C order.

    Attributes:
        name: of the array, unique in the export.
        array: where they are read from.
        after: makes what follows them from their CRC-32; None where nothing does.
        num_bytes_after: how much that is.
    """

    name: str
    array: ForeignArray
    after: Callable[[int], bytes] | None = None
    num_bytes_after: int = 0


@dataclass(frozen=True, kw_only=True)
class ExportFile:
    """One file.

    Attributes:
        name: in the directory.
        parts: bytes and arrays, in order.
    """

    name: str
    parts: tuple[bytes | ArrayData, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return sum(
            array_bytes(part.array) + part.num_bytes_after if isinstance(part, ArrayData) else len(part)
            for part in self.parts
        )


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """All that a directory is to hold.

    Attributes:
        files: to be written first, in any order.
        finish: writes, into the directory of this path, what says what they are.
        read_back: opens the directory, and returns its arrays by the names that `ArrayData` gave them.
    """

    files: tuple[ExportFile, ...]
    finish: Callable[[str], None]
    read_back: Callable[[str], Mapping[str, ForeignArray]]


def write_export_file(storage: Storage, file: ExportFile, advance: Callable[[int], None]) -> dict[str, str]:
    """Write a file, durably; return the digest of each array in it, as it was read.

    Args:
        storage: of the directory.
        file: what to write; nothing of that name is there.
        advance: told of the bytes of arrays that are written.

    Raises:
        CorruptDataError: an array cannot be read.
        StorageError: an array cannot be read, or the file not be written; it is removed.
    """
    digests: dict[str, str] = {}
    with storage.open_writer(file.name, num_bytes=file.num_bytes) as writer:
        for part in file.parts:
            if isinstance(part, ArrayData):
                digests[part.name] = _write_array(writer, part, advance)
            else:
                writer.append(part)
        writer.finish()
    return digests


def _write_array(writer: FileWriter, part: ArrayData, advance: Callable[[int], None]) -> str:
    state = xxhash.xxh3_128()
    check = 0
    for data in read_parts(part.array):
        state.update(data)
        if part.after is not None:
            check = zlib.crc32(data, check)
        writer.append(data)
        advance(len(data))
    if part.after is not None:
        writer.append(part.after(check))
    return state.hexdigest()
