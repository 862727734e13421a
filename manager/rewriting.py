"""A checkpoint that can be read, of any kind, as a step of a root in any format: streamed, resumed, and read back.

No more than one leaf is in memory, or one batch of small ones. The attempt's name follows from what is converted, so
that whoever starts the same work again finds what was done; files that are whole are not written again. What was read
is digested leaf by leaf, and compared with what the written files give back before the step is committed.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from safepoint.formats.base import LeafParts, WriteJob
from safepoint.formats.checksum import digest
from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.entries import FileEntry
from safepoint.formats.layout import LAYOUT_VERSION, Mode
from safepoint.formats.region import Region
from safepoint.formats.registry import get_format
from safepoint.formats.storage import LocalStorage
from safepoint.manager.directing import Direction
from safepoint.manager.done_files import DoneFiles
from safepoint.manager.errors import CheckpointError, InvalidArgumentError, StorageError
from safepoint.manager.leaf_digests import LeafDigests, LeafPart, check_leaves
from safepoint.manager.manifesting import assemble_manifest, check_written
from safepoint.manager.outline import outline_state
from safepoint.manager.owning import begin_or_resume, check_absent, owned_root
from safepoint.manager.planner import WriteAssignment
from safepoint.manager.remembering import Memo
from safepoint.manager.sources import batches, byte_view
from safepoint.manager.step_listing import CommittedStep
from safepoint.manager.step_paths import OpenStep
from safepoint.manager.step_reading import StepReader
from safepoint.manager.writing import WriteReport, plan_files, write_files

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import torch

    from safepoint.formats.manifest import Manifest, TreePath
    from safepoint.formats.storage import Storage
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.file_bytes import PlannedFile
    from safepoint.manager.opened import Opened
    from safepoint.manager.options import RequestedMode
    from safepoint.manager.owning import OwnedRoot
    from safepoint.manager.progress import Progress
    from safepoint.manager.sources import PlannedPiece

__all__ = ["DONE_NAME", "Outcome", "Rewriting", "Rewritten", "chosen_mode"]

DONE_NAME = "converting.json"
"""What is done of an attempt that was interrupted; not in a step."""

BATCH_BYTES = 64 << 20
"""How much is written between two notes of what is done."""

Outcome = Literal["written", "resumed", "present"]


def chosen_mode(format: str, mode: RequestedMode) -> Mode:  # noqa: A002 - the field's word for it
    """Return the mode in which one process writes a format.

    Raises:
        InvalidArgumentError: there is no such format, or it does not have the mode.
    """
    modes = get_format(format).modes
    if mode == "auto":
        return "consolidated" if "consolidated" in modes else modes[0]
    if mode not in modes:
        raise InvalidArgumentError(f"the format {format} has no mode {mode!r}", hint=f"Modes: {', '.join(modes)}.")
    return mode


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """A step that is in the other root now.

    Attributes:
        record: of the step there.
        files: their names in the step.
        outcome: "written" from the start, "resumed" where somebody had begun it, "present" where it was done already.
    """

    record: CommitRecord
    files: tuple[str, ...]
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Rewriting:
    """One checkpoint on its way to be a step.

    Attributes:
        opened: where it is read.
        step: number of the new step.
        format: of its files.
        mode: of its files.
        extra: for the new record.
    """

    opened: Opened
    step: int
    format: str
    mode: Mode
    extra: Mapping[str, Any]

    @property
    def attempt(self) -> str:
        """The attempt: the same for the same content, written the same way."""
        return digest(repr((self.opened.identity, self.step, self.format, self.mode, LAYOUT_VERSION)).encode())

    def run(self, destination: str | os.PathLike[str], progress: Progress) -> Rewritten:
        """Write the step to a root, made if need be, unless it is there.

        Raises:
            StepExistsError: the root has another step of this number.
            CorruptDataError: the source is damaged, or what was written came back as something else; nothing is left.
            UnsupportedValueError: the format cannot hold something in it; names it.
            RootInUseError: a manager owns the root.
            StorageError: the root cannot be written to. What is done stays for the next try; the root's next owner
                removes it otherwise.
        """
        reader = StepReader(LocalStorage(destination))
        for known in reader.list_steps():
            if (known.record.step, known.record.attempt) == (self.step, self.attempt):
                return _rewritten(known.record, reader.load_manifest(known), "present")
        self.opened.check_complete()
        if self.format != "safetensors":
            self.opened.check_whole_arrays()
        files = self._plan()
        with owned_root(destination, spare=[self.attempt]) as owned:
            return self._commit(owned, files, progress)

    def _commit(self, owned: OwnedRoot, files: Sequence[PlannedFile], progress: Progress) -> Rewritten:
        committer = owned.committer()
        check_absent(committer, self.step)
        prefix, begun = begin_or_resume(committer, self.step, self.attempt)
        try:
            with DoneFiles(owned.storage, f"{prefix}/{DONE_NAME}") as done:
                entries, digests = self._write(owned.storage, prefix, files, done, progress)
                record = self._record(owned, self._manifest(entries, files))
                written = _read_step(owned, record, prefix)
                check_leaves(written, digests, progress)
                done.remove()
            owned.owner.verify()
            committer.publish(record)
        except StorageError:
            raise
        except CheckpointError:
            committer.abandon(self.step, self.attempt)
            raise
        return _rewritten(record, written.manifest, "resumed" if begun else "written")

    def _plan(self) -> list[PlannedFile]:
        specs = self._specs
        file_format = get_format(self.format)
        leaves = [
            LeafParts(path=path, dtype=spec.dtype, shape=spec.shape, regions=(Region.whole(spec.shape),))
            for path, spec in specs.items()
        ]

        def outline() -> dict[str, Any]:
            return outline_state(self.opened.state.nodes)

        return plan_files(
            [WriteAssignment(path, Region.whole(spec.shape), 0, 0) for path, spec in specs.items()],
            specs,
            file_format=file_format,
            job=WriteJob(
                mode=self.mode,
                process_index=0,
                process_count=1,
                notes=file_format.arrange(leaves, outline),
                leaves=leaves,
                outline=outline,
                metrics=self.opened.metrics,
                time_nsecs=time.time_ns(),
            ),
        )

    @property
    def _specs(self) -> Mapping[TreePath, ArraySpec]:
        return {path: leaf.spec for path, leaf in self.opened.state.arrays.items()}

    def _write(
        self, storage: Storage, prefix: str, files: Sequence[PlannedFile], done: DoneFiles, progress: Progress
    ) -> tuple[dict[str, FileEntry], LeafDigests]:
        """Write the files that are not done; return what the manifest says of all, and what their leaves have to be."""
        source = _Source(self.opened, progress)
        progress.begin("write", sum(map(_data_bytes, files)))
        entries: dict[str, FileEntry] = {}
        digests: LeafDigests = {}
        missing = []
        for file in files:
            note = _read_note(done.get(file.path), file)
            if note is None or storage.size(f"{prefix}/{file.path}") != file.layout.num_bytes:
                missing.append(file)
                continue
            entries[file.path], found = note
            digests.update(zip(_parts_of(file), found, strict=True))
            progress.advance(_data_bytes(file))
        for batch in batches(missing, lambda file: file.layout.num_bytes, BATCH_BYTES):
            for file in batch:
                storage.delete_tree(f"{prefix}/{file.path}")
            report = write_files(storage, prefix, batch, source, process_index=0, attempt=self.attempt)
            for file, entry in zip(batch, report.files, strict=True):
                entries[file.path] = entry
                done.add(file.path, _note(entry, [source.digests[part] for part in _parts_of(file)]))
            digests.update(source.digests)
            source.digests.clear()
        return entries, digests

    def _manifest(self, entries: Mapping[str, FileEntry], files: Sequence[PlannedFile]) -> Manifest:
        report = WriteReport(
            files=tuple(entries[file.path] for file in files),
            shards=tuple(shard for file in files for shard in file.shards),
        )
        manifest = assemble_manifest(
            [report],
            self._specs,
            self.opened.state.nodes,
            direction=Direction(attempt=self.attempt, mode=self.mode),
            step=self.step,
            file_format=self.format,
            memo=Memo(),
        )
        own = self.opened.own
        return manifest if own is None else replace(manifest, process_count=own.manifest.process_count)

    def _record(self, owned: OwnedRoot, manifest: Manifest) -> CommitRecord:
        """Write the manifest, and return the record that is to be published."""
        committer = owned.committer()
        num_bytes, manifest_digest = committer.write_manifest(self.step, self.attempt, manifest)
        own = self.opened.own
        return CommitRecord(
            step=self.step,
            sequence=committer.next_sequence(),
            attempt=self.attempt,
            run=secrets.token_hex(8),
            parent=None if own is None else own.committed.record.attempt,
            mode=self.mode,
            format=self.format,
            metrics=self.opened.metrics,
            num_bytes=sum(file.num_bytes for file in manifest.files),
            num_leaves=len(manifest.leaves),
            process_count=manifest.process_count,
            manifest_bytes=num_bytes,
            manifest_digest=manifest_digest,
            extra={**({} if own is None else own.committed.record.extra), **self.extra},
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )


def _rewritten(record: CommitRecord, manifest: Manifest, outcome: Outcome) -> Rewritten:
    return Rewritten(record=record, files=tuple(file.path for file in manifest.files), outcome=outcome)


def _read_step(owned: OwnedRoot, record: CommitRecord, prefix: str) -> OpenStep:
    """Return the attempt as a step, by what its manifest says on disk."""
    committed = CommittedStep(record, prefix)
    committer = owned.committer()
    manifest = committer.load_manifest(committed)
    check_written(owned.storage, prefix, manifest.files)
    return OpenStep(storage=owned.storage, committed=committed, manifest=manifest)


def _data_bytes(file: PlannedFile) -> int:
    return sum(piece.num_bytes for piece in file.pieces)


def _parts_of(file: PlannedFile) -> list[LeafPart]:
    return [(piece.path, piece.region) for piece in file.pieces]


def _note(entry: FileEntry, digests: list[str]) -> dict[str, Any]:
    return {
        "num_bytes": entry.num_bytes,
        "block_bytes": entry.block_bytes,
        "digests": list(entry.digests),
        "attempt": entry.attempt,
        "leaves": digests,
    }


def _read_note(note: Any, file: PlannedFile) -> tuple[FileEntry, list[str]] | None:
    """Return what was noted of a file; None where nothing was, or it is of another plan."""
    if note is None or len(note["leaves"]) != len(file.pieces) or note["num_bytes"] != file.layout.num_bytes:
        return None
    entry = FileEntry(
        path=file.path,
        num_bytes=note["num_bytes"],
        block_bytes=note["block_bytes"],
        digests=tuple(note["digests"]),
        process_index=0,
        attempt=note["attempt"],
    )
    return entry, note["leaves"]


class _Source:
    """The leaves of the checkpoint, read batch by batch as the writer announces them, and digested."""

    def __init__(self, opened: Opened, progress: Progress) -> None:
        self._opened = opened
        self._progress = progress
        self._read: dict[LeafPart, torch.Tensor] = {}
        self.digests: LeafDigests = {}

    def prepare(self, pieces: Sequence[PlannedPiece]) -> None:
        """Read all of them."""
        self._read = {}
        parts = list(dict.fromkeys((piece.path, piece.region) for piece in pieces))
        self._read = dict(zip(parts, self._opened.read(parts), strict=True))

    def load(self, piece: PlannedPiece) -> torch.Tensor:
        """Return what was read."""
        part = piece.path, piece.region
        tensor = self._read[part]
        self.digests[part] = digest(byte_view(tensor))
        self._progress.advance(piece.num_bytes)
        return tensor
