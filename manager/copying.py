"""Steps from one root to another, byte for byte, verified on the way and read back; goes on where it was interrupted.

A copy is the same attempt: its files and manifest are those of the original. It becomes a step by the commit protocol,
so whoever looks at the other root sees whole steps only. What the manifest does not name is not copied.

Where the other root holds nothing but steps of this one, copies keep their place in the order of commits. Elsewhere
they come after what is there, in their own order.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from safepoint.formats.layout import MANIFEST_NAME
from safepoint.formats.reading import read_blocks, verify_file
from safepoint.manager.errors import CheckpointError, CorruptDataError, StepNotFoundError, StorageError
from safepoint.manager.owning import begin_or_resume, check_absent, owned_root
from safepoint.manager.progress import QUIET
from safepoint.manager.step_reading import StepReader, attempt_at, step_at

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.storage import Storage
    from safepoint.manager.owning import OwnedRoot
    from safepoint.manager.progress import Progress
    from safepoint.manager.step_listing import CommittedStep

__all__ = ["CopyResult", "copy_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyResult:
    """What was copied.

    Attributes:
        copied: steps committed in the other root now, in the order of their commits.
        present: steps that were there already, the same attempts.
        resumed: those of the copied ones that an earlier copy had begun.
        num_bytes: of data written.
        errors: what is wrong with steps that could not be copied.
    """

    copied: tuple[int, ...]
    present: tuple[int, ...]
    resumed: tuple[int, ...]
    num_bytes: int
    errors: tuple[CheckpointError, ...]


def copy_steps(
    source: Storage,
    destination: str | os.PathLike[str],
    *,
    step: int | None = None,
    progress: Progress = QUIET,
) -> CopyResult:
    """Copy one step, or all, to another root.

    Args:
        source: of the root that is copied from; only read.
        destination: a root, made if need be.
        step: the step; None for all that are committed.
        progress: told of the bytes copied and read back.

    Returns:
        What was done. A damaged step does not stop the others; nothing of it is left in the other root.

    Raises:
        StepNotFoundError: the step asked for is not committed.
        StepExistsError: the other root has another step of such a number; nothing was copied.
        RootInUseError: a manager owns the other root.
        StorageError: the other root cannot be written to, or is too small. What was copied of a step stays there for
            the next try; the other root's next owner removes it otherwise.
    """
    reader = StepReader(source)
    listing = reader.listing()
    chosen = [known for known in listing.steps if step in (None, known.record.step)]
    errors = [problem.error for problem in listing.problems if step in (None, problem.step)]
    if step is not None and not chosen and not errors:
        available = tuple(sorted(known.record.step for known in listing.steps))
        raise StepNotFoundError(f"step {step} is not committed here", step=step, available=available)
    with owned_root(destination, spare={known.record.attempt for known in chosen}) as owned:
        copier = _Copier(reader, source, owned, progress)
        return copier.run(chosen, errors, {known.record.attempt for known in listing.steps})


FileKey = tuple[str, tuple[str, ...], int]


def _key(file: FileEntry) -> FileKey:
    """Return what is the same for all names of one file: who wrote it, and what."""
    return file.attempt, file.digests, file.num_bytes


class _Copier:
    def __init__(self, reader: StepReader, source: Storage, owned: OwnedRoot, progress: Progress) -> None:
        self._reader = reader
        self._source = source
        self._owned = owned
        self._progress = progress
        self._num_bytes = 0
        self._there: dict[FileKey, tuple[str, str]] = {}
        """Files in the other root that are known to be sound: where each lies."""

    def run(self, chosen: Sequence[CommittedStep], errors: list[CheckpointError], known: set[str]) -> CopyResult:
        others = self._owned.committer().list_steps()
        there = {other.record.attempt for other in others}
        present = [step.record.step for step in chosen if step.record.attempt in there]
        missing = [step for step in chosen if step.record.attempt not in there]
        for step in missing:
            check_absent(self._owned.committer(), step.record.step)
        self._check_space(missing)
        self._find_present(missing, [other for other in others if other.record.attempt in known])
        self._progress.begin("copy", 2 * sum(step.record.num_bytes for step in missing))
        copied: list[int] = []
        resumed: list[int] = []
        for step in missing:
            try:
                if self._copy(step, keep_sequence=there <= known):
                    resumed.append(step.record.step)
            except CorruptDataError as error:
                errors.append(error.with_context(step=step.record.step))
            except (StorageError, StepNotFoundError) as error:
                errors.append(self._vanished(step, error))
            else:
                copied.append(step.record.step)
        return CopyResult(
            copied=tuple(copied),
            present=tuple(present),
            resumed=tuple(resumed),
            num_bytes=self._num_bytes,
            errors=tuple(errors),
        )

    def _vanished(self, step: CommittedStep, error: CheckpointError) -> CheckpointError:
        """Return the error of a step that its owner deleted meanwhile; raise any other failure."""
        record = step.record
        if attempt_at(self._source, step.prefix) == record.attempt:
            raise error.with_context(step=record.step)
        self._owned.committer().abandon(record.step, record.attempt)
        return StepNotFoundError(
            "the step was deleted while it was being copied", step=record.step, hint="Pin a step to keep it."
        )

    def _check_space(self, steps: Sequence[CommittedStep]) -> None:
        storage = self._owned.storage
        free = storage.free_bytes()
        committer = self._owned.committer()
        prefixes = (committer.prefix_of(step.record.step, step.record.attempt) for step in steps)
        begun = sum(size for prefix in prefixes for size in _sizes_below(storage, prefix))
        needed = sum(step.record.num_bytes + step.record.manifest_bytes for step in steps) - begun - self._shared(steps)
        if free is not None and needed > free:
            raise StorageError(
                f"the steps need {needed:,} bytes and {free:,} are free",
                path=storage.location,
                outcome="not_committed",
                hint="Free some space, or copy single steps. Nothing was copied.",
            )

    def _shared(self, steps: Sequence[CommittedStep]) -> int:
        """Return how many bytes of these steps are files that one before it has, too."""
        keys = [(_key(file), file.num_bytes) for file in self._files(self._reader, steps)]
        return sum(size for _, size in keys) - sum(dict(keys).values())

    def _find_present(self, steps: Sequence[CommittedStep], present: Sequence[CommittedStep]) -> None:
        """Note where files that these steps have lie in the other root already, and are sound."""
        wanted = {_key(file) for file in self._files(self._reader, steps)}
        reader = StepReader(self._owned.storage)
        for step in present if wanted else ():
            for file in self._files(reader, [step], always=True):
                key = _key(file)
                if key in wanted and key not in self._there and self._is_there(file, step.files_prefix):
                    self._there[key] = step.files_prefix, file.path

    @staticmethod
    def _files(reader: StepReader, steps: Sequence[CommittedStep], *, always: bool = False) -> Iterator[FileEntry]:
        """Yield the files of all steps, if any of them has files of others."""
        for step in steps if always or any(step.record.linked_bytes for step in steps) else ():
            with suppress(CorruptDataError, StepNotFoundError):  # told when it is to be copied
                yield from reader.load_manifest(step).files

    def _copy(self, step: CommittedStep, *, keep_sequence: bool) -> bool:
        """Copy one step; say whether an earlier copy had begun it."""
        record = step.record
        committer = self._owned.committer(scope=record.scope, process_index=record.process_index)
        manifest = self._reader.load_manifest(step)
        prefix, begun = begin_or_resume(committer, record.step, record.attempt)
        try:
            for directory in _directories(prefix, manifest.files):
                self._owned.storage.make_dir(directory)
            for file in manifest.files:
                self._copy_file(step, file, prefix)
        except CorruptDataError:
            committer.abandon(record.step, record.attempt)
            raise
        for directory in reversed(_directories(prefix, manifest.files)):
            self._owned.storage.sync_dir(directory)
        self._owned.storage.put(f"{prefix}/{MANIFEST_NAME}", self._reader.manifest_bytes(step))
        self._owned.owner.verify()
        sequence = record.sequence if keep_sequence else committer.next_sequence()
        committer.publish(replace(record, sequence=sequence))
        done = step_at(self._owned.storage, str(record.step))
        if done is not None:
            for file in manifest.files:
                self._there.setdefault(_key(file), (done.files_prefix, file.path))
        return begun

    def _copy_file(self, step: CommittedStep, file: FileEntry, prefix: str) -> None:
        target = self._owned.storage
        path = f"{prefix}/{file.path}"
        if self._is_there(file, prefix):
            self._progress.advance(2 * file.num_bytes)
            return
        target.delete_tree(path)
        if self._link(file, path):
            self._progress.advance(2 * file.num_bytes)
            return
        with target.open_writer(path, num_bytes=file.num_bytes, block_bytes=file.block_bytes) as writer:
            for block in read_blocks(self._source, step.files_prefix, file):
                writer.append(block)
                self._progress.advance(len(block))
            writer.finish()
        self._num_bytes += file.num_bytes
        verify_file(target, prefix, file, progress=self._progress.advance)

    def _link(self, file: FileEntry, path: str) -> bool:
        """Give a file that a step before has, too, a second name."""
        prefix, name = self._there.get(_key(file), ("", ""))
        try:
            return bool(prefix) and self._owned.storage.link_file(f"{prefix}/{name}", path)
        except CorruptDataError:  # something else is there by now
            return False

    def _is_there(self, file: FileEntry, prefix: str) -> bool:
        """Say whether an earlier copy wrote this file, all of it."""
        try:
            if self._owned.storage.size(f"{prefix}/{file.path}", expected=file.num_bytes) != file.num_bytes:
                return False
            verify_file(self._owned.storage, prefix, file)
        except CorruptDataError:
            return False
        return True


def _directories(prefix: str, files: Sequence[FileEntry]) -> list[str]:
    """Return the attempt's directory and all that its files need below it, parents first."""
    found = {prefix}
    for file in files:
        parts = file.path.split("/")[:-1]
        found |= {"/".join((prefix, *parts[: count + 1])) for count in range(len(parts))}
    return sorted(found)


def _sizes_below(storage: Storage, prefix: str) -> list[int]:
    sizes: list[int] = []
    for entry in storage.list(prefix):
        path = f"{prefix}/{entry.name}"
        sizes += _sizes_below(storage, path) if entry.is_dir else [storage.size(path) or 0]
    return sizes
