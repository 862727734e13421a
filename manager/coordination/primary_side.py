"""The primary's side of a meeting; the protocol is described in `meeting`.

Owns opening and closing turns, deciding, and deleting the keys of turns that are over. Must not know what a payload
means.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from safepoint.manager.coordination.listening import end_turn, look_at_turn
from safepoint.manager.coordination.meeting import (
    Message,
    Patience,
    Verdict,
    absent_error,
    left_error,
    processes_text,
    read_turn,
)
from safepoint.manager.coordination.store import Line, StoreGoneError, StoreStuckError, Values
from safepoint.manager.errors import CheckpointError, DisagreementError, RendezvousTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safepoint.manager.coordination.base import Decide

__all__ = ["PrimarySide"]

T = TypeVar("T")

_MARKS = ("open", "come", "ready", "end", "read")
"""What every turn leaves in the store."""


class PrimarySide:
    """Meets as process 0.

    Args:
        line: to the store, for calls and waits.
        aside: another, for calls while a wait goes on.
        process_count: how many meet.
    """

    def __init__(self, line: Line, aside: Line, process_count: int) -> None:
        self._line = line
        self._aside = aside
        self._count = process_count
        self._entered = 0
        self._turn: int | None = None
        self._leftovers: dict[int, list[str]] = {}

    def meet(self, name: str, payload: bytes, patience: Patience, decide: Decide | None) -> bytes:
        """See `Coordinator.meet`."""
        self._entered += 1
        own = Message(name=name, entered=self._entered, payload=payload)
        try:
            while True:
                turn = self._number_next(patience)
                answer = self._hold(turn, own, patience, decide)
                if answer is not None:
                    return answer
        except StoreStuckError:
            raise absent_error(patience, range(1, self._count), because=", nor does the store") from None
        except StoreGoneError as error:
            raise RendezvousTimeoutError(
                f"The store in which processes meet is gone ({error}).", absent=(), deadline_secs=patience.deadline_secs
            ) from error

    def wait_until_read(self, *, until: float) -> None:
        """Return when every peer has read the last verdict, or at the deadline on the monotonic clock."""
        if self._turn is None:
            return
        key = f"{self._turn}/read"
        with contextlib.suppress(StoreStuckError, StoreGoneError):
            while time.monotonic() < until:
                if self._line.call(lambda values: values.add(key, 0), until=until) >= self._count - 1:
                    return
                time.sleep(0.01)

    def _number_next(self, patience: Patience) -> int:
        if self._turn is None:
            # Another primary may have met in this store before.
            self._turn, _ = read_turn(self._ask(lambda values: values.read("turn"), patience))
        # Counted before it is tried: a number whose opening was broken off is never used again.
        self._turn += 1
        turn = self._turn
        self._leftovers[turn] = []
        return turn

    def _hold(self, turn: int, own: Message, patience: Patience, decide: Decide | None) -> bytes | None:
        """Return this process's answer; None: those behind were told so, and the others meet again."""
        messages: list[Message] = []
        try:
            messages = self._collect(turn, own, patience)
            answer = _decide(messages, decide)
            if patience.overdue:
                raise absent_error(patience, [0], because=" in time")
            verdict = Verdict.answering(answer, entered=_newest(messages))
            self._close(turn, verdict, answer, patience)
        except BaseException as error:
            newest = _newest(messages or [own])
            again = isinstance(error, DisagreementError) and any(each.entered < newest for each in messages)
            told = error if isinstance(error, CheckpointError) else left_error(0, own.name, error)
            verdict = Verdict.failure(told, entered=newest, kind="behind" if again else "failed")
            # Where collecting was broken off, the line may be one that has yet to be connected.
            ended = self._close_failed(turn, verdict, self._line if messages else self._aside)
            self._tidy(turn, messages)
            if ended.kind != "behind":
                self._entered = max(self._entered, ended.entered)
                _raise_agreed(error, ended, verdict)
            elif own.entered == newest:
                return None
            raise
        self._tidy(turn, messages)
        self._entered = verdict.entered
        return answer if isinstance(answer, bytes) else answer[0]

    def _collect(self, turn: int, own: Message, patience: Patience) -> list[Message]:
        """Open the turn and return what everybody brought to it."""
        awaited = [f"{turn}/in/{process}" for process in range(1, self._count)]
        gone = threading.Event()

        def look(values: Values) -> bytes | Sequence[bytes | None] | None:
            return values.read_all(awaited) if values.has(awaited) else look_at_turn(values, turn)[1]

        def gather(values: Values) -> bytes | Sequence[bytes | None]:
            if gone.is_set():
                raise StoreStuckError  # nobody hears it: the caller went away before this could begin
            values.write("turn", f"{turn} open".encode())
            values.ring(f"{turn}/open")
            while True:
                values.wait(f"{turn}/ready", until=patience.let_go(), is_over=gone.is_set)
                if (found := look(values)) is not None:
                    return found
                values.forget(f"{turn}/ready")  # rung too early; whoever rings from now on is heard
                if (found := look(values)) is not None:
                    return found

        try:
            brought = self._line.call(gather, until=math.inf, meanwhile=lambda: self._attend(turn, awaited, patience))
        finally:
            gone.set()
        if isinstance(brought, bytes):
            raise Verdict.from_bytes(brought).raised()
        if patience.overdue:
            raise self._too_late(awaited, patience)
        if None in brought:
            raise absent_error(patience, [process for process, data in enumerate(brought, 1) if data is None])
        return [own, *(Message.from_bytes(data) for data in brought if data is not None)]

    def _attend(self, turn: int, awaited: Sequence[str], patience: Patience) -> float:
        """Look at the clock while the other thread waits for all to come, and return after how many seconds again.

        When the deadline has passed the turn is ended, and the other thread learns it as the peers do.
        """
        if patience.overdue:
            raise self._too_late(awaited, patience)
        if patience.ended and (absent := self._missing(awaited, patience)):
            verdict = Verdict.failure(absent_error(patience, absent), entered=self._entered)
            self._aside.call(lambda values: end_turn(values, turn, verdict), until=patience.until())
        patience.warn_if_due(lambda: self._missing(awaited, patience))
        return patience.to_sleep()

    def _too_late(self, awaited: Sequence[str], patience: Patience) -> RendezvousTimeoutError:
        """Return the error of a primary that was stopped, or starved.

        Whoever came may have given up, even if that cannot be seen yet.
        """
        return absent_error(patience, self._missing(awaited, patience) or [0], because=" in time")

    def _missing(self, awaited: Sequence[str], patience: Patience) -> list[int]:
        def ask(values: Values) -> list[int]:
            return [process for process, key in enumerate(awaited, 1) if not values.has([key])]

        return self._aside.call(ask, until=patience.until())

    def _close(self, turn: int, verdict: Verdict, answer: bytes | Sequence[bytes], patience: Patience) -> None:
        def close(values: Values) -> bytes:
            if isinstance(answer, bytes):
                if verdict.answer is None:
                    self._leftovers[turn].append(f"{turn}/out")
                    values.write(f"{turn}/out", answer)
            else:
                for process in range(1, self._count):
                    self._leftovers[turn].append(f"{turn}/out/{process}")
                    values.write(f"{turn}/out/{process}", answer[process])
            ended = values.claim(f"{turn}/end", verdict.to_bytes())
            values.write("turn", f"{turn} closed".encode())
            return ended

        ended = Verdict.from_bytes(self._ask(close, patience))
        if ended.error is not None:
            raise ended.raised()

    def _ask(self, call: Callable[[Values], T], patience: Patience) -> T:
        return self._line.call(call, until=patience.until())

    def _close_failed(self, turn: int, verdict: Verdict, line: Line) -> Verdict:
        """End the turn with this verdict, or return the one with which a peer has ended it already."""
        ended = verdict

        def close(values: Values) -> None:
            nonlocal ended
            ended = Verdict.from_bytes(values.claim(f"{turn}/end", verdict.to_bytes()))
            values.replace("turn", f"{turn} open".encode(), f"{turn} closed".encode())  # it may come late
            values.ring(f"{turn}/ready")  # frees the thread of this process that may still wait for it

        self._leftovers[turn] += [f"{turn}/in/{process}" for process in range(1, self._count)]
        line.last_call(close)
        return ended

    def _tidy(self, turn: int, messages: Sequence[Message]) -> None:
        """Delete what was read, and what is left of turns that no peer can be reading any more; behind the caller."""
        outdated = {old: self._leftovers.pop(old) for old in list(self._leftovers) if old < turn - 1}

        def tidy(values: Values) -> None:
            for process, message in enumerate(messages[1:], 1):
                values.erase(f"{turn}/in/{process}", num_bytes=len(message.to_bytes()))
            for old, left in outdated.items():
                for key in left:
                    values.erase(key)
                for mark in _MARKS:
                    values.forget(f"{old}/{mark}")

        self._line.post(tidy)


def _newest(messages: Sequence[Message]) -> int:
    return max(message.entered for message in messages)


def _raise_agreed(error: BaseException, ended: Verdict, own: Verdict) -> None:
    """Raise the error that the peers saw first, if this one is about the same deadline."""
    if ended != own and ended.error is not None and isinstance(error, RendezvousTimeoutError):
        raise ended.raised() from error


def _decide(messages: Sequence[Message], decide: Decide | None) -> bytes | Sequence[bytes]:
    names: dict[str, list[int]] = {}
    for process, message in enumerate(messages):
        names.setdefault(message.name, []).append(process)
    if len(names) > 1:
        told = "; ".join(f"{name!r} by {processes_text(processes)}" for name, processes in names.items())
        raise DisagreementError(
            f"Processes came to different meetings: {told}.",
            brought=tuple((name, tuple(processes)) for name, processes in names.items()),
            hint="All processes must make the same calls in the same order.",
        )
    answer = b"" if decide is None else decide([message.payload for message in messages])
    if not isinstance(answer, bytes) and len(answer) != len(messages):
        raise TypeError(f"decide gave {len(answer)} answers for {len(messages)} processes")
    return answer
