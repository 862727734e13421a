"""What a peer's calling thread does while another one sleeps in the store; the protocol is described in `meeting`.

Owns the peer's second line: who else is there, the warnings, the deadline, and bells that were missed. Must not know
what a payload means.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

from safepoint.manager.coordination.meeting import Patience, Verdict, absent_error, read_turn
from safepoint.manager.coordination.store import Line, StoreStuckError, Values

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.manager.errors import RendezvousTimeoutError

__all__ = ["InTurn", "Listener", "Searching", "TurnLostError", "end_turn", "look_at_turn"]

T = TypeVar("T")

_SHOW_PRESENCE_AFTER_SECS = 0.1
_LISTEN_EVERY_SECS = 0.5
_LISTENS_PER_SEC = 1000
_ANSWER_ON_ITS_WAY_SECS = 1.0


class TurnLostError(Exception):
    """The turn will never be ended: its primary died and another took over in the same store."""


class Listener:
    """Knows of which other processes something was seen.

    Args:
        aside: to the store, for calls while the peer's other line waits.
        process_index: of this process.
        process_count: how many meet.
    """

    def __init__(self, aside: Line, process_index: int, process_count: int) -> None:
        self.process_index = process_index
        self.heard: set[int] = set()
        self._aside = aside
        self._others = [process for process in range(process_count) if process != process_index]
        # Everyone asks about everyone: in all, so many questions a second whatever the number of processes.
        self.every_secs = max(_LISTEN_EVERY_SECS, process_count**2 / _LISTENS_PER_SEC)

    def ask(self, call: Callable[[Values], T], patience: Patience) -> T:
        """Return what the store says by the deadline."""

        def warn() -> float:
            patience.warn_if_due(self.silent)
            return patience.to_sleep()

        return self._aside.call(call, until=patience.until(), meanwhile=warn)

    def post(self, call: Callable[[Values], object]) -> None:
        """Have this done whenever the store answers."""
        self._aside.post(call)

    def last_call(self, call: Callable[[Values], object]) -> None:
        """Try for a moment, and let it be done late, or never, if the store does not answer."""
        self._aside.last_call(call)

    def silent(self) -> list[int]:
        """Return of whom nothing can be known while the store, which is process 0's, does not answer."""
        return [process for process in self._others if process == 0 or process not in self.heard]

    def missing(self, where: str, patience: Patience) -> list[int]:
        """Return the others of whom nothing is seen there, and remember those of whom something is.

        Process 0 leaves no key of its own: it is there when a turn is open.
        """

        def ask(values: Values) -> set[int]:
            return {process for process in self._others if process and values.has([f"{where}/{process}"])}

        present = self.ask(ask, patience)
        self.heard |= present
        if where != "here":
            present.add(0)
        return [process for process in self._others if process not in present]


class Searching:
    """The search for a turn that is open and in which this peer has no part yet.

    `find` runs on the thread that waits in the store, `attend` on the caller's.

    Args:
        listener: of this peer.
        last_turn: the latest that it took part in.
        patience: of the meeting.

    Attributes:
        error: why the search ended without a turn.
    """

    def __init__(self, listener: Listener, last_turn: int, patience: Patience) -> None:
        self.error: RendezvousTimeoutError | None = None
        self._listener = listener
        self._last_turn = last_turn
        self._patience = patience
        self._is_over = threading.Event()
        self._bell = ""
        self._key = f"here/{listener.process_index}"
        now = time.monotonic()
        self._show_at, self._listen_at = now + _SHOW_PRESENCE_AFTER_SECS, now + listener.every_secs
        self._shown = self._listened_late = False

    def find(self, values: Values) -> int:
        """Return the turn, as soon as there is one; 0 when the search was ended."""
        while not self._is_over.is_set():
            turn, is_open = read_turn(values.read("turn"))
            if is_open and turn > self._last_turn:
                return turn
            self._bell = f"{turn + 1}/open"
            values.wait(self._bell, until=self._patience.let_go(), is_over=self._is_over.is_set)
        return 0

    def attend(self) -> float:
        """Do what is due, and return after how many seconds to come again; end the search at the deadline."""
        patience, listener = self._patience, self._listener
        if self.error is not None and patience.overdue:
            raise self.error
        now = time.monotonic()
        if not self._shown and now >= self._show_at:
            self._shown = True
            listener.ask(lambda values: values.write(self._key, patience.name.encode()), patience)
        if now >= self._listen_at or (patience.nearly_ended and not self._listened_late):
            self._listen_at = now + listener.every_secs
            self._listened_late = patience.nearly_ended
            listener.missing("here", patience)
            self._look_again()
        if patience.ended and self.error is None:
            # Who was heard and is gone came too, and gave up a moment earlier.
            missing = listener.missing("here", patience)
            self.error = absent_error(patience, [each for each in missing if each not in listener.heard])
            self.give_up()
        patience.warn_if_due(lambda: listener.missing("here", patience))
        return patience.to_sleep()

    def end(self) -> None:
        """Take back what was shown, as soon as the store answers."""
        if self._shown:
            self._listener.post(lambda values: values.erase(self._key))

    def give_up(self) -> None:
        """Let the other thread end, as soon as the store answers."""
        self._is_over.set()
        if self._bell:
            self._listener.post(lambda values: values.free(self._bell))

    def _look_again(self) -> None:
        """Wake the other thread if it missed the bell."""
        turn, is_open = read_turn(self._listener.ask(lambda values: values.read("turn"), self._patience))
        if is_open and turn > self._last_turn and self._bell:
            self._listener.post(lambda values: values.ring(self._bell))


class InTurn:
    """While the peer's other thread waits for the end of a turn.

    Args:
        listener: of this peer.
        turn: the number.
        entered: how many meetings this process has entered.
        patience: of the meeting.
    """

    def __init__(self, listener: Listener, turn: int, entered: int, patience: Patience) -> None:
        self._listener = listener
        self._turn = turn
        self._entered = entered
        self._patience = patience
        self._listen_at = time.monotonic() + listener.every_secs
        self._give_up_at: float | None = None

    def attend(self) -> float:
        """Do what is due, and return after how many seconds to come again; end the turn when the deadline has passed.

        Raises:
            TurnLostError: see there.
            StoreStuckError: the turn has been ended and the store does not say how.
        """
        patience, listener = self._patience, self._listener
        where = f"{self._turn}/in"
        now = time.monotonic()
        if now >= self._listen_at:
            self._listen_at = now + listener.every_secs
            listener.missing(where, patience)
            self._check_turn()
        if self._give_up_at is not None:
            if now >= self._give_up_at:
                raise StoreStuckError
        elif patience.grace_ended:
            self._give_up_at = now + _ANSWER_ON_ITS_WAY_SECS
            self._end_it(listener.missing(where, patience))
        patience.warn_if_due(lambda: listener.missing(where, patience) or [0])
        return patience.to_sleep()

    def _check_turn(self) -> None:
        latest, end = self._listener.ask(lambda values: look_at_turn(values, self._turn), self._patience)
        if latest != self._turn and end is None:
            raise TurnLostError

    def _end_it(self, absent: list[int]) -> None:
        """End the turn for all, unless it was ended this moment; either way the waiting thread learns how."""
        patience = self._patience
        error = absent_error(patience, absent) if absent else absent_error(patience, [0], because=" in time")
        verdict = Verdict.failure(error, entered=self._entered)
        self._listener.ask(lambda values: end_turn(values, self._turn, verdict), patience)


def look_at_turn(values: Values, turn: int) -> tuple[int, bytes | None]:
    """Return the number of the latest turn, and how this one ended, if it did."""
    # In this order: `end` is written before `turn` moves on.
    latest, _ = read_turn(values.read("turn"))
    end = f"{turn}/end"
    return latest, values.read(end) if values.has([end]) else None  # reading what is absent wakes those who wait for it


def end_turn(values: Values, turn: int, verdict: Verdict) -> None:
    """Claim the end of a turn for a failure, and let the primary know."""
    values.claim(f"{turn}/end", verdict.to_bytes())
    values.ring(f"{turn}/ready")
