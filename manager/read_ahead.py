"""Runs of blocks read ahead by a few threads, and taken in order.

Owns the threads and how far they may be ahead. Knows nothing of who wants the blocks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from safepoint.formats.run_reading import run_bytes
from safepoint.formats.storage.buffers import BUFFERS
from safepoint.formats.threads import start_helpers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.run_reading import BlockRun

__all__ = ["ReadAhead"]

AHEAD_BYTES = 64 << 20
"""How much may be read, or be under way, before it is taken."""


class ReadAhead:
    """Reads runs; used by one thread, which closes it."""

    def __init__(
        self,
        runs: Sequence[BlockRun],
        files: Sequence[FileEntry],
        read: Callable[[BlockRun, memoryview], None],
        *,
        num_threads: int,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        """Begin to read.

        Args:
            runs: in the order in which they will be taken.
            files: as in the step's manifest.
            read: fills memory with a run; called by several threads at once, and bounded in time.
            num_threads: how many of them, at most.
            ahead_bytes: how much is read before it is taken, unless one run has more.
        """
        self._runs = runs
        self._files = files
        self._read = read
        self._ahead_bytes = ahead_bytes
        self._changed = threading.Condition()
        self._begun = 0
        self._taken = 0
        self._under_way_bytes = 0
        self._done: dict[int, memoryview | BaseException] = {}
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        self._threads.extend(start_helpers(self._work, count=min(num_threads, len(runs)), name="safepoint-ahead"))
        if runs and not self._threads:
            raise RuntimeError("no thread can be started to read ahead")

    def take(self) -> memoryview:
        """Return the next run, at the beginning of a buffer that the caller gives back to the pool.

        *Blocks until* it is read, which the deadline of the storage bounds.

        Raises:
            CorruptDataError: see `RunReader.read`.
            StorageError: see `RunReader.read`.
        """
        number = self._taken
        self._taken += 1
        with self._changed:
            self._changed.wait_for(lambda: number in self._done)
            found = self._done.pop(number)
            self._under_way_bytes -= run_bytes(self._files, self._runs[number])
            self._changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        return found

    def close(self) -> None:
        """Read no more; wait for what is under way. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for found in self._done.values():
            if isinstance(found, memoryview):
                BUFFERS.give_back(found)
        self._done.clear()

    def _work(self) -> None:
        while (number := self._next()) is not None:
            found = self._read_run(self._runs[number])
            with self._changed:
                self._done[number] = found
                self._is_closed = self._is_closed or isinstance(found, BaseException)
                self._changed.notify_all()

    def _read_run(self, run: BlockRun) -> memoryview | BaseException:
        num_bytes = run_bytes(self._files, run)
        buffer = BUFFERS.take_anyway(num_bytes)
        try:
            self._read(run, buffer[:num_bytes])
        except BaseException as error:  # noqa: BLE001 - raised by `take`
            BUFFERS.give_back(buffer)
            return error
        return buffer

    def _next(self) -> int | None:
        """Return the number of a run to be read now, None when there is none left."""
        with self._changed:
            while True:
                if self._is_closed or self._begun == len(self._runs):
                    return None
                size = run_bytes(self._files, self._runs[self._begun])
                if not self._under_way_bytes or self._under_way_bytes + size <= self._ahead_bytes:
                    break
                self._changed.wait()
            self._under_way_bytes += size
            self._begun += 1
            return self._begun - 1
