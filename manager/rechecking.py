"""Reading a step's files again before they are linked on, behind the training loop as far as there is time.

A thread reads file after file and compares the digests. The next save stops it and reads the rest of what it needs
itself, so that it never waits for what it does not want. Knows no leaves.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from safepoint.formats.reading import verify_file
from safepoint.manager.errors import CheckpointError, CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.storage import Storage

__all__ = ["Recheck"]

logger = logging.getLogger("safepoint")

_JOIN_SECS = 2.0
"""How long to wait for the thread after it was told to stop: it does after the block that it is reading."""


class _StoppedError(Exception):
    pass


class Recheck:
    """The files of one committed step, and which of them were found sound since its commit."""

    def __init__(self, storage: Storage, files: Sequence[FileEntry]) -> None:
        """Remember the files; reads none.

        Args:
            storage: of the root.
            files: of the step.
        """
        self._storage = storage
        self._files = files
        self._found: dict[int, CheckpointError | None] = {}
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, find_prefix: Callable[[], str | None], wanted: Sequence[int]) -> None:
        """Read these files, given as indices, on a thread of its own, which first asks where they lie."""
        self._thread = threading.Thread(
            target=self._run, args=(find_prefix, wanted), name="safepoint-recheck", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads to be had, or the interpreter is shutting down
            self._thread = None

    def wait(self, timeout_secs: float) -> bool:
        """Wait until all is read; say whether it is."""
        if self._thread is not None:
            self._thread.join(timeout_secs)
        return self._thread is None or not self._thread.is_alive()

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECS)

    def sound(self, prefix: str, wanted: Collection[int]) -> list[int]:
        """Return which of the files are what was committed; reads those that were not read yet.

        Args:
            prefix: where the step lies now.
            wanted: indices of the files.
        """
        self.stop()
        for index in wanted:
            if index not in self._found:
                self._found[index] = self._read(prefix, index)
        return [index for index in wanted if self._found[index] is None]

    def _run(self, find_prefix: Callable[[], str | None], wanted: Sequence[int]) -> None:
        prefix = find_prefix()
        for index in wanted if prefix is not None else ():
            try:
                error = self._read(str(prefix), index, look=self._look)
            except _StoppedError:
                return
            if error is None or isinstance(error, CorruptDataError):
                self._found[index] = error  # after any other error the save has a look of its own

    def _look(self, _: int) -> None:
        if self._stopped.is_set():
            raise _StoppedError

    def _read(self, prefix: str, index: int, *, look: Callable[[int], None] | None = None) -> CheckpointError | None:
        try:
            # Of what is in the page cache one would learn nothing; and it is better used for other things.
            self._drop_cached(prefix, index)
            verify_file(self._storage, prefix, self._files[index], progress=look)
            self._drop_cached(prefix, index)
        except CheckpointError as error:
            if look is None or isinstance(error, CorruptDataError):
                logger.warning("a file is not linked on, what is wanted of it will be written anew: %s", error)
            return error
        return None

    def _drop_cached(self, prefix: str, index: int) -> None:
        with self._storage.open_reader(f"{prefix}/{self._files[index].path}".lstrip("/")) as reader:
            reader.drop_cached()
