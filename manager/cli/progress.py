"""A bar with bytes, rate and time left for long work, on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from safepoint.manager.progress import QUIET

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import TaskID

    from safepoint.manager import progress

__all__ = ["shown_progress"]


class _Bar:
    """One bar a piece of work; the last one is the one that moves."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def begin(self, what: str, total_bytes: int) -> None:
        """Show another bar."""
        self._task = self._bars.add_task(what, total=total_bytes)

    def advance(self, num_bytes: int) -> None:
        """Move the last bar."""
        if self._task is not None:
            self._bars.advance(self._task, num_bytes)


@contextmanager
def shown_progress(*, quiet: bool = False) -> Iterator[progress.Progress]:
    """Show work on stderr while the block runs, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield QUIET
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bars:
        yield _Bar(bars)
