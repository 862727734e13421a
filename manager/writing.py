"""From assignments to files: which pieces go into which file, and putting them there.

Called by every process with its own assignments; the layout is a pure function of them, so nothing has to be agreed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import FileLayout, Format, Piece
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.manifest import FileEntry, Mode, ShardEntry, TreePath
from safepoint.formats.region import Region
from safepoint.manager.naming import file_keys, item_file, shard_file
from safepoint.manager.packing import SMALL_BYTES
from safepoint.manager.sources import PlannedPiece, Source, batches, byte_view, packed, piece_bytes
from safepoint.manager.wire import path_from_json, path_to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safepoint.formats.storage import FileWriter, Storage
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.planner import WriteAssignment
    from safepoint.manager.staging import HostSlab

__all__ = ["PlannedFile", "WriteReport", "plan_files", "stage_files", "write_files"]


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """One file of this process: its layout, and its pieces in file order."""

    path: str
    layout: FileLayout
    pieces: tuple[PlannedPiece, ...]


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """What one process wrote; `shards` point into `files`."""

    files: tuple[FileEntry, ...]
    shards: tuple[tuple[TreePath, ShardEntry], ...]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for the meeting after the writes."""
        return {
            "files": [file.to_json() for file in self.files],
            "shards": [
                [path_to_json(path), *entry.region.to_json(), entry.file, entry.offset, entry.num_bytes, entry.key]
                for path, entry in self.shards
            ],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WriteReport:
        """Return the report that `to_json` described (between our own processes: not checked)."""
        files = tuple(FileEntry(**{**file, "digests": tuple(file["digests"])}) for file in value["files"])
        shards = tuple(
            (
                path_from_json(path),
                ShardEntry(
                    region=Region(tuple(offsets), tuple(shape)), file=file, offset=offset, num_bytes=num_bytes, key=key
                ),
            )
            for path, offsets, shape, file, offset, num_bytes, key in value["shards"]
        )
        return cls(files=files, shards=shards)


def plan_files(
    assignments: Sequence[WriteAssignment],
    specs: Mapping[TreePath, ArraySpec],
    *,
    mode: Mode,
    file_format: Format,
    process_index: int,
    process_count: int,
) -> list[PlannedFile]:
    """Return the files that hold `assignments`.

    Consolidated: one file an item, each leaf whole. Sharded: one file, each assigned region an entry of its own.
    """
    groups: dict[str, list[tuple[TreePath, Region, tuple[WriteAssignment, ...]]]] = {}
    if mode == "consolidated":
        parts: dict[TreePath, list[WriteAssignment]] = {}
        for assignment in assignments:
            parts.setdefault(assignment.path, []).append(assignment)
        for path, held in parts.items():
            whole = Region.whole(specs[path].shape)
            groups.setdefault(item_file(path, file_format.suffix), []).append((path, whole, tuple(held)))
    elif assignments:
        name = shard_file(process_index, process_count, file_format.suffix)
        groups[name] = [(assignment.path, assignment.region, (assignment,)) for assignment in assignments]
    files = []
    for name, entries in groups.items():
        keys = file_keys([(path, region) for path, region, _ in entries], specs, mode=mode)
        pieces = {
            key: PlannedPiece(
                path=path,
                key=key,
                dtype=specs[path].dtype,
                region=region,
                num_bytes=region.num_elements * ITEM_BYTES[specs[path].dtype],
                parts=held,
            )
            for key, (path, region, held) in zip(keys, entries, strict=True)
        }
        layout = file_format.layout(
            [Piece(key=key, dtype=piece.dtype, shape=piece.region.shape) for key, piece in pieces.items()],
            {"format": "pt"},
        )
        ordered = tuple(pieces[placement.piece.key] for placement in layout.placements)
        files.append(PlannedFile(path=name, layout=layout, pieces=ordered))
    return files


def stage_files(files: Sequence[PlannedFile], source: Source, slab: HostSlab) -> list[memoryview]:
    """Make the image of each file in the slab; when this returns, the caller may change anything."""
    images = slab.images([file.layout.num_bytes for file in files])
    for file, image in zip(files, images, strict=True):
        header = file.layout.header
        image.numpy()[: len(header)] = memoryview(header)
        position = len(header)

        def room_for(num_bytes: int, image: torch.Tensor = image) -> torch.Tensor:
            nonlocal position
            position += num_bytes
            return image[position - num_bytes : position]

        for _ in packed(file.pieces, source, room_for):
            pass
    return [image.numpy().data for image in images]


def write_files(
    storage: Storage,
    prefix: str,
    files: Sequence[PlannedFile],
    source: Source | Sequence[memoryview],
    *,
    process_index: int,
    attempt: str,
) -> WriteReport:
    """Write all files below `prefix`; return when they and their directories are durable.

    Args:
        storage: of the root.
        prefix: of the attempt.
        files: of this process.
        source: of the pieces, or the image of each file (see `stage_files`).
        process_index: of this process.
        attempt: that writes.

    Raises:
        StorageError: the storage refused; the file in question is removed.
    """
    entries: list[FileEntry] = []
    shards: list[tuple[TreePath, ShardEntry]] = []
    directories = {prefix}
    for index, file in enumerate(files):
        path = f"{prefix}/{file.path}"
        parent = path.rpartition("/")[0]
        if parent not in directories:
            storage.make_dir(parent)
            directories.add(parent)
        with storage.open_writer(path, num_bytes=file.layout.num_bytes) as writer:
            if isinstance(source, Sequence):
                writer.append(source[index])
            else:
                _append_all(writer, file, source)
            written = writer.finish()
        entries.append(
            FileEntry(
                path=file.path,
                num_bytes=written.num_bytes,
                block_bytes=written.block_bytes,
                digests=written.digests,
                process_index=process_index,
                attempt=attempt,
            )
        )
        for piece, placement in zip(file.pieces, file.layout.placements, strict=True):
            entry = ShardEntry(
                region=piece.region,
                file=index,
                offset=placement.offset,
                num_bytes=placement.num_bytes,
                key=piece.key,
            )
            shards.append((piece.path, entry))
    for directory in sorted(directories, reverse=True):
        storage.sync_dir(directory)
    return WriteReport(files=tuple(entries), shards=tuple(shards))


def _append_all(writer: FileWriter, file: PlannedFile, source: Source) -> None:
    """Append the header and every piece; runs of small ones at once, through a buffer of their own."""
    writer.append(file.layout.header)
    for is_small, run in groupby(file.pieces, key=_is_small):
        if is_small:
            for packed_run in packed(tuple(run), source, _new_bytes):
                writer.append(byte_view(packed_run))
        else:
            for batch in batches(run, piece_bytes):
                source.prepare(batch)
                for piece in batch:
                    writer.append(byte_view(source.load(piece)))


def _is_small(piece: PlannedPiece) -> bool:
    return piece.num_bytes < SMALL_BYTES


def _new_bytes(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)
