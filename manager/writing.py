"""From assignments to files: which pieces go into which file, and putting them there.

Called by every process with its own assignments; the plan is a pure function of them, so nothing has to be agreed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from safepoint.formats.base import Format, Portion, WriteJob
from safepoint.formats.manifest import FileEntry, Mode, ShardEntry, TreePath
from safepoint.formats.region import Region
from safepoint.manager.encoding import stored_pieces, write_encoded
from safepoint.manager.file_bytes import Located, PlannedFile, append_image, append_pieces
from safepoint.manager.finishing import Finishing
from safepoint.manager.sources import PlannedPiece, Source
from safepoint.manager.wire import path_from_json, path_to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from safepoint.formats.base import Placement
    from safepoint.formats.storage import FileWriter, Storage
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.planner import WriteAssignment

__all__ = ["PlannedFile", "WriteReport", "plan_files", "plan_pieces", "write_files"]


_Shards = tuple[tuple[TreePath, ShardEntry], ...]


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """What one process wrote; `shards` and `copies` (of shards, for other readers) point into `files`."""

    files: tuple[FileEntry, ...]
    shards: _Shards
    copies: _Shards = ()

    def data_bytes(self, *, written_by: str) -> int:
        """Return the size of all tensors in the files that this attempt wrote; what it linked does not count."""
        return sum(entry.num_bytes for _, entry in self.shards if self.files[entry.file].attempt == written_by)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value for the meeting after the writes."""
        return {
            "files": [file.to_json() for file in self.files],
            "shards": [[path_to_json(path), *_shard_to_json(entry)] for path, entry in self.shards],
            "copies": [[path_to_json(path), *_shard_to_json(entry)] for path, entry in self.copies],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WriteReport:
        """Return the report that `to_json` described (between our own processes: not checked)."""
        files = tuple(FileEntry(**{**file, "digests": tuple(file["digests"])}) for file in value["files"])
        shards, copies = (
            tuple((path_from_json(path), _shard_from_json(*fields)) for path, *fields in value[name])
            for name in ("shards", "copies")
        )
        return cls(files=files, shards=shards, copies=copies)


def _shard_to_json(entry: ShardEntry) -> list[Any]:
    place = [entry.file, entry.offset, entry.num_bytes, entry.key]
    return [*entry.region.to_json(), *place, entry.stored_shape, entry.codec, entry.digest]


def _shard_from_json(offsets: list[int], shape: list[int], *fields: Any) -> ShardEntry:
    file, offset, num_bytes, key, stored, codec, digest = fields
    return ShardEntry(
        region=Region(tuple(offsets), tuple(shape)),
        file=file,
        offset=offset,
        num_bytes=num_bytes,
        key=key,
        stored_shape=None if stored is None else tuple(stored),
        codec=codec,
        digest=digest,
    )


def plan_files(
    assignments: Sequence[WriteAssignment],
    specs: Mapping[TreePath, ArraySpec],
    *,
    file_format: Format,
    job: WriteJob,
) -> list[PlannedFile]:
    """Return the files that hold `assignments`, as the format wants them."""
    groups = _group_parts(assignments, specs, job.mode)
    return _plan([(held[0].path, region, held) for region, held in groups], specs, file_format, job)


def plan_pieces(
    pieces: Sequence[PlannedPiece], specs: Mapping[TreePath, ArraySpec], *, file_format: Format, job: WriteJob
) -> list[PlannedFile]:
    """Return the files that hold these pieces of others and nothing else: as in sharded mode, one for all of them."""
    held = [(piece.path, piece.region, piece.parts) for piece in pieces]
    return _plan(held, specs, file_format, replace(job, mode="sharded"))


def _plan(
    groups: Sequence[tuple[TreePath, Region, tuple[WriteAssignment, ...]]],
    specs: Mapping[TreePath, ArraySpec],
    file_format: Format,
    job: WriteJob,
) -> list[PlannedFile]:
    portions = [
        Portion(path=path, dtype=specs[path].dtype, shape=specs[path].shape, region=region)
        for path, region, _ in groups
    ]
    files = []
    for index, plan in enumerate(file_format.plan(portions, job)):
        pieces = tuple(
            PlannedPiece(
                path=portions[content.portion].path,
                key=placement.piece.key,
                dtype=portions[content.portion].dtype,
                region=content.region,
                num_bytes=placement.num_bytes,
                parts=_parts_in(groups[content.portion][1:], content.region),
                is_copy=content.is_copy,
            )
            for content, placement in zip(plan.contents, plan.layout.placements, strict=True)
        )
        places = plan.layout.placements
        files.append(
            PlannedFile(
                path=plan.path,
                layout=plan.layout,
                pieces=pieces,
                shards=_shards(index, pieces, places, are_copies=False),
                copies=_shards(index, pieces, places, are_copies=True),
            )
        )
    return files


def _shards(file: int, pieces: Sequence[PlannedPiece], placements: Sequence[Placement], *, are_copies: bool) -> _Shards:
    return tuple(
        (
            piece.path,
            ShardEntry(
                region=piece.region,
                file=file,
                offset=placement.offset,
                num_bytes=placement.num_bytes,
                key=piece.key,
                stored_shape=None if placement.piece.shape == piece.region.shape else placement.piece.shape,
            ),
        )
        for piece, placement in zip(pieces, placements, strict=True)
        if piece.is_copy == are_copies
    )


_Group = tuple[Region, tuple["WriteAssignment", ...]]
"""A region that is written as one, and the assigned parts that make it up."""


def _group_parts(
    assignments: Sequence[WriteAssignment], specs: Mapping[TreePath, ArraySpec], mode: Mode
) -> list[_Group]:
    if mode == "sharded":
        return [(assignment.region, (assignment,)) for assignment in assignments]
    parts: dict[TreePath, list[WriteAssignment]] = {}
    for assignment in assignments:
        parts.setdefault(assignment.path, []).append(assignment)
    return [(Region.whole(specs[path].shape), tuple(held)) for path, held in parts.items()]


def _parts_in(group: _Group, region: Region) -> tuple[WriteAssignment, ...]:
    """Return what of the assigned parts makes up a region of the group."""
    whole, parts = group
    if region == whole:
        return parts
    common = ((part, part.region.intersect(region)) for part in parts)
    return tuple(replace(part, region=inside) for part, inside in common if inside is not None)


def write_files(
    storage: Storage,
    prefix: str,
    files: Sequence[PlannedFile],
    source: Source | Sequence[memoryview],
    *,
    process_index: int,
    attempt: str,
    progress: Callable[[int], None] | None = None,
) -> WriteReport:
    """Write all files below `prefix`; return when they and their directories are durable.

    Args:
        storage: of the root.
        prefix: of the attempt.
        files: of this process.
        source: of the pieces, or the image of each file (`file_bytes.stage_files`).
        process_index: of this process.
        attempt: that writes.
        progress: called with the bytes that are with the storage, as `FileWriter.report_to` says.

    Raises:
        StorageError: the storage refused; the file in question is removed.
    """
    written: list[Located] = []
    directories = {prefix}
    with Finishing(storage, process_index=process_index, attempt=attempt, progress=progress) as finishing:
        for index, file in enumerate(files):
            path = f"{prefix}/{file.path}"
            _make_parents(storage, path, directories)
            image = source[index] if isinstance(source, Sequence) else None
            if file.layout.codec is not None:
                stored = stored_pieces(file, image if image is not None else cast("Source", source))
                number = finishing.num_files
                written.append(write_encoded(storage, prefix, file, stored, number, finishing.add, progress))
                continue
            written.append(file.located(finishing.num_files))
            finishing.finish(file.path, _appended(storage, path, file, image, source, finishing))
        entries = finishing.entries()
    for directory in sorted(directories, reverse=True):
        storage.sync_dir(directory)
    shards, copies = (_joined([pair[kind] for pair in written]) for kind in (0, 1))
    return WriteReport(files=entries, shards=shards, copies=copies)


def _appended(
    storage: Storage,
    path: str,
    file: PlannedFile,
    image: memoryview | None,
    source: Source | Sequence[memoryview],
    finishing: Finishing,
) -> FileWriter:
    """Return the writer of a file that has all of it, and is to be finished."""
    writer = storage.open_writer(path, num_bytes=file.layout.num_bytes)
    try:
        finishing.watch(writer)
        if image is not None:
            append_image(writer, file, image)
        else:
            append_pieces(writer, file, cast("Source", source))
    except BaseException:
        writer.abort()
        raise
    return writer


def _joined(groups: Sequence[_Shards]) -> _Shards:
    return groups[0] if len(groups) == 1 else tuple(pair for group in groups for pair in group)


def _make_parents(storage: Storage, path: str, made: set[str]) -> None:
    parent = path.rpartition("/")[0]
    if parent not in made:
        _make_parents(storage, parent, made)
        storage.make_dir(parent)
        made.add(parent)
