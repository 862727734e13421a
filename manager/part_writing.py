"""One process's part of a save, put into the attempt's directory: all of it, or what changed and links to the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.formats.base import WriteJob
from safepoint.formats.registry import get_format
from safepoint.manager.linking import LinkedWrite
from safepoint.manager.sources import GatherSource
from safepoint.manager.writing import WriteReport, write_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safepoint.formats.manifest import TreePath
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.directing import Direction
    from safepoint.manager.file_bytes import PlannedFile
    from safepoint.manager.session import Session
    from safepoint.manager.sources import Source

__all__ = ["write_part"]


def write_part(
    session: Session,
    direction: Direction,
    step: int,
    files: Sequence[PlannedFile],
    source: Source | Sequence[memoryview],
    specs: Mapping[TreePath, ArraySpec],
    progress: Callable[[int], None],
) -> WriteReport:
    """Return what this process wrote and linked, when all of it is durable. Called by all processes.

    Args:
        session: of the manager.
        direction: of this process.
        step: the step.
        files: that this process writes where nothing is linked.
        source: of their pieces, or the image of each file.
        specs: of at least their leaves.
        progress: called with the bytes that are with the storage, and with those that were linked.

    Raises:
        StorageError: the storage refused.
    """
    process_index, links = session.coordinator.process_index, session.links
    prefix = session.committer.prefix_of(step, direction.attempt)
    gathered = source if links is not None and isinstance(source, GatherSource) else None
    if links is None or links.is_refused:
        report = write_files(
            session.storage,
            prefix,
            files,
            source,
            process_index=process_index,
            attempt=direction.attempt,
            progress=progress,
        )
        if gathered is not None and files:
            gathered.ask_again([piece for file in files for piece in file.pieces], [])
    else:
        write = LinkedWrite(
            storage=session.storage,
            memory=links,
            step=step,
            attempt=direction.attempt,
            prefix=prefix,
            specs=specs,
            file_format=get_format(session.options.format),
            progress=progress,
            job=WriteJob(
                mode=direction.mode,
                process_index=process_index,
                process_count=session.coordinator.process_count,
                part_bytes=session.storage.part_bytes,
            ),
        )
        report = write.run(files, source)
    if gathered is not None and direction.sends:  # by now all is sent once
        gathered.send_again(direction.sends)
    return report
