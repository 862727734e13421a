"""What a manifest says of shards, leaves and files, one by one: their JSON, and the checks that need no other entry.

Checks that compare entries (tiling, overlaps, names used twice) are the manifest's.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from safepoint.formats.checksum import BLOCK_BYTES, is_digest, num_blocks
from safepoint.formats.codecs import CODECS
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import CorruptDataError, UnsupportedVersionError
from safepoint.formats.fields import INT64_MAX, Fields, check_relative_path
from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME
from safepoint.formats.region import Region
from safepoint.formats.tree import JSON, TreePath, display_path

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_RANK", "FileEntry", "LeafEntry", "ShardEntry", "can_hold", "is_box", "is_inside", "is_possible"]

MAX_RANK = 64
"""The most dimensions a leaf can have; torch and numpy stop there too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One data file of a step.

    Attributes:
        path: relative to the step, "/"-separated.
        num_bytes: its exact size.
        block_bytes: how many bytes one digest covers; the last block may be short.
        digests: of each block, in order.
        process_index: the process that wrote it, or linked it.
        attempt: the attempt that wrote it; an earlier step's where it was linked.
        links: how often it was linked on, from step to step, since it was written.
    """

    path: str
    num_bytes: int
    block_bytes: int
    digests: tuple[str, ...]
    process_index: int
    attempt: str
    links: int = 0

    def to_json(self) -> JSON:
        """Return the entry as the manifest has it."""
        value = {
            "path": self.path,
            "num_bytes": self.num_bytes,
            "block_bytes": self.block_bytes,
            "digests": list(self.digests),
            "process_index": self.process_index,
            "attempt": self.attempt,
        }
        return {**value, "links": self.links} if self.links else value

    @classmethod
    def from_json(cls, value: JSON, *, index: int, process_count: int, path: str) -> FileEntry:
        """Return the checked entry.

        Raises:
            CorruptDataError: a wrong type, a path that leaves the step or is one of the records, a block size out of
                bounds, or not one well-formed digest a block.
        """
        fields = Fields(value, what=f"file {index}", path=path)
        digests = fields.items("digests")
        entry = cls(
            path=_data_path(fields),
            num_bytes=fields.integer("num_bytes"),
            block_bytes=fields.integer("block_bytes", minimum=1, maximum=BLOCK_BYTES),
            digests=tuple(digests),
            process_index=fields.integer("process_index", maximum=process_count - 1),
            attempt=fields.identifier("attempt"),
            links=fields.integer("links") if fields.has("links") else 0,
        )
        expected = num_blocks(entry.num_bytes, entry.block_bytes)
        if len(digests) != expected:
            raise fields.error(f"({entry.path}) has {len(digests)} digests for {expected} blocks")
        if not all(map(is_digest, digests)):
            raise fields.error(f"({entry.path}) has a digest that is none")
        return entry


def _data_path(fields: Fields) -> str:
    try:
        path = check_relative_path(fields.text("path"), what=fields.what)
    except CorruptDataError as error:
        raise error.with_context(path=fields.path) from None
    if path in (COMMIT_NAME, MANIFEST_NAME):
        raise fields.error(f"has the path {path}, which is no data file")
    return path


class ShardEntry(NamedTuple):
    """One stored region of a leaf. There are many, and nothing else that cannot be changed is made as fast as a tuple.

    Attributes:
        region: where it lies in the leaf.
        file: index into the manifest's files.
        offset: its first byte, from the start of that file.
        num_bytes: its size: that of the stored items in C order, little-endian, or of what they were encoded to.
        key: the file's own name of it.
        stored_shape: of the box that is stored, of which the region is the first corner; None where it is the region.
        digest: of its bytes, where it was asked for.
        codec: name of what those items are encoded with, as a whole (`safepoint.formats.codecs`); None where they lie
            there as they are.
    """

    region: Region
    file: int
    offset: int
    num_bytes: int
    key: str
    stored_shape: tuple[int, ...] | None = None
    digest: str | None = None
    codec: str | None = None

    @property
    def stored_region(self) -> Region:
        """The box whose items are stored: the region, and what pads it. May reach beyond the leaf's shape."""
        return self.region if self.stored_shape is None else Region(self.region.offsets, self.stored_shape)

    def to_json(self) -> JSON:
        """Return the entry as the manifest has it."""
        value: dict[str, JSON] = {
            "region": self.region.to_json(),
            "file": self.file,
            "offset": self.offset,
            "num_bytes": self.num_bytes,
            "key": self.key,
        }
        if self.stored_shape is not None:
            value["stored_shape"] = list(self.stored_shape)
        if self.digest is not None:
            value["digest"] = self.digest
        if self.codec is not None:
            value["codec"] = self.codec
        return value


class LeafEntry(NamedTuple):
    """One array of the state.

    Attributes:
        path: of its node in the structure.
        dtype: our name of it (`safepoint.formats.dtypes`).
        shape: its global shape, in items.
        shards: the stored regions; together they tile the shape, unless the manifest is a partial one.
    """

    path: TreePath
    dtype: str
    shape: tuple[int, ...]
    shards: tuple[ShardEntry, ...]

    def to_json(self, node: int) -> JSON:
        """Return the entry as the manifest has it; `node` is the row of its path in the structure."""
        return {
            "node": node,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "shards": [shard.to_json() for shard in self.shards],
        }

    @classmethod
    def from_json(
        cls, value: JSON, *, index: int, paths: Sequence[TreePath], files: Sequence[FileEntry], path: str
    ) -> LeafEntry:
        """Return the checked entry.

        Args:
            value: parsed JSON that anybody may have written.
            index: of the entry, for messages.
            paths: of the structure's rows.
            files: of the manifest, checked.
            path: of the manifest, for errors.

        Raises:
            CorruptDataError: a wrong type, an unknown dtype, a shape whose bytes no 64-bit number can count, a region
                outside the shape, or a shard outside its file or of another size than its region.
        """
        fields = Fields(value, what=f"leaf {index}", path=path)
        tree_path = paths[fields.integer("node", maximum=len(paths) - 1)]
        try:
            dtype = fields.text("dtype")
            item_bytes = ITEM_BYTES.get(dtype)
            if item_bytes is None:
                raise fields.error(f"has the unknown dtype {dtype[:40]!r}")
            shape = fields.integers("shape", max_items=MAX_RANK)
            if not is_possible(dtype, shape):
                raise fields.error(f"has the impossible shape {shape}")
            shards = tuple(
                _read_shard(shard, shape=shape, item_bytes=item_bytes, files=files, fields=fields)
                for shard in fields.items("shards")
            )
        except (CorruptDataError, UnsupportedVersionError) as error:
            raise error.with_context(leaf=display_path(tree_path)) from None
        return cls(path=tree_path, dtype=dtype, shape=shape, shards=shards)


def is_possible(dtype: str, shape: tuple[int, ...]) -> bool:
    """Say whether a 64-bit number can count the bytes of such a leaf, each 0 in its shape taken as 1."""
    return len(shape) <= MAX_RANK and math.prod(max(size, 1) for size in shape) * ITEM_BYTES[dtype] <= INT64_MAX


def _read_shard(
    value: JSON, *, shape: tuple[int, ...], item_bytes: int, files: Sequence[FileEntry], fields: Fields
) -> ShardEntry:
    shard = Fields(value, what=f"a shard of {fields.what}", path=fields.path)
    region = _read_region(shard, shape)
    entry = ShardEntry(
        region=region,
        file=shard.integer("file", maximum=len(files) - 1),
        offset=shard.integer("offset"),
        num_bytes=shard.integer("num_bytes"),
        key=shard.text("key"),
        stored_shape=_read_stored_shape(shard, region) if shard.has("stored_shape") else None,
        digest=_read_digest(shard) if shard.has("digest") else None,
        codec=_read_codec(shard) if shard.has("codec") else None,
    )
    expected = entry.stored_region.num_elements * item_bytes
    if not can_hold(entry.num_bytes, expected, entry.codec):
        if entry.codec is not None:
            raise shard.error(f"has {entry.num_bytes} encoded bytes, which cannot be the {expected} of its region")
        raise shard.error(f"has {entry.num_bytes} bytes where its region has {expected}")
    file = files[entry.file]
    if entry.offset + entry.num_bytes > file.num_bytes:
        raise shard.error(
            f"at bytes {entry.offset} to {entry.offset + entry.num_bytes} "
            f"lies outside its file {file.path} of {file.num_bytes} bytes"
        )
    return entry


def can_hold(num_bytes: int, expected: int, codec: str | None) -> bool:
    """Say whether so many stored bytes can be the `expected` ones of what is stored."""
    if codec is None:
        return num_bytes == expected
    return 0 < expected <= num_bytes * CODECS[codec].max_ratio


def _read_digest(shard: Fields) -> str:
    text = shard.text("digest")
    if not is_digest(text):
        raise shard.error("has a digest that is none")
    return text


def _read_codec(shard: Fields) -> str:
    name = shard.text("codec")
    if name not in CODECS:
        raise UnsupportedVersionError(
            f"{shard.what} is encoded with {name[:40]!r}; this release knows {', '.join(sorted(CODECS))}",
            path=shard.path,
            hint="Install a newer safepoint to read this step; an older step may still be readable.",
        )
    return name


def _read_stored_shape(shard: Fields, region: Region) -> tuple[int, ...]:
    stored = shard.integers("stored_shape", max_items=MAX_RANK)
    if not is_box(stored, region):
        raise shard.error(f"has the stored_shape {list(stored)}, which cannot hold its region of {region.shape}")
    return stored


def is_box(stored_shape: tuple[int, ...], region: Region) -> bool:
    """Say whether the region can be the first corner of a stored box."""
    return len(stored_shape) == len(region.shape) and all(map(operator.ge, stored_shape, region.shape))


def _read_region(shard: Fields, shape: tuple[int, ...]) -> Region:
    parts = shard.items("region")
    if len(parts) != 2:  # noqa: PLR2004  # offsets and shape
        raise shard.error("has a region that is not [offsets, shape]")
    offsets, sizes = (shard.checked_integers(part, name="region", max_items=MAX_RANK) for part in parts)
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        raise shard.error(f"has a region of {len(offsets)} and {len(sizes)} dimensions in the shape {shape}")
    if not is_inside(offsets, sizes, shape):
        raise shard.error(f"has a region at {offsets} of {sizes} outside the shape {shape}")
    return Region(offsets, sizes)


def is_inside(offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Say whether a box of as many dimensions lies in a shape."""
    return all(map(operator.le, map(operator.add, offsets, sizes), shape))
