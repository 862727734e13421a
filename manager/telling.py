"""Who is told of what a manager does: the log, observers, the history of the root, and a line on the terminal.

Owns which of these there are on this process. What is told is decided where it happens (`observed`).
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from safepoint.manager.event_stream import EventStream
from safepoint.manager.events import Preempted, RestoreDone, SaveCommitted, StepsRemoved
from safepoint.manager.metering import Meter
from safepoint.manager.terminal_line import TerminalLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from safepoint.manager.coordination import Coordinator
    from safepoint.manager.events import Event, Observer
    from safepoint.manager.history import History
    from safepoint.manager.metering import Work
    from safepoint.manager.options import ShowProgress
    from safepoint.manager.progress import Progress

__all__ = ["Telling"]

logger = logging.getLogger("safepoint")

_NEWS = (Preempted, RestoreDone, SaveCommitted, StepsRemoved)
"""What the log tells at level INFO, on the primary. The rest is for DEBUG: failures are raised, and logged there."""


class Telling:
    """What one open manager tells, on one process."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        observers: Sequence[Observer] = (),
        progress: ShowProgress = "off",
        history: History | None = None,
    ) -> None:
        """Start nothing: threads come with the first event and the first long work.

        Args:
            coordinator: of the processes.
            observers: the user's.
            progress: "auto" shows work on the terminal, on the primary.
            history: of the root, where this process may own it.
        """
        self._is_primary = coordinator.is_primary
        self._history = history
        self._has_observers = bool(observers)
        stream = EventStream(
            [*([] if history is None else [history]), *observers], last=None if history is None else history.flush
        )
        index, count = coordinator.process_index, coordinator.process_count

        # The meter's thread knows this function, and not this object: who forgets a manager leaves no thread behind.
        def pass_on(event: Event) -> None:
            stream.tell(replace(event, process_index=index, process_count=count))

        self._stream = stream
        self._pass_on = pass_on
        self._meter = Meter(
            coordinator.background("progress"),
            tell=pass_on if observers else None,
            line=TerminalLine.on_stderr() if progress == "auto" and coordinator.is_primary else None,
        )

    def tell(self, event: Event) -> None:
        """Tell of an event; returns at once, and never fails."""
        is_news = self._is_primary and isinstance(event, _NEWS)
        logger.log(logging.INFO if is_news else logging.DEBUG, "%s", event)
        if self._has_observers or (self._history is not None and self._history.wants(event)):
            self._pass_on(event)

    @contextmanager
    def reported(self, what: str, step: int | None) -> Iterator[Progress]:
        """Give work of this process that reports by itself somebody to report to."""
        with ExitStack() as stack:
            yield _Reported(lambda total: stack.enter_context(self.work(what, total, step=step, is_attended=True)))

    def work(
        self, what: str, total_bytes: int, *, step: int | None = None, shared: str = "", is_attended: bool = False
    ) -> AbstractContextManager[Work]:
        """Measure a piece of work while the block runs; see `Meter.work`."""
        return self._meter.work(what, total_bytes, step=step, shared=shared, is_attended=is_attended)

    def attended(self) -> AbstractContextManager[None]:
        """Say that the caller is held up while the block runs; see `Meter.attended`."""
        return self._meter.attended()

    def close(self, *, timeout_secs: float) -> None:
        """Tell what is left, waiting so long at most, while the root is still ours. Idempotent."""
        self._meter.close()
        self._stream.close(timeout_secs=timeout_secs)


class _Reported:
    """From work that says when it begins and how far it is to a measured piece of work."""

    def __init__(self, begin: Callable[[int], Work]) -> None:
        self._begin = begin
        self._work: Work | None = None

    def begin(self, what: str, total_bytes: int) -> None:
        """See `Progress.begin`."""
        del what
        self._work = self._begin(total_bytes)

    def advance(self, num_bytes: int) -> None:
        """See `Progress.advance`."""
        if self._work is not None:
            self._work.advance(num_bytes)
