"""The ends of several files at once, where a file is sent to a server when it is complete; elsewhere one by one.

What is gathered in memory is bounded by the storage, whose writers hold `append` up.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Self

from safepoint.formats.manifest import FileEntry

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from safepoint.formats.storage import FileWriter, Storage, WrittenFile

__all__ = ["Finishing"]


class Finishing:
    """The files of one process in one attempt, in the order in which they were written."""

    def __init__(
        self, storage: Storage, *, process_index: int, attempt: str, progress: Callable[[int], None] | None = None
    ) -> None:
        """Start; threads come when needed.

        Args:
            storage: of the files.
            process_index: of this process.
            attempt: that writes.
            progress: called with the bytes that are with the storage, never from two threads at once.
        """
        self._process_index = process_index
        self._attempt = attempt
        self._progress = progress
        self._lock = threading.Lock()
        self._files: list[tuple[str, WrittenFile | Future[WrittenFile]]] = []
        at_once = storage.part_bytes is not None
        self._pool = ThreadPoolExecutor(storage.num_streams, "safepoint-finish") if at_once else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None:  # each has a deadline, and gives its memory back at its end
            self._pool.shutdown(wait=True)

    @property
    def num_files(self) -> int:
        """How many there are so far."""
        return len(self._files)

    def watch(self, writer: FileWriter) -> None:
        """Let a new writer report what it has done; before its first append."""
        if self._progress is not None:
            writer.report_to(self._advance)

    def _advance(self, num_bytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress(num_bytes)

    def add(self, path: str, file: WrittenFile) -> None:
        """Note a file that is finished."""
        self._files.append((path, file))

    def finish(self, path: str, writer: FileWriter) -> None:
        """Finish a file, at once or while the next ones are written; the writer is taken over.

        Raises:
            StorageError: this one could not be written, or one before it.
        """
        if self._pool is None:
            with writer:
                self.add(path, writer.finish())
            return
        self._files.append((path, self._pool.submit(_finish, writer)))
        for _, file in self._files:
            if isinstance(file, Future) and file.done():
                file.result()

    def entries(self) -> tuple[FileEntry, ...]:
        """Return all files, when all are finished.

        Raises:
            StorageError: one could not be written.
        """
        done = [(path, file.result() if isinstance(file, Future) else file) for path, file in self._files]
        return tuple(
            FileEntry(
                path=path,
                num_bytes=file.num_bytes,
                block_bytes=file.block_bytes,
                digests=file.digests,
                process_index=self._process_index,
                attempt=self._attempt,
            )
            for path, file in done
        )


def _finish(writer: FileWriter) -> WrittenFile:
    with writer:
        return writer.finish()
