"""One fault at the k-th call of a process, counted over its storage, its coordinator and its transport together.

    install(Trigger(kind="kill", at=17))        # in the process that is to suffer it, before its manager is opened

With `at=None` it only counts. Faults of storage calls: an error number, a lost answer (the call took effect, then
fails). Faults of calls to other processes: a deadline that passes, a lost answer. Of either: the thread stalls, the
whole process is stopped (SIGSTOP), the process is killed (SIGKILL), the program leaves (`sys.exit`).
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import override

from safepoint.formats.errors import StorageError
from safepoint.formats.storage import LocalStorage
from safepoint.manager import owner, session
from safepoint.manager.coordination import distributed
from safepoint.manager.coordination.single import SingleProcess
from safepoint.manager.coordination.transport import GlooTransport
from safepoint.manager.errors import RendezvousTimeoutError

from support.faulty_storage import FaultyStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.storage import Storage

__all__ = ["KINDS", "Trigger", "TriggeredStorage", "install"]

_T = TypeVar("_T")

KINDS = ("EIO", "ENOSPC", "EACCES", "ETIMEDOUT", "lost", "stall", "stop", "kill")

_CANNOT_FAIL = frozenset({"writer.abort", "reader.close", "free_bytes"})
_PROCESS_FAULTS = frozenset({"stall", "stop", "kill", "exit"})


@dataclass(kw_only=True)
class Trigger:
    """Counts calls, and lets one of them meet its fault.

    Attributes:
        kind: one of `KINDS`, or "exit".
        at: the call, from 1; None for none.
        stall_secs: how long a thread that stalls is held up, in seconds.
        log: every call so far.
        fired: what met the fault; "" as long as none did.
        on_fire: told of it before the fault takes effect.
        process: the one that suffers it, to be named by the errors that are injected.
    """

    kind: str = "EIO"
    at: int | None = None
    stall_secs: float = 0.0
    log: list[str] = field(default_factory=list)
    fired: str = ""
    on_fire: Callable[[str], object] | None = None
    process: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def call(
        self,
        name: str,
        action: Callable[[], _T],
        *,
        error: Callable[[], Exception] | None,
        undo: Callable[[], None] | None = None,
    ) -> _T:
        """Do `action`, or meet the fault.

        Args:
            name: of the call.
            action: the call.
            error: makes the error of a call that fails; None for calls that the fault cannot make fail.
            undo: what a failed call leaves behind by its contract.
        """
        with self._lock:
            self.log.append(name)
            hit = len(self.log) == self.at and (error is not None or self.kind in _PROCESS_FAULTS)
        if not hit:
            return action()
        self.fired = name
        if self.on_fire is not None:
            self.on_fire(name)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "exit":
            raise SystemExit(3)
        if self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "stall":
            time.sleep(self.stall_secs)
        if self.kind in _PROCESS_FAULTS:
            return action()
        assert error is not None
        if undo is not None:
            undo()
        elif self.kind == "lost":
            action()
        raise error()


class TriggeredStorage(FaultyStorage):
    """A storage whose calls go through a trigger."""

    def __init__(self, inner: Storage, trigger: Trigger) -> None:
        super().__init__(inner)
        self._trigger = trigger

    @override
    def call(self, name: str, path: str, action: Callable[[], _T], *, undo: Callable[[], None] | None = None) -> _T:
        number = errno.EIO if self._trigger.kind == "lost" else getattr(errno, self._trigger.kind, errno.EIO)

        def error() -> Exception:
            text = f"injected into {name}: {os.strerror(number)}"
            return StorageError(text, path=self.describe(path), errno=number)

        fails = None if name in _CANNOT_FAIL else error
        return self._trigger.call(f"storage.{name} {path}", action, error=fails, undo=undo)


_STORAGE_KINDS = frozenset({"EIO", "ENOSPC", "EACCES"})
_COORDINATOR_CALLS = ("sync_devices", "meet", "share_blob", "fetch_blob", "open_transport")


def install(trigger: Trigger) -> None:
    """Send all calls of managers that this process opens from now on through the trigger."""

    def make_storage(root: Any) -> Storage:
        return TriggeredStorage(LocalStorage(root), trigger)

    session.LocalStorage = make_storage  # type: ignore[misc, assignment]
    owner.LocalStorage = make_storage  # type: ignore[misc, assignment]
    for name in _COORDINATOR_CALLS:
        for kind in (distributed.StoreCoordinator, SingleProcess):
            _wrap(kind, name, f"coordinator.{name}", trigger)
    for name in ("send", "receive"):
        _wrap(GlooTransport, name, f"transport.{name}", trigger)


def _wrap(kind: type, name: str, label: str, trigger: Trigger) -> None:
    original = getattr(kind, name)

    def error() -> Exception:
        return RendezvousTimeoutError(f"injected into {label}", absent=(trigger.process,), deadline_secs=0.0)

    # A device that does not answer is no matter of this project, and a mere count of calls fails with neither error.
    fails = None if trigger.kind in _STORAGE_KINDS or name == "sync_devices" else error

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        what = f"{label} {args[0]}" if name == "meet" else label
        return trigger.call(what, lambda: original(self, *args, **kwargs), error=fails)

    setattr(kind, name, wrapped)
