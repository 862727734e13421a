"""Events on their way to observers: in order, one at a time, on a thread of their own.

The promises to a save: telling an event takes microseconds and never fails, whatever an observer does. One that raises
is logged and told of the next event all the same. One that is slow is waited for by `close` alone, for a bounded time;
one that hangs loses what comes when so many events wait for it already, and the log says so.

Knows nothing of what the events are about.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safepoint.manager.events import Event, Observer

__all__ = ["EventStream"]

logger = logging.getLogger("safepoint")

_MOST_WAITING = 10_000


class EventStream:
    """Hands events to observers; any thread may tell one."""

    def __init__(self, observers: Sequence[Observer], *, last: Callable[[], None] | None = None) -> None:
        """Start nothing: the thread comes with the first event.

        Args:
            observers: told of each event, in this order.
            last: called on the thread after the last event.
        """
        self._state = _State(tuple(observers), last)
        # A manager that nobody closes must not leave a thread behind; what it told is delivered first.
        self._finalizer = weakref.finalize(self, self._state.end)
        self._finalizer.atexit = False

    def tell(self, event: Event) -> None:
        """Have all observers told of an event; returns at once."""
        self._state.put(event)

    def close(self, *, timeout_secs: float) -> None:
        """Deliver what was told, and end the thread, waiting so long at most. Idempotent."""
        self._finalizer()
        if not self._state.wait_until_ended(timeout_secs):
            logger.warning("an observer of checkpoint events is still busy after %g s: leaving it behind", timeout_secs)


class _State:
    """What the thread needs: it must not hold the stream itself."""

    def __init__(self, observers: tuple[Observer, ...], last: Callable[[], None] | None) -> None:
        self._observers = observers
        self._last = last
        self._changed = threading.Condition()
        self._waiting: deque[Event] = deque()
        self._thread: threading.Thread | None = None
        self._num_lost = 0
        self._is_closed = False

    def put(self, event: Event) -> None:
        if not self._observers:
            return
        with self._changed:
            if self._is_closed:
                return
            if len(self._waiting) >= _MOST_WAITING:
                self._num_lost += 1
                return
            self._waiting.append(event)
            if self._thread is None and not self._start():
                return
            self._changed.notify_all()

    def _start(self) -> bool:
        thread = threading.Thread(target=self._run, name="safepoint-events", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads to be had, or the interpreter is shutting down
            self._waiting.clear()
            return False
        self._thread = thread
        return True

    def end(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def wait_until_ended(self, timeout_secs: float) -> bool:
        thread = self._thread
        if thread is None or thread is threading.current_thread():  # an observer closes the manager
            return True
        thread.join(timeout_secs)
        return not thread.is_alive()

    def _run(self) -> None:
        while (event := self._next()) is not None:
            for observer in self._observers:
                _tell(observer, event)
            del event
        if self._last is not None:
            self._last()

    def _next(self) -> Event | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            event = self._waiting.popleft() if self._waiting else None
            lost, self._num_lost = self._num_lost, 0
        if lost:
            logger.warning("observers were too slow: %d checkpoint events were not told", lost)
        return event


def _tell(observer: Observer, event: Event) -> None:
    started = time.monotonic()
    try:
        observer(event)
    except BaseException:  # whatever ends it must not end the thread
        logger.exception("an observer of checkpoint events failed with %s", type(event).__name__)
    secs = time.monotonic() - started
    if secs > 1.0:
        logger.debug("an observer took %.1f s for %s", secs, type(event).__name__)
