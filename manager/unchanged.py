"""Which files of an earlier step hold what is to be saved now, so that a second name of them saves writing it.

    a region is unchanged   the base step has it, of the same leaf and dtype, and its bytes have the same digest
    a file is taken over    at least half of it is unchanged regions, and it was not linked on too often

Pure: knows digests and entries; no storage and no tensors. Whether a file is still what it was, others find out.
"""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.checksum import digest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from safepoint.formats.entries import FileEntry, ShardEntry
    from safepoint.formats.manifest import Manifest, TreePath
    from safepoint.formats.region import Region

__all__ = ["MAX_LINKS", "LinkBase", "Takeover", "Wanted", "linked_path", "take_over"]

_SUFFIX = re.compile(r"\.[a-z0-9]{1,16}")

MAX_LINKS = 10
"""How often a file is linked on before what is wanted of it is written anew."""

RegionKey = tuple["TreePath", "Region"]


@dataclass(frozen=True, kw_only=True)
class LinkBase:
    """A committed step, as far as a later save of this process may take files over from it.

    Attributes:
        step: its number.
        attempt: that wrote it; what is there under another attempt is another step.
        files: some or all of its files.
        shards: by leaf and region, the dtype and the stored region; those with a digest, and in one of `files`.
    """

    step: int
    attempt: str
    files: tuple[FileEntry, ...]
    shards: Mapping[RegionKey, tuple[str, ShardEntry]]

    @classmethod
    def of_manifest(cls, manifest: Manifest, file_format: str) -> LinkBase:
        """Return all of a step; nothing of one in another format than this."""
        if manifest.format != file_format:
            return cls.of(manifest.step, manifest.attempt, manifest.files, ())
        held = ((leaf.path, leaf.dtype, shard) for leaf in manifest.leaves for shard in leaf.shards)
        return cls.of(manifest.step, manifest.attempt, manifest.files, held)

    @classmethod
    def of(
        cls,
        step: int,
        attempt: str,
        files: Sequence[FileEntry],
        held: Iterable[tuple[TreePath, str, ShardEntry]],
    ) -> LinkBase:
        """Return a step of these files and stored regions (leaf, dtype, entry)."""
        shards = {
            (path, shard.region): (dtype, shard)
            for path, dtype, shard in held
            if shard.digest is not None and shard.stored_shape is None and shard.codec is None
        }
        return cls(step=step, attempt=attempt, files=tuple(files), shards=shards)

    @property
    def linkable(self) -> list[int]:
        """The files that may be taken over at all, as far as is known before the next save, as indices."""
        wanted = {shard.file for _, shard in self.shards.values()}
        return [index for index, file in enumerate(self.files) if index in wanted and file.links < MAX_LINKS]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A region that is to be saved: of which leaf and dtype, and the digest of its bytes."""

    path: TreePath
    region: Region
    dtype: str
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Takeover:
    """A file of the base, and what of it is wanted.

    Attributes:
        file: index into the base's files.
        held: index into what is wanted, with the entry of the base.
    """

    file: int
    held: tuple[tuple[int, ShardEntry], ...]


def take_over(base: LinkBase, wanted: Sequence[Wanted]) -> list[Takeover]:
    """Return the files to be taken over, in the order of the base."""
    by_file: dict[int, list[tuple[int, ShardEntry]]] = {}
    for index, one in enumerate(wanted):
        dtype, shard = base.shards.get((one.path, one.region), (None, None))
        if shard is not None and (dtype, shard.digest) == (one.dtype, one.digest):
            by_file.setdefault(shard.file, []).append((index, shard))
    return [
        Takeover(file=file, held=tuple(held))
        for file, held in sorted(by_file.items())
        if base.files[file].links < MAX_LINKS
        and 2 * sum(shard.num_bytes for _, shard in held) >= base.files[file].num_bytes
    ]


def linked_path(file: FileEntry) -> str:
    """Return the path of a file in the steps that take it over: the same in all of them, whoever links it."""
    if file.links:
        return file.path
    suffix = os.path.splitext(file.path)[1]
    kept = suffix if _SUFFIX.fullmatch(suffix) else ""  # the path may be anybody's
    return f"shard-{file.attempt}-{digest(file.path.encode())[:16]}{kept}"
