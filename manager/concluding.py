"""After all have written: the files that say where everybody's data are, for formats that have such.

Called by the primary, in the meeting after the writes: a failure is everybody's, and nothing is published.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from safepoint.formats.base import WrittenPart
from safepoint.formats.registry import get_format
from safepoint.manager.directing import write_job
from safepoint.manager.errors import StorageError
from safepoint.manager.file_bytes import PlannedFile
from safepoint.manager.sources import LiveSource
from safepoint.manager.writing import write_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from safepoint.formats.base import Format, WriteJob
    from safepoint.manager.directing import Direction, SaveDecision
    from safepoint.manager.session import Session
    from safepoint.manager.writing import WriteReport

__all__ = ["conclude", "concluding_files"]


def conclude(
    session: Session,
    reports: Sequence[WriteReport],
    direction: Direction,
    decision: SaveDecision,
    metrics: Mapping[str, float],
    *,
    step: int,
) -> list[WriteReport]:
    """Write what the format says when all is written; return the reports with that in the primary's.

    Raises:
        StorageError: the storage refused.
        AttemptLostError: others gave the attempt up meanwhile.
    """
    job = write_job(direction, decision, session.coordinator, metrics)
    files = concluding_files(get_format(session.options.format), reports, job)
    if not files:
        return list(reports)
    prefix = session.committer.prefix_of(step, direction.attempt)
    try:
        added = write_files(
            session.storage,
            prefix,
            files,
            LiveSource({}),
            process_index=session.coordinator.process_index,
            attempt=direction.attempt,
        )
    except StorageError as error:
        raise session.committer.lost_or(error, step, prefix) from error
    return [replace(reports[0], files=(*reports[0].files, *added.files)), *reports[1:]]


def concluding_files(file_format: Format, reports: Sequence[WriteReport], job: WriteJob) -> list[PlannedFile]:
    """Return the files, without data, that say where the data of all are."""
    plans = file_format.conclude(_parts(reports), job)
    return [PlannedFile(path=plan.path, layout=plan.layout, pieces=(), shards=()) for plan in plans]


def _parts(reports: Sequence[WriteReport]) -> Iterator[WrittenPart]:
    for report in reports:
        for path, entry in (*report.shards, *report.copies):
            yield WrittenPart(
                path=path,
                key=entry.key,
                file=report.files[entry.file].path,
                offset=entry.offset,
                num_bytes=entry.num_bytes,
            )
