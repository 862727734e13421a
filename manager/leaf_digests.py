"""What the leaves of a step have to be, by their digests, and whether that is what its files give back."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from safepoint.formats.checksum import digest, digest_of_parts
from safepoint.formats.manifest import TreePath, display_path
from safepoint.formats.region import Region
from safepoint.manager.errors import CorruptDataError
from safepoint.manager.leaf_reading import cut, part_bytes, read_parts
from safepoint.manager.sources import batches, byte_view

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safepoint.formats.manifest import LeafEntry
    from safepoint.manager.progress import Progress
    from safepoint.manager.step_paths import OpenStep

__all__ = ["LeafDigests", "LeafPart", "check_leaves"]

LeafPart = tuple[TreePath, Region]
"""A region of a leaf."""

LeafDigests = dict[LeafPart, str]
"""Digests of the bytes of regions, in C order."""

_BATCH_BYTES = 64 << 20


class _Wanted(NamedTuple):
    place: tuple[int, int]
    entry: LeafEntry
    region: Region
    digest: str


def check_leaves(step: OpenStep, digests: LeafDigests, progress: Progress) -> None:
    """Read regions of a step, each in full and at most one batch at a time, and compare them.

    Args:
        step: that was written, as its manifest on disk tells.
        digests: of regions that together are its leaves.
        progress: told of the bytes read.

    Raises:
        CorruptDataError: a region is not what it has to be, or its file is damaged; names the leaf.
    """
    wanted = sorted(_wanted(step, digests), key=lambda one: one.place)
    progress.begin("read back", sum(map(_num_bytes, wanted)))
    for batch in batches(wanted, _num_bytes, _BATCH_BYTES):
        for one, found in zip(batch, _read(step, batch), strict=True):
            if found != one.digest:
                raise CorruptDataError(
                    "what was written is not what was read", step=step.step, leaf=display_path(one.entry.path)
                )
            progress.advance(_num_bytes(one))


def _wanted(step: OpenStep, digests: LeafDigests) -> Iterator[_Wanted]:
    entries = {entry.path: entry for entry in step.manifest.leaves}
    places = {
        (entry.path, shard.region): (shard.file, shard.offset) for entry in entries.values() for shard in entry.shards
    }
    for (path, region), value in digests.items():
        yield _Wanted(places.get((path, region), (0, 0)), entries[path], region, value)


def _num_bytes(one: _Wanted) -> int:
    return part_bytes((one.entry, one.region))


def _read(step: OpenStep, batch: list[_Wanted]) -> list[str]:
    if len(batch) == 1:
        parts = cut(batch[0].entry, _BATCH_BYTES, batch[0].region)
        return [digest_of_parts(byte_view(tensor) for part in parts for tensor in read_parts(step, [part]))]
    return [digest(byte_view(tensor)) for tensor in read_parts(step, [(one.entry, one.region) for one in batch])]
