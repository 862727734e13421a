"""Host memory of an async save: one slab, touched once and used again by every save.

Fresh pages are the hidden cost of a copy (6 to 9 times the time of touched ones), so the slab is private, anonymous,
advised to use huge pages, and kept between saves; pinned where CUDA devices copy to it. It holds images of whole files,
each beginning on a page, so that a writer can hand it to direct I/O as it is. Knows nothing of leaves, files or
processes.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from safepoint.manager.device_copies import pin_memory
from safepoint.manager.free_memory import free_memory

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Sequence

__all__ = ["HostSlab", "huge_pages"]

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20


def huge_pages(num_bytes: int) -> memoryview:
    """Return fresh zeroed memory, in huge pages where the kernel has them; freed with the last view of it.

    Raises:
        OSError: there is not so much.
    """
    slack = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    memory = mmap.mmap(-1, num_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % slack if slack else 0
    return memoryview(memory)[start : start + num_bytes]


class HostSlab:
    """Reused host memory that holds what an async save still has to write.

    Not thread-safe: the save in flight owns it until it ends.

    Args:
        free_memory: returns how many bytes this process may still take, or None if nobody tells.
    """

    def __init__(self, free_memory: Callable[[], int | None] = free_memory) -> None:
        self._bytes: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self._free_memory = free_memory
        self._pin: weakref.finalize[..., object] | None = None

    @property
    def capacity_bytes(self) -> int:
        """Bytes allocated."""
        return self._bytes.numel()

    def shortage(self, sizes: Sequence[int]) -> int:
        """Return how many bytes of memory are missing for one image of each size; 0 where there is enough.

        A tenth of what is free is left to others.
        """
        needed = sum(map(_whole_pages, sizes))
        free = None if needed <= self.capacity_bytes else self._free_memory()
        return 0 if free is None else max(0, needed - self.capacity_bytes - (free - free // 10))

    def images(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Forget what the slab holds; return room for one image of each size, as bytes, valid until the next call.

        Allocates only when there is less room than that; the old memory is let go first.
        """
        starts = []
        needed = 0
        for size in sizes:
            starts.append(needed)
            needed += _whole_pages(size)
        if needed > self.capacity_bytes:
            if self._pin is not None:
                self._pin()
                self._pin = None
            self._bytes = torch.empty(0, dtype=torch.uint8)  # images of the last save, if any are left, keep theirs
            self._bytes = torch.frombuffer(huge_pages(needed), dtype=torch.uint8)
        return [self._bytes[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def pin(self, device: torch.device) -> None:
        """Pin the memory for copies from CUDA devices, once; where that is refused they go by way of the driver's own.

        Args:
            device: one that is in use.
        """
        if self._pin is None and self.capacity_bytes:
            self._pin = pin_memory(self._bytes, self, device)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
