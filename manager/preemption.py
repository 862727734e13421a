"""A signal on any one process, one agreed last step on all: what the training loop sees of a preemption.

Owns `Preemption`, and the use of torch_xla's own preemption sync point where that is active. The agreement elsewhere is
in `stop_decision`, the catching of signals in `signal_watch`. Must not know of states or of saves.

torch_xla's sync point is active once `_activate_preemption_sync_manager` was called, by torch_xla's own checkpoint
manager or by the user. It makes the same agreement between the hosts of XLA's coordinator, and catches SIGTERM with a
handler in C, so that what Python had there no longer runs. Two agreements would find two stop steps: where it is active
on all processes it decides, and its handler is called from ours, so that everybody's runs.
"""

from __future__ import annotations

import itertools
import logging
import signal
import sys
import threading
from typing import TYPE_CHECKING, Protocol, Self

from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.events import Preempted
from safepoint.manager.options import check_step
from safepoint.manager.signal_watch import SignalWatch, signal_name
from safepoint.manager.stop_decision import StopWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from safepoint.manager.coordination import Coordinator

__all__ = ["Preemption"]

logger = logging.getLogger("safepoint")

_NEVER_USED = -2  # -1 means "none" to torch_xla's sync point, which takes it for reached
_calls = itertools.count(1)


class Preemption:
    """Catches the notice of a preemption on any process, and tells the loops of all of them where to stop.

    Made by `CheckpointManager.preemption`, which says more. A context manager; leaving it puts the signal handlers back
    that were there before.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        name: str,
        signals: Iterable[int],
        deadline_secs: float,
        open_secs: float,
        drain: Callable[[], None],
        tell: Callable[[Preempted], None],
    ) -> None:
        """Catch the signals, then meet, so that from here on every process can be asked for its step.

        Called by: all processes.

        Args:
            coordinator: whose view of this name to use.
            name: of the view; a new one each time that this succeeds.
            signals: what to catch.
            deadline_secs: for the other processes to answer when one is preempted.
            open_secs: for the other processes to come here.
            drain: waits for the save in flight.
            tell: told once, when this process is to stop.
        """
        if not deadline_secs > 0:
            raise InvalidArgumentError(f"deadline_secs must be positive, not {deadline_secs!r}")
        self._drain = drain
        self._tell: Callable[[Preempted], None] | None = tell
        self._is_open = True
        self._signals = SignalWatch(signals)
        view = coordinator.background(name)
        try:
            sync_point = _XlaSyncPoint.find(self._signals)
            own = b"store" if sync_point is None else b"xla"
            agreed = view.meet("preemption", own, deadline_secs=open_secs, decide=_common_way)
        except BaseException:
            self._signals.close()  # the view stays, for the next try of all: meetings survive one that was missed
            raise
        self._agreement: _Agreement
        if sync_point is not None and agreed == b"xla":
            view.close()
            self._agreement = sync_point
        else:
            self._agreement = StopWatcher(view, self._signals, deadline_secs=deadline_secs)
        self._agreement.start()

    def should_stop(self, step: int) -> bool:
        """Return whether this step is the last one, on all processes.

        Called by all processes, once a step, at the same place in the loop; save the step if it returns True. It is
        local: it takes microseconds, does no input or output, and waits for no other process's training.

        Raises:
            InvalidArgumentError: the step is not a whole number of at least 0, or this is closed.
        """
        if not self._is_open:
            raise InvalidArgumentError("no preemption is watched for any more", hint="Call this inside the block.")
        is_last = self._agreement.reached(step if type(step) is int and step >= 0 else check_step(step))
        if is_last and self._tell is not None:
            tell, self._tell = self._tell, None
            tell(Preempted(step=step, reason=self.reason or ""))
        return is_last

    def request(self, reason: str = "a request") -> None:
        """Stop all processes as a signal would. From any thread of any process; returns at once.

        For notices that come in other ways: from a cloud's metadata server, or before a time limit.

        Args:
            reason: for the log, on all processes.
        """
        self._agreement.request(reason)

    @property
    def reason(self) -> str | None:
        """Why all stop, such as "SIGTERM on process 1"; None as long as this process knows of nothing."""
        return self._agreement.reason

    @property
    def stop_step(self) -> int | None:
        """The agreed step; None before there is one. The loop stops at its first boundary from this step on."""
        return self._agreement.stop_step

    def close(self) -> None:
        """Wait for the save in flight, then put the signal handlers back. Idempotent.

        `CheckpointManager.close` does it too. Called on the main thread; elsewhere the handlers stay, and pass every
        signal on to those that were there before.
        """
        if not self._is_open:
            return
        self._is_open = False
        try:
            self._drain()
        finally:
            self._agreement.close()
            self._signals.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Agreement(Protocol):
    """What makes the processes stop at one step."""

    @property
    def reason(self) -> str | None: ...

    @property
    def stop_step(self) -> int | None: ...

    def start(self) -> None: ...

    def reached(self, step: int) -> bool: ...

    def request(self, reason: str) -> None: ...

    def close(self) -> None: ...


def _common_way(brought: Sequence[bytes]) -> bytes:
    return b"xla" if all(way == b"xla" for way in brought) else b"store"


class _XlaSyncPoint:
    """torch_xla's preemption sync point, as this process sees it.

    It compares for equality with the step that it is told, so a step that is left out would be missed: it is told the
    number of the call instead, which no process leaves out.
    """

    def __init__(self, reached: Callable[[int], bool], signals: SignalWatch) -> None:
        self.reason: str | None = None
        self.stop_step: int | None = None
        self._reached = reached
        self._signals = signals
        self._native = signals.native[signal.SIGTERM]
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="safepoint-preemption", daemon=True)

    @classmethod
    def find(cls, signals: SignalWatch) -> Self | None:
        """Return it where it is active, and its handler was still in place. Initialises no runtime."""
        if "torch_xla" not in sys.modules:
            return None
        import torch_xla  # noqa: PLC0415 - optional, and only where the user has imported it

        if not torch_xla._XLAC._xla_runtime_is_initialized():  # noqa: SLF001 - it has no public name
            return None
        reached: Callable[[int], bool] = torch_xla._XLAC._sync_point_reached  # noqa: SLF001 - it has no public name either
        try:
            reached(_NEVER_USED)
            reached(0)
        except RuntimeError:
            return None
        if signal.SIGTERM not in signals.native:
            logger.warning(
                "torch_xla's preemption sync point is active, but SIGTERM is not caught by it and by this manager: the "
                "processes agree through the store of the manager instead."
            )
            return None
        return cls(reached, signals)

    def start(self) -> None:
        """Begin to pass signals on."""
        self._thread.start()

    def reached(self, step: int) -> bool:
        """Return whether the sync point is here or was before."""
        if self.stop_step is None and self._reached(next(_calls)):
            self.stop_step = step
            self.reason = self.reason or "a signal on another process"
        return self.stop_step is not None

    def request(self, reason: str) -> None:
        """Tell torch_xla that its signal has come."""
        self.reason = self.reason or reason
        self._native.call(signal.SIGTERM)

    def close(self) -> None:
        """End the thread."""
        self._is_closing = True
        self._signals.wake()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._is_closing:
            number = self._signals.wait(None)
            if number is not None and self.reason is None:
                self.request(signal_name(number))
