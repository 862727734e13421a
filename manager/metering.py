"""How far long work is: counted where the bytes move, looked at once a second from a thread of its own.

Counting costs an addition a block. What takes less than a second is never looked at. Longer work is told as
`WorkProgress`, logged now and then, and shown on a terminal while the caller is held up by it.

Where several processes are at one piece of work, each adds its bytes to counters in the coordinator's store, so that
each learns the sum; nobody waits for anybody. If the store does not answer, a process tells of its own bytes alone.

Knows nothing of saves and restores but their names.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from safepoint.manager.errors import CheckpointError
from safepoint.manager.events import WorkProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Counters", "Line", "Meter", "Work"]

logger = logging.getLogger("safepoint")

_LOOK_EVERY_SECS = 1.0
_LOG_EVERY_SECS = 30.0
_ADDS_PER_SEC = 500
"""Of all processes together, whatever their number: what the store of process 0 is asked to bear."""
_ANSWER_SECS = 1.0
_RATE_LOOKS = 10
_SILENT_SECS = 60.0
"""How long the store is left alone after it did not answer."""


class Counters(Protocol):
    """Numbers that all processes add to."""

    process_index: int
    process_count: int

    def count(self, name: str, amount: int, *, deadline_secs: float) -> int:
        """Add to a counter and return the sum."""

    def drop_count(self, name: str, *, deadline_secs: float) -> None:
        """Forget a counter."""


class Line(Protocol):
    """One line that shows how far things are."""

    def show(self, text: str) -> None:
        """Show this in place of what was shown before."""

    def clear(self) -> None:
        """Show nothing."""


class Work:
    """One piece of work under way on this process."""

    def __init__(self, what: str, step: int | None, total_bytes: int, shared: str, *, is_attended: bool) -> None:
        self.what = what
        self.step = step
        self.total_bytes = total_bytes
        self.shared = shared
        self.is_attended = is_attended
        self.started = time.monotonic()
        self.logged = self.started
        self.done_bytes = 0
        self.is_over = False
        self.added_bytes: int | None = None  # None: the counters do not know of this work yet
        self.looks: deque[tuple[float, int]] = deque([(self.started, 0)], maxlen=_RATE_LOOKS)

    def advance(self, num_bytes: int) -> None:
        """Note that so many more bytes are done. One thread at a time."""
        self.done_bytes += num_bytes

    def look(self, done_bytes: int, total_bytes: int, *, is_sum: bool) -> WorkProgress:
        """Return how far it is, and remember it for the rate."""
        now = time.monotonic()
        done = min(done_bytes, total_bytes)
        before, earlier = self.looks[0]
        self.looks.append((now, done))
        rate = max(0.0, (done - earlier) / (now - before)) if now > before else 0.0
        return WorkProgress(
            what=self.what,
            step=self.step,
            done_bytes=done,
            total_bytes=total_bytes,
            secs=now - self.started,
            rate=rate,
            is_sum=is_sum,
        )


class Meter:
    """All the work of one manager."""

    def __init__(
        self,
        counters: Counters,
        *,
        tell: Callable[[WorkProgress], None] | None = None,
        line: Line | None = None,
        look_every_secs: float = _LOOK_EVERY_SECS,
    ) -> None:
        """Start no thread: that comes with the first work.

        Args:
            counters: of all processes; used by this meter's thread alone.
            tell: told of work that takes long, on that thread; None where nobody listens.
            line: shows it; None where nobody looks.
            look_every_secs: how often it is looked at, and how long work goes unnoticed.
        """
        self._state = _State(counters, tell, line, look_every_secs)
        self._finalizer = weakref.finalize(self, self._state.end)
        self._finalizer.atexit = False

    @contextmanager
    def work(
        self, what: str, total_bytes: int, *, step: int | None = None, shared: str = "", is_attended: bool = False
    ) -> Iterator[Work]:
        """Measure a piece of work while the block runs.

        Args:
            what: one word.
            total_bytes: about how much it is on this process.
            step: what it is about.
            shared: a name that all processes use for this piece of work, and for no other; "" for work of this
                process alone.
            is_attended: whether the caller is held up by it, so that it may be shown.
        """
        work = Work(what, step, total_bytes, shared, is_attended=is_attended)
        self._state.begin(work)
        try:
            yield work
        finally:
            self._state.finish(work)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Say that the caller is held up while the block runs, by whatever is under way: it may be shown."""
        self._state.attend(1)
        try:
            yield
        finally:
            self._state.attend(-1)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._finalizer()


class _State:
    """What the thread needs: it must not hold the meter itself."""

    def __init__(
        self, counters: Counters, tell: Callable[[WorkProgress], None] | None, line: Line | None, look_every_secs: float
    ) -> None:
        self._counters = counters
        self._tell = tell
        self._line = line
        every = look_every_secs if counters.process_count == 1 else counters.process_count / _ADDS_PER_SEC
        self._every_secs = max(look_every_secs, every)
        self._changed = threading.Condition()
        self._works: list[Work] = []
        self._is_idle = True
        self._num_attended = 0
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._silent_until = 0.0
        self._stale: deque[tuple[float, str]] = deque()

    def begin(self, work: Work) -> None:
        # Alone and unobserved: not even a thread is woken. Of several processes the primary may be observed.
        is_watched = self._tell is not None or self._line is not None or self._counters.process_count > 1
        if not is_watched and not logger.isEnabledFor(logging.INFO):
            return
        with self._changed:
            self._works.append(work)
            if self._thread is None and not self._is_closed:
                thread = threading.Thread(target=self._run, name="safepoint-progress", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads to be had: nobody is told
                    return
                self._thread = thread
            if self._is_idle:
                self._changed.notify_all()

    def finish(self, work: Work) -> None:
        # The thread looks once more by itself, if it has looked at all.
        with self._changed:
            work.is_over = True
            if work.added_bytes is None and work in self._works:
                self._works.remove(work)
            self._clear_line_if_done()

    def attend(self, change: int) -> None:
        with self._changed:
            self._num_attended += change
            self._clear_line_if_done()

    def end(self) -> None:
        with self._changed:
            self._is_closed = True
            self._works.clear()
            self._changed.notify_all()

    def _clear_line_if_done(self) -> None:
        if self._line is not None and not any(self._is_shown(work) for work in self._works):
            self._line.clear()

    def _is_shown(self, work: Work) -> bool:
        return not work.is_over and (work.is_attended or self._num_attended > 0)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.wait_for(lambda: self._works or self._is_closed)
                self._is_idle = False
                self._changed.wait_for(lambda: self._is_closed, timeout=self._every_secs)
                if self._is_closed:
                    return
                works = list(self._works)
            for work in works:
                if time.monotonic() - work.started >= self._every_secs or work.is_over:
                    self._look_at(work)
            self._forget_old_counters()

    def _look_at(self, work: Work) -> None:
        is_over = work.is_over
        sums = self._sums(work)
        if is_over:
            with self._changed:
                self._works = [other for other in self._works if other is not work]
            self._stale.append((time.monotonic(), work.shared))
            return
        done, total = sums or (work.done_bytes, work.total_bytes)
        progress = work.look(done, total, is_sum=sums is not None)
        if self._tell is not None:
            self._tell(progress)
        if progress.secs - (work.logged - work.started) >= _LOG_EVERY_SECS:
            work.logged = time.monotonic()
            logger.info("%s", progress)
        with self._changed:
            if self._line is not None and self._is_shown(work):
                self._line.show(str(progress))

    def _sums(self, work: Work) -> tuple[int, int] | None:
        """Add what this process has done since, and return what all have, of how much; None where that is not known."""
        added = work.added_bytes or 0
        new_total = work.total_bytes if work.added_bytes is None else 0
        now_done = work.done_bytes
        work.added_bytes = now_done
        if not work.shared or self._counters.process_count == 1 or time.monotonic() < self._silent_until:
            return None
        try:
            done = self._counters.count(f"{work.shared}/done", now_done - added, deadline_secs=_ANSWER_SECS)
            total = self._counters.count(f"{work.shared}/total", new_total, deadline_secs=_ANSWER_SECS)
        except (CheckpointError, RuntimeError, OSError) as error:
            logger.debug("cannot tell the other processes how far this one is: %s", error)
            self._silent_until = time.monotonic() + _SILENT_SECS
            return None
        return done, total

    def _forget_old_counters(self) -> None:
        """Drop counters to which nobody adds any more; on the primary."""
        while self._stale and time.monotonic() - self._stale[0][0] > _SILENT_SECS:
            _, shared = self._stale.popleft()
            if not shared or self._counters.process_index != 0 or self._counters.process_count == 1:
                continue
            try:
                for name in ("done", "total"):
                    self._counters.drop_count(f"{shared}/{name}", deadline_secs=_ANSWER_SECS)
            except (CheckpointError, RuntimeError, OSError) as error:
                logger.debug("cannot drop the counters of %s: %s", shared, error)
