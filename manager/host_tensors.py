"""Host tensors of a restore without a target: fresh ones in few mappings, or ones that show a file as it lies there.

Fresh pages are most of the time of such a restore, and huge ones cost a third. Knows files, offsets and dtypes; which
leaves there are is the caller's business.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.manager.staging import huge_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from safepoint.formats.manifest import LeafEntry, Manifest, TreePath
    from safepoint.formats.storage import Storage

__all__ = ["HostMemory", "fresh_tensors", "mapped_tensors"]

HostMemory = Literal["owned", "mapped"]
"""Whether a restore without a target reads into memory of its own, or maps the files of the step."""

ALIGNMENT_BYTES = 64
SHARED_FROM_BYTES = 64 << 10
ARENA_BYTES = 32 << 20
"""How much is mapped at once: as long as one tensor of it is kept, all of it is. Larger tensors are on their own."""


def fresh_tensors(entries: Iterable[LeafEntry]) -> dict[TreePath, torch.Tensor]:
    """Return an uninitialised tensor for each leaf, each with a storage of its own.

    Raises:
        RuntimeError, MemoryError, OSError: there is not so much memory.
    """
    tensors: dict[TreePath, torch.Tensor] = {}
    waiting: list[LeafEntry] = []
    total = 0
    for entry in entries:
        size = _num_bytes(entry)
        if size < SHARED_FROM_BYTES:
            tensors[entry.path] = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
            continue
        if waiting and total + size > ARENA_BYTES:
            tensors.update(_arena(waiting))
            waiting, total = [], 0
        waiting.append(entry)
        total += _padded(size)
    tensors.update(_arena(waiting))
    return tensors


def _arena(entries: Sequence[LeafEntry]) -> dict[TreePath, torch.Tensor]:
    if not entries:
        return {}
    memory = huge_pages(sum(_padded(_num_bytes(entry)) for entry in entries))
    tensors = {}
    start = 0
    for entry in entries:
        tensors[entry.path] = _tensor(memory, start, entry)
        start += _padded(_num_bytes(entry))
    return tensors


def mapped_tensors(
    storage: Storage, prefix: str, manifest: Manifest, entries: Iterable[LeafEntry]
) -> dict[TreePath, torch.Tensor]:
    """Return the leaves that can be shown as they lie in their files: those in one piece, at an aligned place.

    A page is read when it is first looked at; writing to a tensor makes a copy of the page, and never changes the
    file. Nothing is verified.
    """
    maps: dict[int, memoryview | None] = {}
    tensors = {}
    for entry in entries:
        if len(entry.shards) != 1 or not 0 < _num_bytes(entry) == entry.shards[0].num_bytes:
            continue
        shard = entry.shards[0]
        if shard.region.shape != entry.shape or shard.stored_shape is not None or shard.codec is not None:
            continue
        if shard.file not in maps:
            maps[shard.file] = storage.map_file(f"{prefix}/{manifest.files[shard.file].path}")
        memory = maps[shard.file]
        if memory is not None and shard.offset % ITEM_BYTES[entry.dtype] == 0:
            tensors[entry.path] = _tensor(memory, shard.offset, entry)
    return tensors


def _tensor(memory: memoryview, start: int, entry: LeafEntry) -> torch.Tensor:
    # A storage for each, so that saving or counting one of them does not take the others along.
    data = torch.frombuffer(memory, dtype=torch.uint8, count=_num_bytes(entry), offset=start)
    return data.view(torch_dtype(entry.dtype)).reshape(entry.shape)


def _num_bytes(entry: LeafEntry) -> int:
    return math.prod(entry.shape) * ITEM_BYTES[entry.dtype]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
