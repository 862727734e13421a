"""A program of ours that reads with another library, in a process of its own: started, asked, and ended.

Every answer has the deadline: none is a process that is ended. Knows nothing of steps or of what is asked.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Self

from safepoint.manager.errors import MissingPackageError, ReaderFailedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

__all__ = ["ReaderProcess"]

_STDERR_BYTES = 2000
_NOT_HANDED_ON = (
    "XLA_FLAGS",
    "LIBTPU_INIT_ARGS",
)  # they may be for another device than the CPU, which then does not start


class ReaderProcess:
    """The process; started with the first request. Used by one thread."""

    def __init__(self, program: str, *, library: str, extra: str, deadline_secs: float) -> None:
        """Remember what to start.

        Args:
            program: path of the file; it is run as it lies there, and imports nothing of safepoint.
            library: name of the library, for messages.
            extra: of safepoint that installs it.
            deadline_secs: within which each answer has to come, the first one and what it imports included.
        """
        self._program = program
        self._library = library
        self._extra = extra
        self._deadline_secs = deadline_secs
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[bytes] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def ask(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answers to a request, as they come.

        Raises:
            MissingPackageError: the library is not installed.
            ReaderFailedError: the process ended, or an answer took longer than the deadline.
        """
        process = self._process or self._start()
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # its last words are among the answers
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        while True:
            message = self._next()
            if "missing" in message:
                raise MissingPackageError(
                    f"{self._library} is not installed: there is no {message['missing']}",
                    hint=f"pip install 'safepoint[{self._extra}]'",
                )
            if "done" in message:
                return
            yield message

    def _start(self) -> subprocess.Popen[str]:
        surroundings = {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(  # noqa: S603 - this Python, and a file of our own
            [sys.executable, "-P", self._program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**surroundings, "JAX_PLATFORMS": "cpu"},
            text=True,
            encoding="utf-8",
        )
        assert self._process.stdout is not None
        threading.Thread(
            target=_forward, args=(self._process.stdout, self._answers), name="safepoint-reader-answers", daemon=True
        ).start()
        return self._process

    def _next(self) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=self._deadline_secs)
        except queue.Empty:
            raise ReaderFailedError(
                f"{self._library} gave no answer for {self._deadline_secs:g} s",
                hint="Give it a longer deadline; on a slow file system one leaf can take that long.",
            ) from None
        try:
            message = json.loads(line or "")
        except ValueError:
            raise ReaderFailedError(f"the process of {self._library} ended: {self._last_words()}") from None
        assert isinstance(message, dict)
        return message

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _STDERR_BYTES))
        return self._errors.read().decode(errors="replace").strip()

    def close(self) -> None:
        """End the process, whatever it is doing; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    _close(stream)
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _forward(stream: IO[str], answers: queue.SimpleQueue[str | None]) -> None:
    with suppress(OSError, ValueError):  # closed meanwhile
        for line in stream:
            answers.put(line)
    answers.put(None)


def _close(stream: IO[str]) -> None:
    with suppress(BrokenPipeError):  # what was not written yet is for nobody
        stream.close()
