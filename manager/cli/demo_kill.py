"""The demonstration's power cut: kills this process in the middle of writing a step, with a part of it on disk."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, NoReturn

from safepoint.formats.checksum import BLOCK_BYTES
from safepoint.formats.storage import FileWriter, LocalStorage

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from safepoint.formats.storage import WrittenFile

__all__ = ["kill_while_writing"]

REACH_DISK_SECS = 2.0


def kill_while_writing(step: int) -> None:
    """Make this process end itself by SIGKILL inside the first large file of a step.

    Nothing is cleaned up and no handler runs: what the kernel's memory killer leaves is left here. It takes the place
    of `LocalStorage.open_writer` in this process, so that everything before the cut is the real thing.
    """
    open_writer = LocalStorage.open_writer

    def open_doomed_writer(
        self: LocalStorage, path: str, *, num_bytes: int, block_bytes: int = BLOCK_BYTES
    ) -> FileWriter:
        writer = open_writer(self, path, num_bytes=num_bytes, block_bytes=block_bytes)
        if path.startswith(f"{step}.tmp-") and num_bytes > BLOCK_BYTES:
            return _DoomedWriter(writer, self.describe(path), (BLOCK_BYTES + num_bytes) // 2)
        return writer

    LocalStorage.open_writer = open_doomed_writer  # type: ignore[method-assign]


class _DoomedWriter(FileWriter):
    """Hands its bytes to a real writer until `num_bytes` have passed, more than one block, and ends the process."""

    def __init__(self, writer: FileWriter, path: str, num_bytes: int) -> None:
        self._writer, self._path, self._left = writer, path, num_bytes

    def append(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        self._writer.append(view[: self._left])
        self._left -= view.nbytes
        if self._left <= 0:
            _end_process(self._path)

    def finish(self) -> WrittenFile:
        return self._writer.finish()

    def abort(self) -> None:
        self._writer.abort()


def _end_process(path: str) -> NoReturn:
    deadline = time.monotonic() + REACH_DISK_SECS  # a block is written by another thread: let it get there
    while os.path.getsize(path) == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL does not return")
