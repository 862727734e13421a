"""Which blocks of a file are read, which of them at once, and where their bytes go.

Pure but for the buffers that it is handed; reading itself is `reading`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.segments import ReadSegment

__all__ = ["Block", "block_bounds", "blocks_of", "place_block", "runs_of"]

_BYTES_WORTH_A_READ = 128 << 10


class Block(NamedTuple):
    """One block and the segments that touch it."""

    number: int
    segments: tuple[ReadSegment, ...]


def runs_of(blocks: Iterable[Block], most: int) -> Iterator[list[Block]]:
    """Join blocks that follow each other, `most` at most."""
    run: list[Block] = []
    for block in blocks:
        if run and (block.number != run[-1].number + 1 or len(run) >= most):
            yield run
            run = []
        run.append(block)
    if run:
        yield run


def blocks_of(entry: FileEntry, segments: Sequence[ReadSegment]) -> Iterator[Block]:
    """Yield each block that a segment touches, with the segments that do; `segments` are sorted by offset."""
    touching: list[ReadSegment] = []
    position, number = 0, 0
    while touching or position < len(segments):
        if not touching:
            number = segments[position].offset // entry.block_bytes
        _, end = block_bounds(entry, number)
        while position < len(segments) and segments[position].offset < end:
            touching.append(segments[position])
            position += 1
        yield Block(number, tuple(touching))
        touching = [segment for segment in touching if segment.end > end]
        number += 1


def block_bounds(entry: FileEntry, number: int) -> tuple[int, int]:
    """Return where a block begins and ends in its file."""
    start = number * entry.block_bytes
    return start, min(start + entry.block_bytes, entry.num_bytes)


def place_block(
    block: Block, start: int, end: int, room: Callable[[int, int], memoryview]
) -> tuple[ReadSegment | None, list[memoryview]]:
    """Return where the bytes of a block go: straight to their targets where that can be, else to the buffer.

    With it the segment, if there is one, that takes the block as a whole.
    """
    whole = next((one for one in block.segments if _holds(one, start, end)), None)
    inside = None if whole is None else whole.memory(start, end)
    if inside is not None:
        return whole, [inside]
    buffer = room(start, end)
    return whole, _scattered(block.segments, start, end, buffer) or [buffer]


def _holds(segment: ReadSegment, start: int, end: int) -> bool:
    """Say whether the bytes can all be read straight into the segment's memory."""
    return segment.offset <= start and segment.end >= end and isinstance(segment.target, memoryview)


def _scattered(segments: Sequence[ReadSegment], start: int, end: int, buffer: memoryview) -> list[memoryview]:
    """Return where each part of a block goes: to its target, or to the buffer if to none.

    Nothing where that would be many small reads, or where two segments want the same bytes.
    """
    if len(segments) * _BYTES_WORTH_A_READ > end - start:
        return []
    parts: list[memoryview] = []
    position = start
    for segment in segments:
        first, last = max(start, segment.offset), min(end, segment.end)
        if first < position:
            return []
        if first > position:
            parts.append(buffer[position - start : first - start])
        target = segment.memory(first, last)
        parts.append(buffer[first - start : last - start] if target is None else target)
        position = last
    if position < end:
        parts.append(buffer[position - start : end - start])
    return parts
