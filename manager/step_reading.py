"""Looking at the steps of a root: which are there, what their manifests say, whether their files are all there.

Reads only, so it needs no ownership and works on a read-only root. What it finds may be deleted a moment later by the
root's owner; that is told from damage and reported as such.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from safepoint.formats.checksum import digest
from safepoint.formats.commit_record import COMMIT_MAX_BYTES, CommitRecord
from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME
from safepoint.formats.manifest import Manifest
from safepoint.formats.tombstone import parse_slot
from safepoint.manager import pins
from safepoint.manager.collecting import paused_collection
from safepoint.manager.errors import CheckpointError, CorruptDataError, StepNotFoundError, StorageError
from safepoint.manager.file_sizes import sizes_of
from safepoint.manager.step_listing import CommittedStep, Listing, RecordCache, StepProblem, read_listing
from safepoint.manager.structure_check import check_structure

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage

__all__ = ["StepReader", "attempt_at", "step_at"]


class StepReader:
    """The committed steps of one root; may be used by several threads."""

    def __init__(self, storage: Storage, *, private_to: int | None = None) -> None:
        """Remember the root.

        Args:
            storage: of the root.
            private_to: the process whose root this is, where processes have roots of their own; else None.
        """
        self._storage = storage
        self._cache = RecordCache()
        self._private_to = private_to

    def listing(self) -> Listing:
        """Return one look at the root: steps, problems and the next sequence that belong together."""
        with paused_collection():
            return read_listing(self._storage, self._cache, process_index=self._private_to)

    def listing_of(self, step: int) -> Listing:
        """Return one look at what has the name of one step, which reads no record of others."""
        return read_listing(self._storage, self._cache, process_index=self._private_to, only=step)

    def list_steps(self) -> list[CommittedStep]:
        """Return the committed steps, ascending by sequence: the last one is the latest."""
        return list(self.listing().steps)

    def latest_step(self) -> int | None:
        """Return the step committed last, None if there is none."""
        steps = self.listing().steps
        return steps[-1].record.step if steps else None

    def problems(self) -> list[StepProblem]:
        """Return what has the name and a record of a step and yet is none, ascending by step."""
        return list(self.listing().problems)

    def next_sequence(self) -> int:
        """Return the sequence for a commit made now: one above the highest in the root."""
        return self.listing().next_sequence

    def pinned_attempts(self) -> frozenset[str]:
        """Return the attempts of the committed steps that somebody pinned."""
        pinned = pins.pinned_steps(self._storage)
        if not pinned:
            return frozenset()
        return frozenset(step.record.attempt for step in self.list_steps() if step.record.step in pinned)

    def manifest_bytes(self, step: CommittedStep) -> bytes:
        """Return the content of the manifest that the commit record names.

        Raises:
            StepNotFoundError: the step was deleted since it was listed.
            CorruptDataError: the manifest is missing, or not the one that was committed.
        """
        record = step.record
        path = f"{step.files_prefix}/{MANIFEST_NAME}"
        full_path = self._storage.describe(path)
        try:
            data = self._storage.get(path, max_bytes=record.manifest_bytes)
        except StorageError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                raise error.with_context(step=record.step) from None
            self._check_present(step)
            raise CorruptDataError("the manifest is missing", step=record.step, path=full_path) from error
        except CorruptDataError as error:
            raise error.with_context(step=record.step) from None
        if len(data) != record.manifest_bytes or digest(data) != record.manifest_digest:
            raise CorruptDataError(
                "the manifest is not the one that was committed: its size or digest differs",
                step=record.step,
                path=full_path,
                hint="Restore another step; `safepoint verify` shows which are sound.",
            )
        return data

    def load_manifest(self, step: CommittedStep) -> Manifest:
        """Return the manifest that the commit record names.

        Raises:
            StepNotFoundError: the step was deleted since it was listed.
            CorruptDataError: the manifest is missing, not the one that was committed, or malformed.
        """
        data = self.manifest_bytes(step)
        record = step.record
        full_path = self._storage.describe(f"{step.files_prefix}/{MANIFEST_NAME}")
        try:
            with paused_collection():
                manifest = Manifest.from_bytes(data, path=full_path)
                check_structure(manifest, path=full_path)
        except CheckpointError as error:
            raise error.with_context(step=record.step) from None
        if (manifest.step, manifest.attempt) != (record.step, record.attempt):
            raise CorruptDataError(
                f"the manifest is that of step {manifest.step}, attempt {manifest.attempt}",
                step=record.step,
                path=full_path,
            )
        return manifest

    def check_files(self, step: CommittedStep, manifest: Manifest) -> None:
        """Check that every file of the step is there at its exact size. Reads none of them.

        Raises:
            StepNotFoundError: the step was deleted since it was listed.
            CorruptDataError: a file is missing, of another size, or something else than a file; names the first one.
        """
        faults: list[tuple[str, str]] = []
        sizes = sizes_of(self._storage, step.files_prefix, manifest.files)
        for file, size in zip(manifest.files, sizes, strict=True):
            path = f"{step.files_prefix}/{file.path}"
            if isinstance(size, CorruptDataError):
                faults.append((path, size.message))
            elif size is None:
                faults.append((path, "the file is missing"))
            elif size != file.num_bytes:
                faults.append((path, f"the file has {size:,} bytes where {file.num_bytes:,} were committed"))
        if not faults:
            return
        self._check_present(step)
        path, message = faults[0]
        more = f" (and {len(faults) - 1} more files are wrong)" if len(faults) > 1 else ""
        raise CorruptDataError(f"{message}{more}", step=step.record.step, path=self._storage.describe(path))

    def _check_present(self, step: CommittedStep) -> None:
        """Tell a step that was deleted meanwhile from one that is damaged."""
        if attempt_at(self._storage, step.prefix) == step.record.attempt:
            return
        steps = sorted(other.record.step for other in self.list_steps())
        raise StepNotFoundError(
            "the step was deleted or replaced while it was being read",
            step=step.record.step,
            path=self._storage.describe(step.prefix),
            available=tuple(steps),
            hint="List the steps again; pin a step to keep it.",
        )


def attempt_at(storage: Storage, prefix: str) -> str | None:
    """Return the attempt whose valid record is in this directory now, None when there is none."""
    found = step_at(storage, prefix)
    return None if found is None else found.record.attempt


def step_at(storage: Storage, prefix: str) -> CommittedStep | None:
    """Return the step whose valid record is in this directory now, None when there is none."""
    path = f"{prefix}/{COMMIT_NAME}"
    try:
        found = parse_slot(storage.get(path, max_bytes=COMMIT_MAX_BYTES), path=path)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    except CheckpointError:
        return None
    return CommittedStep(found, prefix) if isinstance(found, CommitRecord) else None
