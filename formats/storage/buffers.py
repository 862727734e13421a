"""Block buffers for direct I/O: aligned, private, advised to be huge pages, touched once, reused across files.

Fresh pages cost several times what copying into touched ones does, so buffers are kept for the life of the process,
at most `CAPACITY_BYTES` of them. Knows nothing about files.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from contextlib import suppress

import numpy as np

__all__ = ["ALIGNMENT", "BUFFERS", "BufferPool", "copy_bytes"]

ALIGNMENT = 4096
"""Alignment, of memory and of file offsets, that every device takes which takes direct I/O at all."""

CAPACITY_BYTES = 64 << 20

_HUGE_PAGE_BYTES = 2 << 20
_GIL_FREE_COPY_BYTES = 64 << 10


class BufferPool:
    """Lends writable buffers; counts what is lent and what is kept against one capacity."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.forget()

    @property
    def lent_bytes(self) -> int:
        """Bytes that are lent out now."""
        with self._lock:
            return self.held_bytes - sum(len(buffer) for buffer in self._kept)

    def forget(self) -> None:
        """Start afresh, as a forked child must: the lock may be held by a thread that it does not have."""
        self._lock = threading.Lock()
        self._kept: list[memoryview] = []
        self.held_bytes = 0

    def take(self, num_bytes: int) -> memoryview | None:
        """Lend a buffer of at least this size, whole pages; None when the capacity is lent out."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            for index in reversed(range(len(self._kept))):  # the last one used may still be in the cache
                if len(self._kept[index]) == size:
                    return self._kept.pop(index)
            while self._kept and self.held_bytes + size > self._capacity_bytes:
                self.held_bytes -= len(self._kept.pop(0))
            if self.held_bytes + size > self._capacity_bytes:
                return None
            self.held_bytes += size
        return _allocate(size)

    def take_anyway(self, num_bytes: int) -> memoryview:
        """Lend a buffer even beyond the capacity: for a caller that holds none, and would wait for others for ever."""
        buffer = self.take(num_bytes)
        if buffer is not None:
            return buffer
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self.held_bytes += size
        return _allocate(size)

    def give_back(self, buffer: memoryview) -> None:
        """Return a lent buffer; it must not be used any more."""
        with self._lock:
            if self.held_bytes > self._capacity_bytes:
                self.held_bytes -= len(buffer)
            else:
                self._kept.append(buffer)

    def forfeit(self, buffer: memoryview) -> None:
        """Never lend a buffer again: somebody who was given up may still write into it."""
        with self._lock:
            self.held_bytes -= len(buffer)


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes between views of equal length; large ones without holding the GIL."""
    if len(source) < _GIL_FREE_COPY_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def _allocate(size: int) -> memoryview:
    slack = _HUGE_PAGE_BYTES if size >= _HUGE_PAGE_BYTES else 0
    # Not mmap(-1, size): that is MAP_SHARED, which gets no huge pages.
    pages = mmap.mmap(-1, size + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if slack and advice is not None:
        with suppress(OSError):  # a kernel without them
            pages.madvise(advice)
    view = memoryview(pages)
    start = -_address(view) % slack if slack else 0
    buffer = view[start : start + size]
    for offset in range(0, size, mmap.PAGESIZE):
        buffer[offset] = 0
    return buffer


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


BUFFERS = BufferPool(CAPACITY_BYTES)
"""The pool of this process."""

os.register_at_fork(after_in_child=BUFFERS.forget)
