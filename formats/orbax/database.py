"""The layout `ocdbt` of an item: a data file of each process, and a database of the primary that says what lies where.

For many arrays, which would be as many files and more, and for encoded ones, whose size nobody knows before they are
written. The data file has the chunks one after the other, as the files of the other layout have them; so our reader
reads it by our manifest, and TensorStore by the database. Aliases within an item are keys of the same place.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import TYPE_CHECKING

import xxhash

from safepoint.formats.base import Content, FileLayout, FilePlan, Portion
from safepoint.formats.orbax import metadata
from safepoint.formats.orbax.files import CHECK_BYTES, ChunkEnd, chunk_pieces, placed, scalar_entries, whole_file
from safepoint.formats.orbax.ocdbt import MANIFEST_FILE, Location, build_database

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from safepoint.formats.base import LeafParts, WrittenPart
    from safepoint.formats.codecs import Codec
    from safepoint.formats.orbax.names import Entry
    from safepoint.formats.tree import TreePath

__all__ = ["Held", "data_file", "database_files", "parts_by_item"]

_STEM = "d/" + "0" * 24  # TensorStore's names end in 32 hexadecimal digits; the others are the number of the file
_NODES_FILE = f"{_STEM}{0:08x}"

Held = tuple[int, Portion, str, "Sequence[int]", bool]
"""Of a portion in an item: its index, itself, the name of its array there, the grid, and whether this is a copy."""


def data_file(item: str, held: Sequence[Held], *, process_index: int, codec: Codec | None) -> FilePlan:
    """Return the file with all chunks that a process writes for an item."""
    check_bytes = 0 if codec else CHECK_BYTES  # of encoded chunks only their order is known
    position = 0
    placements, contents = [], []
    for index, portion, name, grid, is_copy in held:
        for piece, region in chunk_pieces(name, portion, grid):
            placements.append(placed(piece, position))
            contents.append(Content(portion=index, region=region, is_copy=is_copy))
            position += placements[-1].num_bytes + check_bytes
    stem = f"{item}/ocdbt.process_{process_index}/{_STEM}"
    return FilePlan(
        path=stem if codec else f"{stem}{0:08x}",
        layout=FileLayout(
            header=b"", placements=tuple(placements), num_bytes=position, framing=ChunkEnd(), codec=codec
        ),
        contents=tuple(contents),
    )


def database_files(
    item: str,
    entries: Sequence[Entry],
    leaves: Iterable[tuple[LeafParts, Sequence[int], Sequence[str]]],
    parts: Iterable[WrittenPart],
    *,
    codec: Codec | None,
    time_nsecs: int,
) -> list[FilePlan]:
    """Return the database of an item.

    Args:
        item: its directory.
        entries: all of it; numbers are kept in the database itself.
        leaves: its arrays, each with the grid and the names that it has in this item, the one under which it was
            written first.
        parts: what the processes wrote of them, into files of this item.
        codec: of the chunks.
        time_nsecs: when the save began, in nanoseconds since 1970.
    """
    found: dict[str, bytes | Location] = dict(scalar_entries(entries))
    names_of: dict[TreePath, Sequence[str]] = {}
    for leaf, grid, names in leaves:
        names_of[leaf.path] = names
        described = metadata.array_json(leaf.dtype, leaf.shape, grid, codec)
        found.update((_key(name, "zarr.json"), described) for name in names)
    for part in parts:
        first, *others = names_of[part.path]
        chunk = part.key[len(first) + 1 :] if first else part.key
        place = Location(file=part.file[len(item) + 1 :], offset=part.offset, num_bytes=part.num_bytes + CHECK_BYTES)
        found.update((_key(name, chunk), place) for name in (first, *others))
    identity = xxhash.xxh3_128_digest(item.encode() + struct.pack("<Q", time_nsecs))
    manifest, nodes = build_database(found, node_file=_NODES_FILE, identity=identity, time_nsecs=time_nsecs)
    return [whole_file(f"{item}/{_NODES_FILE}", nodes), whole_file(f"{item}/{MANIFEST_FILE}", manifest)]


def _key(name: str, key: str) -> str:
    return f"{name}/{key}" if name else key


def parts_by_item(parts: Iterable[WrittenPart]) -> Mapping[str, list[WrittenPart]]:
    """Return what lies in the data files of each item."""
    found: dict[str, list[WrittenPart]] = defaultdict(list)
    for part in parts:
        item, _, rest = part.file.partition("/")
        if rest.startswith("ocdbt.process_"):
            found[item].append(part)
    return found
