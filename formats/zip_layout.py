"""A stored (uncompressed) zip archive whose larger entries are written by somebody else: where each begins.

An entry's checksum is known only after its data, so it follows the data (a data descriptor) and stands in the central
directory at the end, as in the archives that torch writes. Source: PKWARE APPNOTE 4.3 (local headers, descriptors,
central directory) and 4.5.3 (zip64). Knows neither tensors nor pickles.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LIMIT_32", "ZipLayout"]

LIMIT_32 = 0xFFFF_FFFF
"""Sizes and offsets from here on need zip64 fields."""

_LIMIT_16 = 0xFFFF
_SMALL_ALIGNMENT = 64  # what torch gives its storages
_LARGE_ALIGNMENT = 4096
_VERSION, _VERSION_ZIP64 = 20, 45
_UTF8, _HAS_DESCRIPTOR = 0x0800, 0x0008
_ZIP64_ID, _PADDING_ID = 0x0001, 0x4246  # "FB", as torch's own padding
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END_ZIP64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR_ZIP64 = struct.Struct("<4sIQI")


@dataclass(frozen=True, slots=True)
class _Entry:
    name: bytes
    num_bytes: int
    offset: int
    check: int | None
    """None: not known before the data is written."""
    is_large: bool


class ZipLayout:
    """Places entries one after another.

    Args:
        small: content of the entries that come first, by name.
        large: size in bytes of the entries whose data others write, by name, in order.
        limit: from which size and offset on zip64 fields are used; another one for tests only.
    """

    def __init__(self, small: Mapping[str, bytes], large: Mapping[str, int], *, limit: int = LIMIT_32) -> None:
        self._limit = limit
        self._entries: list[_Entry] = []
        self._heads: list[bytes] = []
        self.offsets: list[int] = []
        """First data byte of each large entry."""
        header = b"".join(self._small(small))
        position = len(header)
        for name, num_bytes in large.items():
            head = self._head(name.encode(), num_bytes, position)
            self._heads.append(head)
            self.offsets.append(position + len(head))
            position += len(head) + num_bytes + len(self._descriptor(self._entries[-1], 0))
        self._directory_offset = position
        self._num_small = len(small)
        self.header = header + (self._heads[0] if self._heads else self._directory([]))
        """What comes before the data of the first large entry; all of the file where there is none."""
        self.num_bytes = position + len(self._directory([0] * len(large)))
        """Of the whole file."""

    def check(self, data: memoryview) -> int:
        """Return the checksum that zip uses."""
        return zlib.crc32(data)

    def after(self, index: int, checks: Sequence[int]) -> bytes:
        """Return what follows large entry `index`: its descriptor and the next head, or the directory at the end."""
        descriptor = self._descriptor(self._entries[self._num_small + index], checks[index])
        last = index == len(self._heads) - 1
        return descriptor + (self._directory(checks) if last else self._heads[index + 1])

    def _small(self, small: Mapping[str, bytes]) -> list[bytes]:
        parts: list[bytes] = []
        position = 0
        for name, data in small.items():
            entry = _Entry(name.encode(), len(data), position, zlib.crc32(data), is_large=False)
            self._entries.append(entry)
            parts += [self._local(entry, b""), data]
            position += len(parts[-2]) + len(data)
        return parts

    def _head(self, name: bytes, num_bytes: int, position: int) -> bytes:
        entry = _Entry(name, num_bytes, position, None, is_large=num_bytes >= self._limit)
        self._entries.append(entry)
        sizes = struct.pack("<HHQQ", _ZIP64_ID, 16, 0, 0) if entry.is_large else b""
        start = position + _LOCAL.size + len(name) + len(sizes) + 4
        padding = -start % (_LARGE_ALIGNMENT if num_bytes >= _LARGE_ALIGNMENT else _SMALL_ALIGNMENT)
        return self._local(entry, sizes + struct.pack("<HH", _PADDING_ID, padding) + b"Z" * padding)

    def _local(self, entry: _Entry, extra: bytes) -> bytes:
        late = entry.check is None
        size = LIMIT_32 if entry.is_large else 0 if late else entry.num_bytes
        fields = _LOCAL.pack(
            b"PK\x03\x04",
            _VERSION_ZIP64 if entry.is_large else _VERSION,
            _UTF8 | (_HAS_DESCRIPTOR if late else 0),
            0,
            0,
            0,
            entry.check or 0,
            size,
            size,
            len(entry.name),
            len(extra),
        )
        return fields + entry.name + extra

    def _descriptor(self, entry: _Entry, check: int) -> bytes:
        return struct.pack(
            "<4sIQQ" if entry.is_large else "<4sIII", b"PK\x07\x08", check, entry.num_bytes, entry.num_bytes
        )

    def _directory(self, checks: Sequence[int]) -> bytes:
        known = [entry.check for entry in self._entries if entry.check is not None]
        records = [self._central(entry, check) for entry, check in zip(self._entries, [*known, *checks], strict=True)]
        directory = b"".join(records)
        start = self._directory_offset
        end = start + len(directory)
        count = len(records)
        tail = b""
        if count >= _LIMIT_16 or end >= self._limit:
            tail = _END_ZIP64.pack(
                b"PK\x06\x06",
                _END_ZIP64.size - 12,
                _VERSION_ZIP64,
                _VERSION_ZIP64,
                0,
                0,
                count,
                count,
                len(directory),
                start,
            ) + _LOCATOR_ZIP64.pack(b"PK\x06\x07", 0, end, 1)
        number = min(count, _LIMIT_16)
        size, offset = (LIMIT_32 if value >= self._limit else value for value in (len(directory), start))
        return directory + tail + _END.pack(b"PK\x05\x06", 0, 0, number, number, size, offset, 0)

    def _central(self, entry: _Entry, check: int) -> bytes:
        values = (entry.num_bytes, entry.num_bytes, entry.offset)
        fits = [value < self._limit and not (entry.is_large and value == entry.num_bytes) for value in values]
        wide = [value for value, fit in zip(values, fits, strict=True) if not fit]
        size, _, offset = (value if fit else LIMIT_32 for value, fit in zip(values, fits, strict=True))
        extra = struct.pack(f"<HH{len(wide)}Q", _ZIP64_ID, 8 * len(wide), *wide) if wide else b""
        version = _VERSION_ZIP64 if wide else _VERSION
        late = entry.check is None
        fields = _CENTRAL.pack(
            b"PK\x01\x02",
            version,
            version,
            _UTF8 | (_HAS_DESCRIPTOR if late else 0),
            0,
            0,
            0,
            check,
            size,
            size,
            len(entry.name),
            len(extra),
            0,
            0,
            0,
            0,
            offset,
        )
        return fields + entry.name + extra
