"""One line on a terminal, rewritten in place; nothing where standard error is none, so that logs stay logs.

Knows nothing of what it shows.
"""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing import Self

__all__ = ["TerminalLine"]

_START_OVER = "\r\x1b[2K"


class TerminalLine:
    """The last line of a terminal; used by one thread at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_shown = False

    @classmethod
    def on_stderr(cls) -> Self | None:
        """Return the line of standard error; None where that is no terminal."""
        stream = sys.stderr
        try:
            return cls(stream) if stream is not None and stream.isatty() else None
        except (ValueError, OSError):  # closed
            return None

    def show(self, text: str) -> None:
        """Show this in place of what was shown before."""
        width = max(20, shutil.get_terminal_size().columns) - 1
        self._write(f"{_START_OVER}{text[:width]}")
        self._is_shown = True

    def clear(self) -> None:
        """Take away what was shown."""
        if self._is_shown:
            self._is_shown = False
            self._write(_START_OVER)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (ValueError, OSError):  # closed, or the terminal is gone
            self._is_shown = False
