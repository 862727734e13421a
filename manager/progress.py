"""How long work tells how far it is: in bytes, to whoever listens. Knows no terminal and no log."""

from __future__ import annotations

from typing import Protocol

__all__ = ["QUIET", "Progress", "Quiet"]


class Progress(Protocol):
    """Told of work under way. Never called by two threads at once."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Learn that work begins which takes about so many bytes; may come several times, one after the other."""

    def advance(self, num_bytes: int) -> None:
        """Learn that so many more bytes are done."""


class Quiet:
    """Tells nobody."""

    def begin(self, what: str, total_bytes: int) -> None:
        """Do nothing."""

    def advance(self, num_bytes: int) -> None:
        """Do nothing."""


QUIET: Progress = Quiet()
