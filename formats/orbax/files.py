"""The layout `files` of an item: a directory for each array, and in it a file for each chunk.

Zarr as every reader of it knows it; for few, large arrays. The files are in the manifest like any other.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from safepoint.formats.base import Content, FileLayout, FilePlan, Piece, Placement, Portion
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.orbax import metadata
from safepoint.formats.orbax.crc32c import crc32c
from safepoint.formats.orbax.grid import chunks_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from safepoint.formats.orbax.names import Entry
    from safepoint.formats.region import Region

__all__ = [
    "CHECK_BYTES",
    "ChunkEnd",
    "chunk_files",
    "chunk_pieces",
    "placed",
    "scalar_bytes",
    "scalar_entries",
    "whole_file",
]

CHECK_BYTES = 4
"""Of the checksum after each chunk."""


class ChunkEnd:
    """Puts a chunk's checksum after it."""

    def check(self, data: memoryview) -> int:
        """Return the checksum."""
        return crc32c(data)

    def after(self, index: int, checks: Sequence[int]) -> bytes:
        """Return the checksum's bytes."""
        return checks[index].to_bytes(CHECK_BYTES, "little")


def chunk_pieces(name: str, portion: Portion, grid: Sequence[int]) -> Iterator[tuple[Piece, Region]]:
    """Yield the chunks of a portion; the key is `<name>/c/<i>/<j>…`."""
    stored_grid = metadata.stored_form(portion.dtype, grid)[1]
    extra = (0,) * (len(stored_grid) - len(grid))  # the bytes of an item are never cut
    for numbers, region in chunks_of(portion.region, grid, portion.shape):
        key = "/".join([*([name] if name else []), "c", *map(str, (*numbers, *extra))])
        yield Piece(key=key, dtype=portion.dtype, shape=tuple(grid)), region


def chunk_files(directory: str, index: int, portion: Portion, grid: Sequence[int], *, is_copy: bool) -> list[FilePlan]:
    """Return a file for each chunk of a portion."""
    plans = []
    for piece, region in chunk_pieces(directory, portion, grid):
        placement = placed(piece, 0)
        plans.append(
            FilePlan(
                path=piece.key,
                layout=FileLayout(
                    header=b"",
                    placements=(placement,),
                    num_bytes=placement.num_bytes + CHECK_BYTES,
                    framing=ChunkEnd(),
                ),
                contents=(Content(portion=index, region=region, is_copy=is_copy),),
            )
        )
    return plans


def placed(piece: Piece, offset: int) -> Placement:
    """Return where a chunk lies that begins at `offset`."""
    return Placement(piece=piece, offset=offset, num_bytes=math.prod(piece.shape) * ITEM_BYTES[piece.dtype])


def scalar_entries(entries: Sequence[Entry]) -> Iterator[tuple[str, bytes]]:
    """Yield key and value of all that makes up the numbers of an item."""
    for entry in entries:
        if entry.kind == "scalar":
            dtype, data = scalar_bytes(entry.value)
            place = f"{entry.name}/" if entry.name else ""
            yield f"{place}zarr.json", metadata.array_json(dtype, (), ())
            yield f"{place}c", data + crc32c(data).to_bytes(CHECK_BYTES, "little")


def whole_file(path: str, data: bytes) -> FilePlan:
    """Return a file of which all is known."""
    return FilePlan(path=path, layout=FileLayout(header=data, placements=(), num_bytes=len(data)))


def scalar_bytes(value: float) -> tuple[str, bytes]:
    """Return dtype and bytes of the array that a number is."""
    if type(value) is bool:
        return "bool", bytes([value])
    if type(value) is int:
        return "int64", value.to_bytes(8, "little", signed=True)
    return "float64", struct.pack("<d", value)
