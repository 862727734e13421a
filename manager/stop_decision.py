"""At which step all processes stop: agreed between their watcher threads, while the training goes on.

Owns the protocol, and the two threads' common knowledge in one process (`Progress`). Must not know of signals' origin,
of states or of saves.

The protocol, once somebody wants to stop:

1. A note is left in the coordinator's store. Every watcher looks for one now and then, so each learns of it.
2. The watchers meet. Nobody is held meanwhile, however long one of them takes to come; afterwards all of them are known
   to be there, awake, and to answer within milliseconds.
3. They meet again. Each brings its *limit*, and from that moment on its training thread does not pass that limit. The
   stop step is one above the highest of all limits; whoever is below it goes on up to it.

The limit is the step that the training has reached: no boundary between steps is crossed between answer and decision,
so nobody can be past the stop step when it is decided. A boundary that falls into those milliseconds is held until they
are over. It cannot be otherwise: a message takes time, and who crosses a boundary without knowing what was decided may
leave the others behind. Where steps are so short that boundaries fall into any few milliseconds, the limit is set as
many steps ahead as are made in `_AHEAD_SECS`, so that the training thread is not held there either.

Only watchers wait for watchers. That a training thread is inside a collective which needs a process that is held, or
slow, therefore does no harm: its watcher answers, and the held one goes on, to the stop step.

If the processes cannot agree (one of them was killed, or process 0 is gone) each that knows of the wish stops at the
next boundary. That boundary may differ, which the save at it will say; it could not have succeeded in any case.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from safepoint.manager.errors import CheckpointError
from safepoint.manager.signal_watch import SignalWatch, signal_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.manager.coordination import Coordinator

__all__ = ["Progress", "StopWatcher"]

logger = logging.getLogger("safepoint")

_NOT_BEGUN = -1
_NO_LIMIT = sys.maxsize
_NUM_MARKS = 8
_AHEAD_SECS = 0.05
_MOST_STEPS_AHEAD = 64
_LOOK_EVERY_SECS = 0.2
_LOOKS_PER_SEC = 2500
"""Of all processes together, whatever their number: what the store of process 0 is asked to bear."""
_HOLD_SECS = 5.0
_FAILURES = (CheckpointError, RuntimeError, OSError)
"""What asking others can end in. A watcher that dies of it would leave a process that ignores SIGTERM."""
_ASK_SECS = 2.0
_LONGEST_PAUSE_SECS = 30.0


class Progress:
    """How far the training of this process is, and how far it may go.

    Told by the training thread (`reached`), asked and limited by the watcher thread. There is no lock: the one writes
    its step and then reads the limit, the other writes the limit and then reads the step, so at least one of them sees
    what the other has written.
    """

    def __init__(self) -> None:
        self.stop_step: int | None = None
        self._marks: deque[tuple[int, float]] = deque(maxlen=_NUM_MARKS)
        self._limit = _NO_LIMIT
        self._settled = threading.Event()

    def reached(self, step: int) -> bool:
        """Note that the training reached the boundary after `step`, and return whether to stop there."""
        self._marks.append((step, time.monotonic()))
        return step > self._limit and self._is_stop(step)

    def _is_stop(self, step: int) -> bool:
        # The watcher has a deadline of its own; this one is for a watcher that died.
        self._settled.wait(2 * _HOLD_SECS)
        return self.stop_step is None or step >= self.stop_step

    def hold(self, *, ahead_secs: float = 0.0) -> int:
        """Let no step beyond a limit pass until `settle`, and return the limit.

        Args:
            ahead_secs: let as many steps pass as are made in this time.
        """
        while True:
            limit = self._limit = self._latest() + self._num_ahead(ahead_secs)
            if self._latest() <= limit:
                return limit

    def settle(self, stop_step: int) -> None:
        """Stop at the first boundary from this step on."""
        self.stop_step = stop_step
        self._limit = stop_step - 1
        self._settled.set()

    def settle_alone(self) -> None:
        """Stop at the next boundary, or at the one that is held."""
        self.settle((self.hold() if self._limit == _NO_LIMIT else self._limit) + 1)

    def _latest(self) -> int:
        return self._marks[-1][0] if self._marks else _NOT_BEGUN

    def _num_ahead(self, secs: float) -> int:
        marks = tuple(self._marks)
        pairs = list(itertools.pairwise(marks))
        if not pairs:
            return 0
        # The longest of the last few: a step that was short by chance does not put the end off.
        longest = max(after[1] - before[1] for before, after in pairs)
        stride = max(1, *(after[0] - before[0] for before, after in pairs))
        return stride * min(_MOST_STEPS_AHEAD, int(secs / max(longest, 1e-9)))


class StopWatcher:
    """The thread that waits for a wish to stop, here or elsewhere, and agrees on the step.

    Args:
        view: of the processes, used by this thread alone, and closed with it.
        signals: what wakes it.
        deadline_secs: for the other watchers to come, once somebody wants to stop.

    Attributes:
        reason: why to stop, once this process knows that it is wanted.
        held_secs: for how long no step beyond the limit could pass.
    """

    def __init__(self, view: Coordinator, signals: SignalWatch, *, deadline_secs: float) -> None:
        self.reason: str | None = None
        self.held_secs = 0.0
        self._view = view
        self._progress = Progress()
        self._signals = signals
        self._deadline_secs = deadline_secs
        self._hold_secs = min(_HOLD_SECS, deadline_secs)
        self._wish: str | None = None
        self._is_closing = False
        self._may_be_held = False
        self._thread = threading.Thread(target=self._run, name="safepoint-preemption", daemon=True)

    def start(self) -> None:
        """Begin to look for a wish."""
        self._thread.start()

    def reached(self, step: int) -> bool:
        """See `Progress.reached`."""
        return self._progress.reached(step)

    @property
    def stop_step(self) -> int | None:
        """The step to stop at, once it is known."""
        return self._progress.stop_step

    def request(self, reason: str) -> None:
        """Wish to stop. From any thread; does not wait."""
        self._wish = self._wish or reason
        self._signals.wake()

    def close(self) -> None:
        """End the thread. If others are deciding with it, it stays for that, so that they are not held in vain."""
        self._is_closing = True
        self._signals.wake()
        self._thread.join(1.0)
        if self._thread.is_alive() and self._may_be_held:
            self._thread.join(self._hold_secs)

    def _run(self) -> None:
        try:
            reason = self._find_reason()
            if reason is not None:
                self.reason = reason
                self._decide(reason)
            while not self._is_closing:  # later signals change nothing; whoever shares the descriptor gets its own
                self._signals.wait(None)
        finally:
            if self.reason is not None and self._progress.stop_step is None:
                self._progress.settle_alone()
            self._view.close()

    # -- the wish ----------------------------------------------------------------------------------------------------

    def _find_reason(self) -> str | None:
        """Return why to stop, once this or another process has a reason; None when closing first."""
        every_secs = None  # alone: nobody to ask
        if self._view.process_count > 1:
            every_secs = max(_LOOK_EVERY_SECS, self._view.process_count / _LOOKS_PER_SEC)
        pause_secs = every_secs
        while not self._is_closing:
            number = self._signals.wait(pause_secs)
            if number is not None:
                self._wish = self._wish or signal_name(number)
            if self._wish is not None:
                return self._tell(f"{self._wish} on process {self._view.process_index}")
            if pause_secs is None:
                continue
            try:
                note = self._view.find_note(deadline_secs=_ASK_SECS)
            except _FAILURES as error:
                # Process 0 is stopped, or gone, of which the training hears in its own ways: ask less and less often.
                logger.debug("cannot ask whether another process wants to stop: %s", error)
                pause_secs = min(_LONGEST_PAUSE_SECS, 2 * pause_secs)
                continue
            if note is not None:
                return note.decode()
            pause_secs = every_secs
        return None

    def _tell(self, reason: str) -> str:
        text = reason.encode("ascii", "replace").decode()
        try:
            return self._view.leave_note(text.encode(), deadline_secs=self._hold_secs).decode()
        except _FAILURES as error:
            logger.warning("cannot tell the other processes of %s: %s", reason, error)
            return text

    # -- the decision ------------------------------------------------------------------------------------------------

    def _decide(self, reason: str) -> None:
        logger.warning("stopping soon, because of %s", reason)
        try:
            self._view.meet("preempted", b"", deadline_secs=self._deadline_secs)
            self._may_be_held = True
            limit = self._progress.hold(ahead_secs=_AHEAD_SECS if self._view.process_count > 1 else 0.0)
            held = time.monotonic()
            answer = self._view.meet(
                "stop step", json.dumps(limit).encode(), deadline_secs=self._hold_secs, decide=_one_above_all
            )
        except _FAILURES as error:
            logger.warning("no stop step could be agreed, so this process stops at its next one: %s", error)
            self._progress.settle_alone()
        else:
            self._progress.settle(json.loads(answer))
            self.held_secs = time.monotonic() - held
            logger.warning("all processes stop at step %s", answer.decode())


def _one_above_all(limits: Sequence[bytes]) -> bytes:
    return json.dumps(1 + max(json.loads(limit) for limit in limits)).encode()
