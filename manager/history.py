"""What has happened in a root, for `safepoint report`: `.safepoint/history.jsonl`, a line an event, the newest 1,000.

Kept by the process that owns the root, on the thread of the observers: it can neither hold up nor harm a save. What
happened before that process owned the root (a restore at the start of a run) comes with its first save; a run that only
restores leaves nothing. Saves are written at most every half minute, and when the manager closes, failures at once.

Nothing depends on this file. It is replaced as a whole, so that a reader sees whole lines; whatever is wrong with it is
taken for no history. Lines are for people: their fields are those of `events`.
"""

from __future__ import annotations

import json
import logging
import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self

from safepoint.formats.storage import open_storage
from safepoint.manager.errors import CheckpointError
from safepoint.manager.events import (
    Event,
    Preempted,
    RestoreDone,
    RestoreFailed,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    StepPassedOver,
    StepsRemoved,
)
from safepoint.manager.pins import CONTROL_DIR

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.storage import Storage, StorageOptions

__all__ = ["HISTORY_NAME", "History", "read_history"]

logger = logging.getLogger("safepoint")

HISTORY_NAME = f"{CONTROL_DIR}/history.jsonl"

_MAX_LINES = 1000
_MAX_BYTES = 1 << 20
_MAX_TEXT = 500
_EVERY_SECS = 30.0
_KEPT = (Preempted, RestoreDone, RestoreFailed, SaveCommitted, SaveFailed, StepPassedOver, StepsRemoved)
_AT_ONCE = (Preempted, RestoreFailed, SaveFailed, StepPassedOver)
_REFUSED = frozenset({"RootInUseError", "AttemptLostError"})


class History:
    """An observer that writes down what happened; used by one thread at a time."""

    def __init__(self, storage: Storage, *, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Touch nothing.

        Args:
            storage: of the root.
            run: id of this run.
            clock: seconds, only ever counting up.
        """
        self._storage = storage
        self._run = run
        self._clock = clock
        self._lines: list[str] | None = None
        self._new: list[str] = []
        self._is_owner = False
        self._written = -math.inf

    @classmethod
    def of_root(cls, root: str, *, run: str, options: StorageOptions | None = None) -> Self:
        """Return the history of a root, through a storage of its own, which no save shares."""
        return cls(open_storage(root, options), run=run)

    def wants(self, event: Event) -> bool:
        """Say whether this event makes a difference; from any thread."""
        return isinstance(event, _KEPT) or (isinstance(event, SaveBegun) and not self._is_owner)

    def __call__(self, event: Event) -> None:
        """Note the event, and write what is due."""
        if isinstance(event, SaveBegun | SaveCommitted):  # which nobody but the root's owner comes to
            self._is_owner = True
        if isinstance(event, _KEPT):
            self._new.append(_line(event, self._run))
            del self._new[:-_MAX_LINES]
        if isinstance(event, SaveFailed) and event.error in _REFUSED:
            self._is_owner = False
        is_due = isinstance(event, _AT_ONCE) or self._clock() - self._written >= _EVERY_SECS
        if self._new and is_due:
            self.flush()

    def flush(self) -> None:
        """Write what is new, if the root is ours. Problems are logged: there is nothing else to do about them."""
        if not self._new or not self._is_owner:
            return
        self._written = self._clock()
        try:
            if self._lines is None:
                self._lines = _read_lines(self._storage)
            lines = _newest([*self._lines, *self._new])
            self._storage.replace(HISTORY_NAME, "".join(f"{line}\n" for line in lines).encode())
        except CheckpointError as error:
            logger.debug("cannot write the history of %s: %s", self._storage.location, error)
            return
        self._lines, self._new = lines, []


def read_history(storage: Storage) -> list[dict[str, Any]]:
    """Return what is known of the past of a root, oldest first: objects with at least "event" and "time".

    The file may be from anybody: what is no such object is left out, and values are to be checked by whoever uses them.
    """
    found = []
    for line in _read_lines(storage):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(value, dict) or not isinstance(value.get("event"), str):
            continue
        when = value.get("time")
        if isinstance(when, int | float) and not isinstance(when, bool) and 0 <= when < 1 << 40:
            found.append(value)
    return found


def _read_lines(storage: Storage) -> list[str]:
    try:
        if storage.size(HISTORY_NAME) is None:
            return []
        text = storage.get(HISTORY_NAME, max_bytes=2 * _MAX_BYTES).decode("utf-8", "replace")
    except CheckpointError as error:
        logger.debug("cannot read the history of %s: %s", storage.location, error)
        return []
    return _newest([line for line in text.split("\n") if line])


def _newest(lines: list[str]) -> list[str]:
    """Return the newest lines that the file may hold."""
    kept: list[str] = []
    room = _MAX_BYTES
    for line in reversed(lines[-_MAX_LINES:]):
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return kept[::-1]


def _line(event: Event, run: str) -> str:
    fields = {name: _short(value) for name, value in asdict(event).items() if value is not None}
    fields.pop("process_count")
    return json.dumps({"event": type(event).__name__, "run": run, **fields}, allow_nan=False)


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    if isinstance(value, tuple):
        return [_short(item) for item in value[:_MAX_LINES]]
    return value
