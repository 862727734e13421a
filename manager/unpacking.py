"""Many small leaves that lie back to back in a file: read as one range, and put where each of them lives.

Owns the copies to addresses. A view of a tensor's memory, as Python has them, costs more than to copy a kilobyte there;
`Unpacker` is what the reader needs of a thousand leaves instead. Knows nothing of files and digests.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from itertools import accumulate, islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.manager.adapters import ArrayLeaf

__all__ = ["SMALL_BYTES", "Unpacker"]

SMALL_BYTES = 32 << 10
"""Leaves smaller than this are worth it."""

_move = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
"""memmove, holding the GIL: to let go of it and ask for it again would take longer than the few bytes do."""


class Unpacker:
    """The memory of small leaves, one after the other, as one target of a read."""

    def __init__(self, leaves: Sequence[ArrayLeaf], addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Remember where the bytes go.

        Args:
            leaves: whose memory it is; kept alive.
            addresses: of each, as `ArrayLeaf.address` told.
            sizes: of each in bytes; none is 0.
        """
        self._leaves = tuple(leaves)
        self._addresses = addresses
        self._ends = list(accumulate(sizes))

    def __len__(self) -> int:
        """Return the bytes of all leaves."""
        return self._ends[-1]

    def put(self, start: int, data: memoryview) -> None:
        """Copy bytes, of which the first is byte `start` of all, to the leaves that they belong to."""
        source = ctypes.addressof(ctypes.c_char.from_buffer(data)) - start
        stop = start + len(data)
        first = bisect_right(self._ends, start)
        begin = self._ends[first - 1] if first else 0
        skip = start - begin
        for address, end in zip(islice(self._addresses, first, None), islice(self._ends, first, None), strict=True):
            last = min(end, stop)
            _move(address + skip, source + start, last - start)
            if last == stop:
                return
            start, skip = last, 0
