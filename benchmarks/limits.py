"""What the machine can do at most: copying memory, and writing and reading a file without anything around it."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["RawFile", "touched_memory"]

BLOCK_BYTES = 8 << 20
NUM_THREADS = 2


def touched_memory(num_bytes: int) -> torch.Tensor:
    """Return bytes in huge pages where there are some, every page of which is there already."""
    memory = mmap.mmap(-1, num_bytes + (2 << 20), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % (2 << 20)
    return whole[start : start + num_bytes].fill_(1)


class RawFile:
    """A file written and read by two threads in blocks of 8 MiB, from one aligned buffer a thread."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._buffers = [touched_memory(BLOCK_BYTES) for _ in range(NUM_THREADS)]

    def write(self, path: Path, *, flags: int = 0) -> None:
        """Write, cut to size, sync the file; `flags` is `os.O_DIRECT` to pass the page cache by."""
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | flags, 0o644)
        try:
            self._in_threads(lambda thread, offset, _: self._write_block(descriptor, thread, offset))
            os.ftruncate(descriptor, self.num_bytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: Path, target: torch.Tensor) -> None:
        """Read all of it into `target`, a tensor of bytes."""
        descriptor = os.open(path, os.O_RDONLY)
        view: memoryview = target.numpy().data
        try:
            self._in_threads(lambda _, offset, size: _preadv(descriptor, view, offset, size))
        finally:
            os.close(descriptor)

    def _write_block(self, descriptor: int, thread: int, offset: int) -> None:
        os.pwrite(descriptor, self._buffers[thread].numpy().data, offset)

    def _in_threads(self, work: Callable[[int, int, int], object]) -> None:
        offsets = iter(range(0, self.num_bytes, BLOCK_BYTES))
        lock = threading.Lock()

        def loop(thread: int) -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                work(thread, offset, min(BLOCK_BYTES, self.num_bytes - offset))

        threads = [threading.Thread(target=loop, args=(number,)) for number in range(1, NUM_THREADS)]
        for thread in threads:
            thread.start()
        loop(0)
        for thread in threads:
            thread.join()


def _preadv(descriptor: int, view: memoryview, offset: int, size: int) -> None:
    done = 0
    while done < size:
        done += os.preadv(descriptor, [view[offset + done : offset + size]], offset + done)
