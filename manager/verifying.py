"""Reading all of a step to tell whether it is sound, file by file. Reads only; meets nobody.

A step that its owner deletes meanwhile is no problem: it is not one any more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME
from safepoint.formats.reading import verify_file
from safepoint.manager.errors import CheckpointError, CorruptDataError, StepNotFoundError
from safepoint.manager.progress import QUIET
from safepoint.manager.step_listing import is_attempt
from safepoint.manager.step_reading import StepReader, attempt_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.manifest import Manifest
    from safepoint.formats.storage import Storage
    from safepoint.manager.progress import Progress
    from safepoint.manager.step_listing import CommittedStep

__all__ = ["steps_to_verify", "verify_steps"]

_MAX_DEPTH = 64


def verify_steps(
    storage: Storage, *, step: int | None = None, private_to: int | None = None, progress: Progress = QUIET
) -> list[CheckpointError]:
    """Read every byte of one step, or of all; return what is wrong, an error for each file, by step.

    Args:
        storage: of the root.
        step: the step; None for all that are committed.
        private_to: the process whose root this is, where processes have roots of their own.
        progress: told of the bytes that were read.

    Raises:
        StepNotFoundError: the step asked for is not there; lists those that are.
        StorageError: the root cannot be listed.
    """
    chosen, found = steps_to_verify(storage, step=step, private_to=private_to)
    progress.begin("verify", sum(known.record.num_bytes for known in chosen))
    verifier = _Verifier(storage, chosen, progress)
    for known in chosen:
        errors = [error.with_context(step=known.record.step) for error in verifier.verify(known)]
        if errors and attempt_at(storage, known.prefix) == known.record.attempt:
            found += [(known.record.step, error) for error in errors]
    return [error for _, error in sorted(found, key=lambda pair: pair[0])]


def steps_to_verify(
    storage: Storage, *, step: int | None, private_to: int | None
) -> tuple[list[CommittedStep], list[tuple[int, CheckpointError]]]:
    """Return the step asked for, or all, and what has the name and a record of one and yet is none.

    Raises:
        StepNotFoundError: the step asked for is not there; lists those that are.
        StorageError: the root cannot be listed.
    """
    # A new reader: nothing is believed that was read before.
    listing = StepReader(storage, private_to=private_to).listing()
    found = [(problem.step, problem.error) for problem in listing.problems if step in (None, problem.step)]
    chosen = [known for known in listing.steps if step in (None, known.record.step)]
    if step is not None and not chosen and not found:
        available = tuple(sorted(known.record.step for known in listing.steps))
        raise StepNotFoundError(
            f"step {step} is not committed here; committed are: {', '.join(map(str, available)) or 'none'}",
            step=step,
            path=storage.location,
            available=available,
        )
    return chosen, found


class _Verifier:
    """Reads step after step, and a file that several of them have once."""

    def __init__(self, storage: Storage, steps: Sequence[CommittedStep], progress: Progress) -> None:
        self._storage = storage
        self._progress = progress
        self._is_shared = len(steps) > 1 and any(step.record.linked_bytes for step in steps)
        self._found: dict[tuple[object, ...], CheckpointError | None] = {}

    def verify(self, step: CommittedStep) -> Iterator[CheckpointError]:
        """Yield what is wrong with a step."""
        try:
            manifest = StepReader(self._storage).load_manifest(step)
        except StepNotFoundError:
            return
        except CheckpointError as error:
            yield error
            return
        identities = self._identities(step.files_prefix, manifest.files) if self._is_shared else {}
        for file in manifest.files:
            found = self._check(step.files_prefix, file, identities.get(file.path, ()))
            if found is not None:
                yield found
        yield from _strangers(self._storage, step, manifest)

    def _identities(self, prefix: str, files: Sequence[FileEntry]) -> dict[str, tuple[int, ...]]:
        """Return what tells a file from any other, whatever its name is here, by path."""
        found = {}
        for parent in {file.path.rpartition("/")[0] for file in files}:
            below = f"{parent}/" if parent else ""
            with suppress(CheckpointError):  # which the file's own check tells of
                entries = self._storage.list(f"{prefix}/{parent}".rstrip("/"))
                found.update({f"{below}{entry.name}": entry.identity for entry in entries if not entry.is_dir})
        return found

    def _check(self, prefix: str, file: FileEntry, identity: tuple[int, ...]) -> CheckpointError | None:
        key = (identity, file.num_bytes, file.block_bytes, file.digests)
        known = self._found.get(key)
        if known is not None:
            path = self._storage.describe(f"{prefix}/{file.path}")
            return CorruptDataError(known.message, path=path, hint=known.hint)
        if identity and key in self._found:
            self._progress.advance(file.num_bytes)
            return None
        try:
            verify_file(self._storage, prefix, file, progress=self._progress.advance)
        except CheckpointError as error:
            if identity and isinstance(error, CorruptDataError):
                self._found[key] = error
            return error
        self._found[key] = None
        return None


def _strangers(storage: Storage, step: CommittedStep, manifest: Manifest) -> Iterator[CheckpointError]:
    """Name the files that lie in the step and that its manifest does not: a restore never reads them."""
    known = {COMMIT_NAME, MANIFEST_NAME, *(file.path for file in manifest.files)}
    pending = [("", 0)]
    while pending:
        below, depth = pending.pop()
        try:
            entries = storage.list(f"{step.files_prefix}/{below}".rstrip("/"))
        except CheckpointError as error:
            yield error
            continue
        for entry in sorted(entries, key=lambda entry: entry.name):
            path = f"{below}{entry.name}"
            if entry.is_dir and depth == 0 and is_attempt(entry.name) and not _is_listed(entry.name, known):
                continue  # of an attempt to replace the step, where attempts lie beside each other
            if entry.is_dir and depth < _MAX_DEPTH:
                pending.append((f"{path}/", depth + 1))
            elif path not in known:
                yield CorruptDataError(
                    "the manifest does not name this file: it was put here after the commit",
                    path=storage.describe(f"{step.files_prefix}/{path}"),
                    hint="A restore ignores it. Remove it once you know where it is from.",
                )


def _is_listed(directory: str, known: set[str]) -> bool:
    return any(path.startswith(f"{directory}/") for path in known)
