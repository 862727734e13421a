"""A step laid out anew: whole leaves, one file an item, as other tools read them; streamed.

No more than one leaf is in memory, or one batch of small ones. The step keeps its number, tree, values and metrics; it
is another attempt, and says in its record which one it is from.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from safepoint.formats.base import WriteJob
from safepoint.formats.layout import LAYOUT_VERSION
from safepoint.formats.manifest import display_path
from safepoint.formats.reading import verify_file
from safepoint.formats.region import Region, check_tiling
from safepoint.formats.registry import get_format
from safepoint.manager.directing import Direction
from safepoint.manager.errors import IncompleteCoverageError
from safepoint.manager.leaf_reading import read_parts, whole_spec
from safepoint.manager.manifesting import assemble_manifest, check_written
from safepoint.manager.owning import check_absent, owned_root
from safepoint.manager.planner import WriteAssignment
from safepoint.manager.progress import QUIET
from safepoint.manager.remembering import Memo
from safepoint.manager.writing import plan_files, write_files

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import torch

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.manifest import Manifest, TreePath
    from safepoint.manager.owning import OwnedRoot
    from safepoint.manager.progress import Progress
    from safepoint.manager.sources import PlannedPiece
    from safepoint.manager.step_paths import OpenStep

__all__ = ["consolidate_step"]

FORMAT = "safetensors"


def consolidate_step(
    step: OpenStep, destination: str | os.PathLike[str], *, progress: Progress = QUIET
) -> CommitRecord:
    """Write a step in consolidated mode to another root; return its record there.

    What was written is read back and compared with what was meant, before the step is committed. A failure leaves
    nothing behind.

    Args:
        step: any step, in any mode.
        destination: a root, made if need be.
        progress: told of the bytes written, then of those read back.

    Raises:
        StepExistsError: the root has a step of this number.
        IncompleteCoverageError: the step is one process's part of one, so that nobody has whole leaves here.
        CorruptDataError: the step is damaged, or what was written came back as something else.
        RootInUseError: a manager owns the root.
        StorageError: the root cannot be written to.
    """
    _check_whole(step.manifest)
    with owned_root(destination) as owned:
        committer = owned.committer()
        check_absent(committer, step.committed.record)
        attempt = secrets.token_hex(8)
        prefix = committer.begin(step.step, attempt)
        try:
            manifest = _write(step, owned, prefix, attempt, progress)
            progress.begin("read back", sum(file.num_bytes for file in manifest.files))
            for file in manifest.files:
                verify_file(owned.storage, prefix, file, progress=progress.advance)
            return _commit(step, owned, manifest)
        except BaseException:
            committer.abandon(step.step, attempt)
            raise


def _check_whole(manifest: Manifest) -> None:
    """Refuse a part of a step; that of several processes is whole by itself where each leaf is."""
    if not manifest.partial:
        return
    for entry in manifest.leaves:
        try:
            check_tiling(entry.shape, (shard.region for shard in entry.shards), leaf=display_path(entry.path))
        except IncompleteCoverageError as error:
            error.hint = "Each process saved to a root of its own, and this is one of them: restore from all of them."
            raise error.with_context(step=manifest.step) from None


def _write(step: OpenStep, owned: OwnedRoot, prefix: str, attempt: str, progress: Progress) -> Manifest:
    manifest = step.manifest
    specs = {entry.path: whole_spec(entry) for entry in manifest.leaves}
    files = plan_files(
        [WriteAssignment(path, Region.whole(spec.shape), 0, 0) for path, spec in specs.items()],
        specs,
        file_format=get_format(FORMAT),
        job=WriteJob(mode="consolidated", process_index=0, process_count=1),
    )
    progress.begin("write", sum(piece.num_bytes for file in files for piece in file.pieces))
    source = _StepSource(step, progress)
    report = write_files(owned.storage, prefix, files, source, process_index=0, attempt=attempt)
    direction = Direction(attempt=attempt, mode="consolidated")
    written = assemble_manifest(
        [report], specs, manifest.structure, direction=direction, step=step.step, file_format=FORMAT, memo=Memo()
    )
    check_written(owned.storage, prefix, written.files)
    return replace(written, process_count=manifest.process_count)


def _commit(step: OpenStep, owned: OwnedRoot, manifest: Manifest) -> CommitRecord:
    committer = owned.committer()
    old = step.committed.record
    owned.owner.verify()
    num_bytes, digest = committer.write_manifest(step.step, manifest.attempt, manifest)
    record = replace(
        old,
        version=LAYOUT_VERSION,
        sequence=committer.next_sequence(),
        attempt=manifest.attempt,
        run=secrets.token_hex(8),
        parent=old.attempt,
        mode=manifest.mode,
        format=manifest.format,
        num_bytes=sum(file.num_bytes for file in manifest.files),
        num_leaves=len(manifest.leaves),
        process_count=manifest.process_count,
        scope="shared",
        process_index=None,
        manifest_bytes=num_bytes,
        manifest_digest=digest,
        timings={},
        extra={**old.extra, "consolidated_from": old.attempt},
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        linked_bytes=manifest.linked_bytes,
    )
    committer.publish(record)
    return record


class _StepSource:
    """The leaves of a step, read batch by batch as the writer announces them."""

    def __init__(self, step: OpenStep, progress: Progress) -> None:
        self._step = step
        self._progress = progress
        self._entries = {entry.path: entry for entry in step.manifest.leaves}
        self._read: dict[TreePath, torch.Tensor] = {}

    def prepare(self, pieces: Sequence[PlannedPiece]) -> None:
        """Read all of them."""
        parts = [(self._entries[piece.path], piece.region) for piece in pieces]
        tensors = read_parts(self._step, parts)
        self._read = {piece.path: tensor for piece, tensor in zip(pieces, tensors, strict=True)}

    def load(self, piece: PlannedPiece) -> torch.Tensor:
        """Return what was read, and let it go."""
        self._progress.advance(piece.num_bytes)
        return self._read.pop(piece.path)
