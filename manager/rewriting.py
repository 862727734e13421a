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
from safepoint.formats.layout import LAYOUT_VERSION, Mode
from safepoint.formats.region import Region
from safepoint.formats.registry import get_format
from safepoint.formats.storage import open_storage
from safepoint.manager.concluding import concluding_files
from safepoint.manager.directing import Direction
from safepoint.manager.done_files import DoneFiles
from safepoint.manager.errors import CheckpointError, InvalidArgumentError, StorageError
from safepoint.manager.file_sizes import sizes_of
from safepoint.manager.leaf_digests import LeafDigests, LeafPart, check_leaves
from safepoint.manager.manifesting import assemble_manifest, check_written
from safepoint.manager.outline import outline_state
from safepoint.manager.owning import begin_or_resume, check_absent, owned_root
from safepoint.manager.planner import WriteAssignment
from safepoint.manager.progress import QUIET
from safepoint.manager.remembering import Memo
from safepoint.manager.sources import byte_view
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
        storage = open_storage(destination)
        reader = StepReader(storage)
        for known in reader.list_steps():
            if (known.record.step, known.record.attempt) == (self.step, self.attempt):
                return _rewritten(known.record, reader.load_manifest(known), "present")
        self.opened.check_complete()
        if self.format != "safetensors":
            self.opened.check_whole_arrays()
        job = replace(self._job(), part_bytes=storage.part_bytes)
        files = plan_files(
            [WriteAssignment(path, Region.whole(spec.shape), 0, 0) for path, spec in self._specs.items()],
            self._specs,
            file_format=get_format(self.format),
            job=job,
        )
        with owned_root(destination, spare=[self.attempt]) as owned:
            return self._commit(owned, files, job, progress)

    def _commit(self, owned: OwnedRoot, files: Sequence[PlannedFile], job: WriteJob, progress: Progress) -> Rewritten:
        committer = owned.committer()
        check_absent(committer, self.step)
        prefix, begun = begin_or_resume(committer, self.step, self.attempt)
        try:
            with DoneFiles(owned.storage, f"{prefix}/{DONE_NAME}") as done:
                reports, digests = self._write(owned.storage, prefix, files, done, progress)
                ends = concluding_files(get_format(self.format), reports, job)
                reports += [self._write_file(owned.storage, prefix, file, _Source(self.opened, QUIET)) for file in ends]
                record = self._record(owned, self._manifest(reports))
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

    def _job(self) -> WriteJob:
        file_format = get_format(self.format)
        leaves = [
            LeafParts(path=path, dtype=spec.dtype, shape=spec.shape, regions=(Region.whole(spec.shape),))
            for path, spec in self._specs.items()
        ]

        def outline() -> dict[str, Any]:
            return outline_state(self.opened.state.nodes)

        return WriteJob(
            mode=self.mode,
            process_index=0,
            process_count=1,
            notes=file_format.arrange(leaves, outline),
            leaves=leaves,
            outline=outline,
            metrics=self.opened.metrics,
            time_nsecs=time.time_ns(),
        )

    @property
    def _specs(self) -> Mapping[TreePath, ArraySpec]:
        return {path: leaf.spec for path, leaf in self.opened.state.arrays.items()}

    def _write(
        self, storage: Storage, prefix: str, files: Sequence[PlannedFile], done: DoneFiles, progress: Progress
    ) -> tuple[list[WriteReport], LeafDigests]:
        """Write the files that are not done; return what was written of each, and what the leaves have to be."""
        source = _Source(self.opened, progress)
        progress.begin("write", sum(map(_data_bytes, files)))
        reports: list[WriteReport] = []
        digests: LeafDigests = {}
        for file in files:
            parts = [(piece.path, piece.region) for piece in file.pieces]
            note = _read_note(done.get(file.path), file)
            if note is not None and sizes_of(storage, prefix, note[0].files) == [
                one.num_bytes for one in note[0].files
            ]:
                report, found = note
                progress.advance(_data_bytes(file))
            else:
                report = self._write_file(storage, prefix, file, source)
                found = [source.digests[part] for part in parts]
                source.digests.clear()
                done.add(file.path, {"report": report.to_json(), "leaves": found})
            reports.append(report)
            digests.update(zip(parts, found, strict=True))
        return reports, digests

    def _write_file(self, storage: Storage, prefix: str, file: PlannedFile, source: _Source) -> WriteReport:
        _remove(storage, f"{prefix}/{file.path}", is_start=file.layout.codec is not None)
        return write_files(storage, prefix, [file], source, process_index=0, attempt=self.attempt)

    def _manifest(self, reports: Sequence[WriteReport]) -> Manifest:
        manifest = assemble_manifest(
            reports,
            self._specs,
            self.opened.state.nodes,
            direction=Direction(attempt=self.attempt, mode=self.mode),
            step=self.step,
            file_format=self.format,
            memo=Memo(),
        )
        own = self.opened.own
        return replace(manifest, process_count=1 if own is None else own.manifest.process_count)

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


def _remove(storage: Storage, path: str, *, is_start: bool) -> None:
    """Remove what an earlier attempt at a file left: the file, or all whose names begin so."""
    folder, _, name = path.rpartition("/")
    for entry in storage.list(folder):
        if entry.name == name or (is_start and entry.name.startswith(name)):
            storage.delete_tree(f"{folder}/{entry.name}")


def _read_note(note: Any, file: PlannedFile) -> tuple[WriteReport, list[str]] | None:
    """Return what was noted of a file; None where nothing was, or by a version that noted something else."""
    try:
        report, digests = WriteReport.from_json(note["report"]), list(note["leaves"])
    except (KeyError, TypeError, ValueError):
        return None
    return (report, digests) if len(digests) == len(file.pieces) else None


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
