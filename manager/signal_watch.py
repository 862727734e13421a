"""Signals as they come, for a thread that waits for them, with everybody else's handlers still run.

Owns the handlers of some signals while it is open, and the file descriptor to which the interpreter writes their
numbers. Must not know what a signal is for.

Python runs a handler between two instructions of the main thread: while that is in a long call of C code (a collective
that waits for a peer, say) nothing happens. But the interpreter writes the signal's number to its wake-up descriptor
at once, from the real handler, and a thread that reads the other end learns of it whatever the main thread does.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from safepoint.manager.errors import InvalidArgumentError

__all__ = ["NativeAction", "SignalWatch", "signal_name"]

_WAKE = b"\x00"  # no signal has this number
_READ_BYTES = 4096
_Handler = Callable[[int, FrameType | None], Any] | int | None


class SignalWatch:
    """Catches signals from construction to `close`.

    A handler that was there before still runs, on the main thread, at each of its signals. The system's default does
    not (ending the process is what there is to prevent), nor does Python's own handler of SIGINT at the first one: at
    the second it raises KeyboardInterrupt as ever. A process forked meanwhile has the handlers of before.

    Args:
        signals: which; none is fine, for a process whose main thread is not the caller.

    Attributes:
        native: by signal, what C code had put there before, unknown to Python.

    Raises:
        InvalidArgumentError: not called on the main thread, or a signal that cannot be caught.
    """

    def __init__(self, signals: Iterable[int]) -> None:
        self.signals = tuple(dict.fromkeys(signals))
        self.native: dict[int, NativeAction] = {}
        self._counts: Counter[int] = Counter()
        self._former: dict[int, _Handler] = {}
        self._first: int | None = None
        self._is_open = True
        self._fd_is_ours = False
        self._former_fd = -1
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        _open_watches.add(self)
        try:
            if self.signals:
                self._install()
        except BaseException:
            self.close()
            raise

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise InvalidArgumentError(
                "signals can be caught by the main thread only, and this is another",
                hint="Make this call on the main thread, or pass signals=() and tell of a preemption by request().",
            )
        # In this order: from the first handler on, every signal is told through the descriptor.
        self._former_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        self._fd_is_ours = True
        for number in self.signals:
            try:
                before = NativeAction.of(number)
                self._former[number] = signal.signal(number, self._handle)
            except (TypeError, ValueError, OSError) as error:
                raise InvalidArgumentError(f"signal {number!r} cannot be caught: {error}") from None
            if before.is_function and before.address != NativeAction.of(number).address:
                self.native[number] = before

    @property
    def num_caught(self) -> int:
        """How many of the signals have come."""
        return self._counts.total()

    def wait(self, secs: float | None) -> int | None:
        """Wait for the next signal or `wake`, and return the first of the signals that ever came, if one did.

        Called by one thread, not the one that handles signals.

        Args:
            secs: how long at most; None: as long as it takes.
        """
        poll = select.poll()
        poll.register(self._read_fd, select.POLLIN)
        ready = poll.poll(None if secs is None else secs * 1000)
        told = os.read(self._read_fd, _READ_BYTES) if ready else b""
        self._forward(told.replace(_WAKE, b""))
        if self._first is None:
            self._first = next((number for number in (*told, *self._counts) if number in self.signals), None)
        return self._first

    def wake(self) -> None:
        """Make `wait` return. From any thread, or a handler."""
        with contextlib.suppress(OSError):  # full: then it returns anyway
            os.write(self._write_fd, _WAKE)

    def _forward(self, told: bytes) -> None:
        """Tell whoever used the descriptor before, an event loop for example."""
        if told and self._former_fd != -1:
            with contextlib.suppress(OSError):
                os.write(self._former_fd, told)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._counts[number] += 1
        former = self._former.get(number)
        if not self._is_open:
            # Closed where the handler could not be put back: another one has this as its own former one.
            _pass_on(number, frame, former)
            return
        self.wake()
        if callable(former) and (former is not signal.default_int_handler or self._counts[number] > 1):
            former(number, frame)

    def close(self) -> None:
        """Put back what was there before. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        _open_watches.discard(self)
        if threading.current_thread() is threading.main_thread():
            self._put_back()
        # The write end stays open as long as the interpreter may write to it.
        os.close(self._read_fd)
        if not self._fd_is_ours:
            os.close(self._write_fd)

    def _put_back(self) -> None:
        for number, former in self._former.items():
            # Whoever came later keeps its handler, which may call this one; this one passes everything on.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if former is None else former)
                if number in self.native:
                    self.native[number].install(number)
        if self._fd_is_ours:
            current = signal.set_wakeup_fd(-1)
            self._fd_is_ours = False
            with contextlib.suppress(ValueError, OSError):  # the former one may be closed by now
                signal.set_wakeup_fd(self._former_fd if current == self._write_fd else current)

    def _forget(self) -> None:
        """In a process just forked: leave the parent's pipe alone, and have the handlers of before."""
        with contextlib.suppress(ValueError, OSError):
            self.close()


def signal_name(number: int) -> str:
    """Return "SIGTERM", or the number of a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _pass_on(number: int, frame: FrameType | None, former: _Handler) -> None:
    if callable(former):
        former(number, frame)
    elif former == signal.SIG_DFL:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


_open_watches: weakref.WeakSet[SignalWatch] = weakref.WeakSet()


def _forget_all() -> None:
    for watch in list(_open_watches):
        watch._forget()  # noqa: SLF001 - this module's own


os.register_at_fork(after_in_child=_forget_all)


class NativeAction(ctypes.Structure):
    """What the system does at a signal (`struct sigaction`), which C code can change behind Python's back."""

    _fields_ = (("_address", ctypes.c_void_p), ("_rest", ctypes.c_byte * 248))

    @classmethod
    def of(cls, number: int) -> NativeAction:
        """Return what is installed.

        Raises:
            OSError: there is no such signal.
        """
        action = cls()
        _sigaction(number, None, ctypes.byref(action))
        return action

    @property
    def address(self) -> int:
        """Address of the handler; 0 and 1 are the system's default and ignoring."""
        return int(self._address or 0)

    @property
    def is_function(self) -> bool:
        """Whether there is a handler to call."""
        return self.address > 1

    def install(self, number: int) -> None:
        """Put this back."""
        _sigaction(number, ctypes.byref(self), None)

    def call(self, number: int) -> None:
        """Call the handler, one of the kind that takes the number alone."""
        ctypes.CFUNCTYPE(None, ctypes.c_int)(self.address)(number)


def _sigaction(number: int, new: Any, old: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.sigaction(ctypes.c_int(number), new, old) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
