"""Which chunks an array is cut into, so that every chunk is written by one process, whole.

Pure. A zarr grid is regular: chunks of one shape from the origin on; those that stick out at the end are stored whole,
padded with zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from safepoint.formats.region import Region

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["MAX_CHUNK_BYTES", "chunk_grid", "chunks_of"]

MAX_CHUNK_BYTES = 256 << 20
"""Larger chunks are cut where the regions allow it: a reader takes a chunk whole, even for a part of it."""


def chunk_grid(
    shape: Sequence[int], regions: Iterable[Region], *, item_bytes: int, max_bytes: int = MAX_CHUNK_BYTES
) -> tuple[int, ...]:
    """Return the shape of the chunks: the coarsest regular grid on which every region begins and ends.

    Even shards, and those that torch makes of an uneven dimension (all of one size but the last), are a chunk each.

    Args:
        shape: of the array.
        regions: which tile it.
        item_bytes: bytes of an item.
        max_bytes: chunks are cut to at most this size where the grid can be finer.
    """
    borders: list[set[int]] = [set() for _ in shape]
    for region in regions:
        for dim, (offset, size) in enumerate(zip(region.offsets, region.shape, strict=True)):
            borders[dim].update(edge for edge in (offset, offset + size) if 0 < edge < shape[dim])
    grid = [math.gcd(*edges) if edges else max(size, 1) for edges, size in zip(borders, shape, strict=True)]
    for dim, edges in enumerate(borders):
        too_large = -(-math.prod(grid) * item_bytes // max_bytes)
        if too_large <= 1:
            break
        grid[dim] = _finer(grid[dim], too_large, must_divide=bool(edges))
    return tuple(grid)


def _finer(size: int, parts: int, *, must_divide: bool) -> int:
    """Return a size of at most 1/parts, or as near as can be."""
    if not must_divide:
        return max(1, -(-size // parts))
    divisors = (count for count in range(parts, size + 1) if size % count == 0)
    return size // next(divisors, size)


def chunks_of(region: Region, grid: Sequence[int], shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Region]]:
    """Yield index and region of each chunk of a region that begins and ends on the grid; regions end with the shape."""
    if region.is_empty:
        return
    counts = [-(-size // chunk) for size, chunk in zip(region.shape, grid, strict=True)]
    first = [offset // chunk for offset, chunk in zip(region.offsets, grid, strict=True)]
    for number in range(math.prod(counts)):
        index, rest = [], number
        for count, start in zip(reversed(counts), reversed(first), strict=True):
            rest, place = divmod(rest, count)
            index.append(start + place)
        index.reverse()
        offsets = tuple(i * chunk for i, chunk in zip(index, grid, strict=True))
        sizes = tuple(min(chunk, total - o) for o, chunk, total in zip(offsets, grid, shape, strict=True))
        yield tuple(index), Region(offsets, sizes)
