"""A peer's side of a meeting; the protocol is described in `meeting`.

Owns finding the open turn, taking part in it, and saying who was absent when nothing comes of it. Must not know what a
payload means.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from safepoint.manager.coordination.meeting import (
    Message,
    Patience,
    Verdict,
    absent_error,
    left_error,
    read_turn,
)
from safepoint.manager.coordination.store import Line, StoreGoneError, StoreStuckError, Values
from safepoint.manager.errors import CheckpointError, RendezvousTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["PeerSide"]

T = TypeVar("T")

_SHOW_PRESENCE_AFTER_SECS = 0.1
_LISTEN_EVERY_SECS = 0.5
_LISTENS_PER_SEC = 1000
_ANSWER_ON_ITS_WAY_SECS = 1.0


class PeerSide:
    """Meets as one of the processes other than 0.

    Args:
        line: to the store.
        process_index: of this process.
        process_count: how many meet.
        store_owner: who is lost when the store is, for messages.
    """

    def __init__(self, line: Line, process_index: int, process_count: int, store_owner: str) -> None:
        self._line = line
        self._index = process_index
        self._count = process_count
        self._store_owner = store_owner
        self._entered = 0
        self._last_turn = 0
        self._unsettled: int | None = None
        self._others = [process for process in range(process_count) if process != process_index]
        self._heard: set[int] = set()
        # Everyone asks about everyone: in all, so many questions a second whatever the number of processes.
        self._listen_every_secs = max(_LISTEN_EVERY_SECS, process_count**2 / _LISTENS_PER_SEC)

    def meet(self, name: str, payload: bytes, patience: Patience) -> bytes:
        """See `Coordinator.meet`."""
        self._entered += 1
        self._heard = set()
        own = Message(name=name, entered=self._entered, payload=payload)
        try:
            while True:
                turn = self._find_turn(name, patience)
                answer = self._take_part(turn, own, patience)
                if answer is not None:
                    return answer
        except StoreStuckError:
            self._settle_later(own, patience)
            because = f": the store, which belongs to {self._store_owner}, is silent"
            raise absent_error(patience, self._silent(), because=because) from None
        except StoreGoneError as error:
            raise RendezvousTimeoutError(
                f"{self._store_owner.capitalize()} left: the connection of meeting {name!r} is closed ({error}).",
                absent=(0,),
                deadline_secs=patience.deadline_secs,
                hint="Look into the log of process 0 for the cause, then start all processes again.",
            ) from error

    def _find_turn(self, name: str, patience: Patience) -> int:
        """Return an open turn in which this process has no part yet."""
        show_at = time.monotonic() + _SHOW_PRESENCE_AFTER_SECS
        listen_at = time.monotonic() + self._listen_every_secs
        shown = listened_late = False
        key = f"here/{self._index}"
        try:
            while True:
                turn, is_open = read_turn(self._ask(lambda values: values.read("turn"), patience))
                if is_open and turn > self._last_turn:
                    return turn
                now = time.monotonic()
                if not shown and now >= show_at:
                    shown = True
                    self._ask(lambda values: values.write(key, name.encode()), patience)
                if now >= listen_at or (patience.nearly_ended and not listened_late):
                    listen_at = now + self._listen_every_secs
                    listened_late = patience.nearly_ended
                    self._listen("here", patience)
                if patience.ended:
                    # Who was heard and is gone came too, and gave up a moment earlier.
                    raise absent_error(
                        patience, [each for each in self._listen("here", patience) if each not in self._heard]
                    )
                patience.warn_if_due(lambda: self._listen("here", patience))
                patience.pause()
        except StoreStuckError:
            shown = False
            self._line.post(lambda values: values.erase(key))
            raise
        finally:
            if shown:
                self._line.last_call(lambda values: values.erase(key))

    def _take_part(self, turn: int, own: Message, patience: Patience) -> bytes | None:
        """Return this process's answer; None: it has to take part in a later turn."""
        self._last_turn = self._unsettled = turn
        try:
            self._ask(lambda values: values.write(f"{turn}/in/{self._index}", own.to_bytes()), patience)
            verdict = self._await_end(turn, patience)
        except (CheckpointError, StoreStuckError, StoreGoneError):
            raise
        except BaseException as error:
            # Interrupted: nobody should wait for this process.
            left = Verdict.failure(left_error(self._index, own.name, error), entered=own.entered)
            self._line.last_call(lambda values: values.claim(f"{turn}/end", left.to_bytes()))
            raise
        self._unsettled = None
        if verdict is None:
            return None
        return self._follow(turn, verdict, own, patience)

    def _await_end(self, turn: int, patience: Patience) -> Verdict | None:
        def look(values: Values) -> tuple[int, bytes | None]:
            # In this order: `end` is written before `turn` moves on.
            return read_turn(values.read("turn"))[0], values.read(f"{turn}/end")

        listen_at = time.monotonic() + self._listen_every_secs
        while True:
            latest, end = self._ask(look, patience)
            if end is not None:
                return Verdict.from_bytes(end)
            if latest != turn:
                return None  # Its primary died and another took over in the same store.
            now = time.monotonic()
            if now >= listen_at:
                listen_at = now + self._listen_every_secs
                self._listen(f"{turn}/in", patience)
            if patience.grace_ended:
                return self._end_it(turn, patience)
            patience.warn_if_due(lambda: self._listen(f"{turn}/in", patience) or [0])
            patience.pause()

    def _end_it(self, turn: int, patience: Patience) -> Verdict:
        """End the turn for all, unless it was ended this moment."""
        absent = self._listen(f"{turn}/in", patience)
        error = absent_error(patience, absent) if absent else absent_error(patience, [0], because=" in time")
        verdict = Verdict.failure(error, entered=self._entered)
        ended = self._ask(lambda values: values.claim(f"{turn}/end", verdict.to_bytes()), patience)
        return Verdict.from_bytes(ended)

    def _follow(self, turn: int, verdict: Verdict, own: Message, patience: Patience) -> bytes | None:
        def read(values: Values) -> bytes | None:
            answer = None
            if verdict.error is None:
                answer = values.read(f"{turn}/out" if verdict.kind == "answer" else f"{turn}/out/{self._index}")
            values.add(f"{turn}/read", 1)
            return answer

        until = max(patience.until(), time.monotonic() + (0 if verdict.error else _ANSWER_ON_ITS_WAY_SECS))
        answer = self._line.call(read, until=until)
        if verdict.kind == "behind" and own.entered == verdict.entered:
            return None
        if verdict.kind != "behind":
            self._entered = max(self._entered, verdict.entered)
        if verdict.error is not None:
            raise verdict.raised()
        if answer is None:  # Deleted: this process slept through two meetings of the others.
            raise absent_error(patience, [self._index], because=" in time")
        return answer

    def _ask(self, call: Callable[[Values], T], patience: Patience) -> T:
        return self._line.call(call, until=patience.until(), meanwhile=lambda: patience.warn_if_due(self._silent))

    def _silent(self) -> list[int]:
        """Return of whom nothing can be known while the store, which is process 0's, does not answer."""
        return [process for process in self._others if process == 0 or process not in self._heard]

    def _settle_later(self, own: Message, patience: Patience) -> None:
        """Break the turn off as soon as the store answers again, lest it succeed without this process."""
        turn, self._unsettled = self._unsettled, None
        if turn is not None:
            error = absent_error(patience, [0], because=" in time")
            verdict = Verdict.failure(error, entered=own.entered)
            self._line.post(lambda values: values.claim(f"{turn}/end", verdict.to_bytes()))

    def _listen(self, where: str, patience: Patience) -> list[int]:
        """Return the others of whom nothing is seen there, and remember those of whom something is.

        Process 0 leaves no key of its own: it is there when a turn is open.
        """

        def ask(values: Values) -> set[int]:
            return {process for process in self._others if process and values.has([f"{where}/{process}"])}

        present = self._ask(ask, patience)
        self._heard |= present
        if where != "here":
            present.add(0)
        return [process for process in self._others if process not in present]
