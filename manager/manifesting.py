"""From what the processes wrote to the manifest of the step, and the checks before a commit. Writes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.manifest import FileEntry, LeafEntry, Manifest, Node, ShardEntry, TreePath, display_path
from safepoint.formats.reading import read_segments
from safepoint.formats.region import Region, check_tiling
from safepoint.formats.segments import ReadSegment
from safepoint.manager.errors import CorruptDataError
from safepoint.manager.file_sizes import sizes_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.storage import Storage
    from safepoint.formats.tree import JSON
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.directing import Direction
    from safepoint.manager.remembering import Memo
    from safepoint.manager.session import Session
    from safepoint.manager.writing import WriteReport

__all__ = ["assemble_manifest", "check_written", "commit_record"]

_READ_BACK_BYTES = 64 << 20  # a few hundredths of a second, whatever the size of the step


def assemble_manifest(
    reports: Sequence[WriteReport],
    specs: Mapping[TreePath, ArraySpec],
    structure: Mapping[TreePath, Node],
    *,
    direction: Direction,
    step: int,
    file_format: str,
    memo: Memo[tuple[LeafEntry, ...]],
    process_count: int | None = None,
) -> Manifest:
    """Return the manifest of all reports together.

    Args:
        reports: one a process; or, for a root of one process's own, only that process's (`process_count` given).

    Raises:
        IncompleteCoverageError: the shards do not tile a leaf.
    """
    leaves = memo.get(
        (tuple(report.shards for report in reports), specs, process_count),
        lambda: _join(reports, specs, is_whole=process_count is None),
    )
    return Manifest(
        structure=structure,
        leaves=leaves,
        files=tuple(file for report in reports for file in report.files),
        process_count=len(reports) if process_count is None else process_count,
        format=file_format,
        mode=direction.mode,
        step=step,
        attempt=direction.attempt,
        partial=process_count is not None,
    )


def commit_record(
    manifest: Manifest,
    *,
    manifest_bytes: int,
    manifest_digest: str,
    session: Session,
    sequence: int,
    metrics: Mapping[str, float],
    timings: Mapping[str, float],
    extra: Mapping[str, JSON],
) -> CommitRecord:
    """Return the record that commits a manifest as it was written."""
    is_private = session.options.root_scope == "per_process"
    return CommitRecord(
        step=manifest.step,
        sequence=sequence,
        attempt=manifest.attempt,
        run=session.run,
        parent=session.parent,
        mode=manifest.mode,
        format=manifest.format,
        metrics=metrics,
        num_bytes=sum(file.num_bytes for file in manifest.files),
        num_leaves=len(manifest.leaves),
        process_count=manifest.process_count,
        scope=session.options.root_scope,
        process_index=session.coordinator.process_index if is_private else None,
        manifest_bytes=manifest_bytes,
        manifest_digest=manifest_digest,
        timings={name: round(secs, 6) for name, secs in timings.items()},
        extra=extra,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        linked_bytes=manifest.linked_bytes,
    )


def _join(
    reports: Sequence[WriteReport], specs: Mapping[TreePath, ArraySpec], *, is_whole: bool
) -> tuple[LeafEntry, ...]:
    shards: dict[TreePath, list[ShardEntry]] = {path: [] for path in specs}
    base = 0
    for report in reports:
        for path, entry in report.shards:
            shards[path].append(entry._replace(file=base + entry.file) if base else entry)
        base += len(report.files)
    leaves = tuple(
        LeafEntry(path=path, dtype=specs[path].dtype, shape=specs[path].shape, shards=tuple(held))
        for path, held in shards.items()
    )
    for leaf in leaves if is_whole else ():
        if len(leaf.shards) != 1 or leaf.shards[0].region != Region.whole(leaf.shape):
            check_tiling(leaf.shape, (shard.region for shard in leaf.shards), leaf=display_path(leaf.path))
    return leaves


def check_written(storage: Storage, prefix: str, files: Sequence[FileEntry]) -> None:
    """Check that this process sees the files of the attempt as they were written.

    Each at its full size, and the ends of as many as `_READ_BACK_BYTES` go round for, the shortest first, byte by byte.
    Linked ones were read before they were linked.

    Raises:
        CorruptDataError: a file is missing, cut short, or other than it was written; names it.
    """
    for file, found in zip(files, sizes_of(storage, prefix, files), strict=True):
        if isinstance(found, CorruptDataError):
            raise found
        if found != file.num_bytes:
            what = "is missing" if found is None else f"has {found} bytes"
            raise _unlike(storage, prefix, file, f"{what} instead of {file.num_bytes} bytes")
    budget = _READ_BACK_BYTES
    for file in sorted((file for file in files if not file.links), key=_last_bytes):
        budget -= _last_bytes(file)
        if budget < 0:
            break
        if file.num_bytes:
            end = ReadSegment(file=0, offset=file.num_bytes - 1, target=memoryview(bytearray(1)), leaf="")
            try:
                read_segments(storage, prefix, [file], [end], num_threads=1)
            except CorruptDataError as error:
                raise _unlike(storage, prefix, file, "does not read back as it was written") from error


def _last_bytes(file: FileEntry) -> int:
    return (file.num_bytes - 1) % file.block_bytes + 1 if file.num_bytes else 0


def _unlike(storage: Storage, prefix: str, file: FileEntry, what: str) -> CorruptDataError:
    return CorruptDataError(
        f"a file that process {file.process_index} wrote {what}",
        path=storage.describe(f"{prefix}/{file.path}"),
        process_index=file.process_index,
        hint="The processes may not see the same storage, or it is broken; nothing was committed.",
    )
