"""Host memory of an async save: one slab, touched once and used again by every save.

Fresh pages are the hidden cost of a copy (6 to 9 times the time of touched ones), so the slab is private, anonymous,
advised to use huge pages, and kept between saves. Knows nothing of leaves, files or processes.
"""

from __future__ import annotations

import mmap

import torch

__all__ = ["HostSlab"]

ALIGNMENT_BYTES = 64


class HostSlab:
    """Reused host memory that holds what an async save still has to write.

    Not thread-safe: the save in flight owns it until it ends.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._bytes: torch.Tensor = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes allocated."""
        return self._bytes.numel()

    def reset(self, num_bytes: int, num_pieces: int) -> None:
        """Forget what the slab holds and make room for `num_bytes` in `num_pieces` pieces.

        Allocates only when there is less room than that; the old memory is let go first.
        """
        needed = num_bytes + num_pieces * ALIGNMENT_BYTES
        self._used = 0
        if needed <= self.capacity_bytes:
            return
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._memory = None  # views of the last save, if any are left, keep the old mapping alive
        memory = mmap.mmap(-1, needed, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def copy(self, data: torch.Tensor) -> torch.Tensor:
        """Copy a contiguous host tensor into the slab; return the copy, valid until the next `reset`."""
        num_bytes = data.numel() * data.element_size()
        start = self._used
        self._used = -(-(start + num_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        raw = self._bytes[start : start + num_bytes]
        if num_bytes:
            raw.copy_(data.reshape(-1).view(torch.uint8))
        return raw.view(data.dtype).reshape(data.shape)
