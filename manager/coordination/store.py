"""A line to the key-value store in which processes meet.

Owns the reading and writing of values of any size and the two ways in which a store fails a caller. Must not know what
the keys mean.

Facts this rests on (torch 2.9 and 2.13): a value above 8 MiB makes the server drop the connection, so values travel in
parts. `get` waits for a missing key, and a `wait` that times out writes to stderr, so nothing here waits inside the
store: `read` looks once, and callers look again. While the server's process is stopped every call hangs, whatever its
timeout says; so calls run on a `Worker`. When the process is gone, calls fail at once.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from safepoint.manager.coordination.worker import StuckError, Worker

__all__ = [
    "Line",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "StoreGoneError",
    "StoreStuckError",
    "TCPStore",
    "Values",
    "connect_tcp",
]

if TYPE_CHECKING:  # torch's stubs keep these elsewhere than torch does
    from collections.abc import Callable, Iterable

    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
else:
    from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

T = TypeVar("T")

_PART_BYTES = 4 << 20
_CALL_TIMEOUT = datetime.timedelta(seconds=10)
_ABSENT = "\x00absent"
_WHOLE, _PARTS = b"=", b"+"
_LAST_CALL_SECS = 0.5


class StoreGoneError(Exception):
    """Nothing listens at the store's address any more."""


class StoreStuckError(Exception):
    """The store did not answer by the deadline."""


class Values:
    """Values of any size in a store, under a prefix; used on the thread that owns the connection."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store: Any = store  # torch's stubs know text only, where it takes and gives bytes
        self._prefix = prefix

    def read(self, key: str) -> bytes | None:
        """Return the value, None if there is none; never wait for one."""
        head = self._look(key)
        if head is None or head[:1] == _WHOLE:
            return None if head is None else head[1:]
        parts = [self._look(f"{key}.{index}") for index in range(int(head[1:]))]
        return b"".join(part for part in parts if part is not None) if None not in parts else None

    def write(self, key: str, value: bytes) -> None:
        """Set the value; a reader sees all of it or none."""
        if len(value) <= _PART_BYTES:
            self._store.set(self._prefix + key, _WHOLE + value)
            return
        offsets = range(0, len(value), _PART_BYTES)
        for index, offset in enumerate(offsets):
            self._store.set(f"{self._prefix}{key}.{index}", value[offset : offset + _PART_BYTES])
        self._store.set(self._prefix + key, _PARTS + str(len(offsets)).encode())

    def claim(self, key: str, value: bytes) -> bytes:
        """Set a short value unless there is one, and return the one that is there now."""
        text = (_WHOLE + value).decode("ascii")
        return bytes(self._store.compare_set(self._prefix + key, "", text))[1:]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._store.add(self._prefix + key, amount))

    def forget(self, key: str) -> None:
        """Delete a counter, if it is there."""
        self._store.delete_key(self._prefix + key)

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all of these keys are set."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def erase(self, key: str, *, num_bytes: int | None = None) -> None:
        """Delete a value and its parts, if it is there; who knows its size saves reading it."""
        if num_bytes is None:
            head = self._look(key) or b""
            num_parts = int(head[1:]) if head[:1] == _PARTS else 0
        else:
            num_parts = 0 if num_bytes <= _PART_BYTES else -(-num_bytes // _PART_BYTES)
        self._store.delete_key(self._prefix + key)
        for index in range(num_parts):
            self._store.delete_key(f"{self._prefix}{key}.{index}")

    def _look(self, key: str) -> bytes | None:
        # compare_set with an expected value that nobody ever sets: the only read that returns at once either way.
        found = bytes(self._store.compare_set(self._prefix + key, _ABSENT, _ABSENT))
        return None if found == _ABSENT.encode() else found


class Line:
    """Calls to a store, each ended by the caller's deadline, one at a time and in order.

    Args:
        name: for the thread.
        connect: makes a connection of its own; raises OSError or RuntimeError if nothing is there.
        prefix: of all keys.
    """

    def __init__(self, name: str, connect: Callable[[], Store], prefix: str) -> None:
        self._worker: Worker[Values] = Worker(name, lambda: Values(connect(), prefix))

    def call(self, call: Callable[[Values], T], *, until: float, meanwhile: Callable[[], None] | None = None) -> T:
        """Return what `call` returns; it may run twice, when a connection broke and another could be made.

        Raises:
            StoreStuckError: no answer by `until` (monotonic clock).
            StoreGoneError: the connection broke and nothing listens there any more.
        """
        try:
            try:
                return self._worker.run(call, until=until, meanwhile=meanwhile)
            except (OSError, dist.DistError):
                self._worker.renew()
                return self._worker.run(call, until=until, meanwhile=meanwhile)
        except StuckError:
            raise StoreStuckError from None
        except (OSError, dist.DistError) as error:
            self._worker.renew()
            raise StoreGoneError(str(error).split("\n", maxsplit=1)[0]) from error

    def last_call(self, call: Callable[[Values], object]) -> None:
        """Try for a moment, and let it be done late, or never, if the store does not answer."""
        with contextlib.suppress(StoreStuckError, StoreGoneError):
            self.call(call, until=time.monotonic() + _LAST_CALL_SECS)

    def post(self, call: Callable[[Values], object]) -> None:
        """Have this done before any later call, whenever the store answers, and do not wait."""
        self._worker.post(call)

    def close(self) -> None:
        """Let go of the connection."""
        self._worker.close(within_secs=_LAST_CALL_SECS)


def connect_tcp(host: str, port: int, *, timeout_secs: float = 10.0) -> TCPStore:
    """Connect to a TCPStore, failing at once where nothing listens (its own constructor tries again for long)."""
    socket.create_connection((host, port), timeout=timeout_secs).close()
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_CALL_TIMEOUT)
