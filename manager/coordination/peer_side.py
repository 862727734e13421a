"""A peer's side of a meeting; the protocol is described in `meeting`.

Owns finding the open turn, taking part in it, and saying who was absent when nothing comes of it. Must not know what a
payload means.
"""

from __future__ import annotations

import math
import threading

from safepoint.manager.coordination.listening import (
    InTurn,
    Listener,
    Searching,
    TurnLostError,
    end_turn,
    look_at_turn,
)
from safepoint.manager.coordination.meeting import Message, Patience, Verdict, absent_error, left_error
from safepoint.manager.coordination.store import Line, StoreGoneError, StoreStuckError, Values
from safepoint.manager.errors import CheckpointError, RendezvousTimeoutError

__all__ = ["PeerSide"]


class PeerSide:
    """Meets as one of the processes other than 0.

    Args:
        line: to the store, for calls and waits.
        aside: another, for calls while a wait goes on.
        process_index: of this process.
        process_count: how many meet.
        store_owner: who is lost when the store is, for messages.
    """

    def __init__(self, line: Line, aside: Line, process_index: int, process_count: int, store_owner: str) -> None:
        self._line = line
        self._listener = Listener(aside, process_index, process_count)
        self._index = process_index
        self._count = process_count
        self._store_owner = store_owner
        self._entered = 0
        self._last_turn = 0
        self._unsettled: int | None = None

    def meet(self, name: str, payload: bytes, patience: Patience) -> bytes:
        """See `Coordinator.meet`."""
        self._entered += 1
        self._listener.heard.clear()
        own = Message(name=name, entered=self._entered, payload=payload)
        try:
            while True:
                turn = self._find_turn(patience)
                answer = self._take_part(turn, own, patience)
                if answer is not None:
                    return answer
        except StoreStuckError:
            self._settle_later(own, patience)
            because = f": the store, which belongs to {self._store_owner}, is silent"
            raise absent_error(patience, self._listener.silent(), because=because) from None
        except StoreGoneError as error:
            raise RendezvousTimeoutError(
                f"{self._store_owner.capitalize()} left: the connection of meeting {name!r} is closed ({error}).",
                absent=(0,),
                deadline_secs=patience.deadline_secs,
                hint="Look into the log of process 0 for the cause, then start all processes again.",
            ) from error

    def _find_turn(self, patience: Patience) -> int:
        """Return an open turn in which this process has no part yet."""
        searching = Searching(self._listener, self._last_turn, patience)
        try:
            turn = self._line.call(searching.find, until=math.inf, meanwhile=searching.attend)
        except BaseException:
            searching.give_up()
            raise
        finally:
            searching.end()
        if searching.error is not None:
            raise searching.error
        return turn

    def _take_part(self, turn: int, own: Message, patience: Patience) -> bytes | None:
        """Return this process's answer; None: it has to take part in a later turn."""
        self._last_turn = self._unsettled = turn
        gone = threading.Event()

        def take_part(values: Values) -> tuple[Verdict, bytes | None] | None:
            values.write(f"{turn}/in/{self._index}", own.to_bytes())
            if values.add(f"{turn}/come", 1) >= self._count - 1:
                values.ring(f"{turn}/ready")
            while not gone.is_set():
                values.wait(f"{turn}/end", until=patience.let_go(), is_over=gone.is_set)
                latest, end = look_at_turn(values, turn)
                if end is not None:
                    verdict = Verdict.from_bytes(end)
                    return verdict, self._read_answer(values, turn, verdict)
                if latest != turn:  # This process slept through two meetings of the others.
                    break
            return None

        attendance = InTurn(self._listener, turn, own.entered, patience)
        try:
            told = self._line.call(take_part, until=math.inf, meanwhile=attendance.attend)
        except TurnLostError:
            told = None
        except (CheckpointError, StoreStuckError, StoreGoneError):
            raise
        except BaseException as error:
            # Interrupted: nobody should wait for this process.
            left = Verdict.failure(left_error(self._index, own.name, error), entered=own.entered)
            self._listener.last_call(lambda values: end_turn(values, turn, left))
            raise
        finally:
            gone.set()
        self._unsettled = None
        if told is None:
            return None
        self._line.post(lambda values: values.add(f"{turn}/read", 1))
        return self._follow(*told, own, patience)

    def _read_answer(self, values: Values, turn: int, verdict: Verdict) -> bytes | None:
        if verdict.error is not None:
            return None
        if verdict.answer is not None:
            return verdict.answer.encode("latin-1")
        return values.read(f"{turn}/out" if verdict.kind == "answer" else f"{turn}/out/{self._index}")

    def _follow(self, verdict: Verdict, answer: bytes | None, own: Message, patience: Patience) -> bytes | None:
        if verdict.kind == "behind" and own.entered == verdict.entered:
            return None
        if verdict.kind != "behind":
            self._entered = max(self._entered, verdict.entered)
        if verdict.error is not None:
            raise verdict.raised()
        if answer is None:  # Deleted: this process slept through two meetings of the others.
            raise absent_error(patience, [self._index], because=" in time")
        return answer

    def _settle_later(self, own: Message, patience: Patience) -> None:
        """Break the turn off as soon as the store answers again, lest it succeed without this process."""
        turn, self._unsettled = self._unsettled, None
        if turn is not None:
            error = absent_error(patience, [0], because=" in time")
            verdict = Verdict.failure(error, entered=own.entered)
            self._line.post(lambda values: end_turn(values, turn, verdict))
