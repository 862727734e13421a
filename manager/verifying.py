"""Reading all of a step to tell whether it is sound, file by file. Reads only; meets nobody.

A step that its owner deletes meanwhile is no problem: it is not one any more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME
from safepoint.formats.reading import verify_file
from safepoint.manager.errors import CheckpointError, CorruptDataError, StepNotFoundError
from safepoint.manager.progress import QUIET
from safepoint.manager.step_listing import is_attempt
from safepoint.manager.step_reading import StepReader, attempt_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safepoint.formats.manifest import Manifest
    from safepoint.formats.storage import Storage
    from safepoint.manager.progress import Progress
    from safepoint.manager.step_listing import CommittedStep

__all__ = ["verify_steps"]

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
    # A new reader: nothing is believed that was read before.
    listing = StepReader(storage, private_to=private_to).listing()
    found: list[tuple[int, CheckpointError]] = [
        (problem.step, problem.error) for problem in listing.problems if step in (None, problem.step)
    ]
    chosen = [known for known in listing.steps if step in (None, known.record.step)]
    if step is not None and not chosen and not found:
        available = tuple(sorted(known.record.step for known in listing.steps))
        raise StepNotFoundError(
            f"step {step} is not committed here; committed are: {', '.join(map(str, available)) or 'none'}",
            step=step,
            path=storage.location,
            available=available,
        )
    progress.begin("verify", sum(known.record.num_bytes for known in chosen))
    for known in chosen:
        errors = [error.with_context(step=known.record.step) for error in _verify(storage, known, progress)]
        if errors and attempt_at(storage, known.prefix) == known.record.attempt:
            found += [(known.record.step, error) for error in errors]
    return [error for _, error in sorted(found, key=lambda pair: pair[0])]


def _verify(storage: Storage, step: CommittedStep, progress: Progress) -> Iterator[CheckpointError]:
    try:
        manifest = StepReader(storage).load_manifest(step)
    except StepNotFoundError:
        return
    except CheckpointError as error:
        yield error
        return
    for file in manifest.files:
        try:
            verify_file(storage, step.files_prefix, file, progress=progress.advance)
        except CheckpointError as error:
            yield error
    yield from _strangers(storage, step, manifest)


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
