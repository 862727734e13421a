"""A line to the key-value store in which processes meet.

Owns the reading and writing of values of any size and the two ways in which a store fails a caller. Must not know what
the keys mean.

Facts this rests on (torch 2.9 and 2.13): a value above 8 MiB makes the server drop the connection, so values travel in
parts. `get` waits for a missing key, so `read` looks once. `wait` sleeps until the server says that the key is there,
which costs nothing meanwhile; but it keeps its connection from being used, and when it times out it writes to stderr.
So who waits has a second line for all else, and ends its wait by setting the key. While the server's process is stopped
every call hangs, whatever its timeout says; so calls run on a `Worker`. When the process is gone, calls and waits fail
at once. Other stores than TCPStore, in which a training's group may meet, are asked again and again.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from safepoint.manager.coordination.worker import StuckError, Worker
from safepoint.manager.errors import CheckpointError

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
    from collections.abc import Callable, Iterable, Sequence

    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore
else:
    from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore

T = TypeVar("T")

_PART_BYTES = 4 << 20
_KEYS_AT_ONCE = 16
_CALL_TIMEOUT = datetime.timedelta(seconds=10)
_ABSENT = "\x00absent"
_WHOLE, _PARTS = b"=", b"+"
_LAST_CALL_SECS = 0.5
_SHORTEST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 0.001, 0.05


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

    def replace(self, key: str, expected: bytes, value: bytes) -> None:
        """Set a short value if another short one is there now."""
        old, new = ((_WHOLE + text).decode("ascii") for text in (expected, value))
        self._store.compare_set(self._prefix + key, old, new)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its new value."""
        return int(self._store.add(self._prefix + key, amount))

    def forget(self, key: str) -> None:
        """Delete a counter, a bell or a claimed value, if it is there."""
        self._store.delete_key(self._prefix + key)

    def has(self, keys: Iterable[str]) -> bool:
        """Return whether all of these keys are set."""
        return bool(self._store.check([self._prefix + key for key in keys]))

    def read_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys that are set, several at a time where the store can."""
        if not self._store.has_extended_api():
            return [self.read(key) for key in keys]
        values: list[bytes | None] = []
        for some in (keys[first : first + _KEYS_AT_ONCE] for first in range(0, len(keys), _KEYS_AT_ONCE)):
            heads = map(bytes, self._store.multi_get([self._prefix + key for key in some]))
            found = zip(some, heads, strict=True)
            values += [head[1:] if head[:1] == _WHOLE else self.read(key) for key, head in found]
        return values

    def ring(self, key: str) -> None:
        """Let those who wait for this key look again."""
        self._store.set(self._prefix + key, _WHOLE)

    def free(self, key: str) -> None:
        """Let those who wait for this key now look again, and leave nothing for those who come."""
        self.ring(key)
        self.forget(key)

    def wait(self, key: str, *, until: float, is_over: Callable[[], bool]) -> None:
        """Sleep until the key is set; or wake for nothing, as when somebody reads the key while it is absent.

        Args:
            key: to wait for.
            until: deadline on the monotonic clock, for a wait that nobody ended.
            is_over: whether there is nothing to wait for any more; asked before sleeping.

        Raises:
            StoreStuckError: the deadline came.
        """
        pause_secs = _SHORTEST_PAUSE_SECS
        while not is_over():
            if (left := until - time.monotonic()) <= 0:
                raise StoreStuckError
            if isinstance(self._store, TCPStore):
                self._store.wait([self._prefix + key], datetime.timedelta(seconds=left))
                return
            if self.has([key]):
                return
            time.sleep(pause_secs)
            pause_secs = min(_LONGEST_PAUSE_SECS, 1.05 * pause_secs)

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

    def call(self, call: Callable[[Values], T], *, until: float, meanwhile: Callable[[], float] | None = None) -> T:
        """Return what `call` returns; it may run twice, when a connection broke and another could be made.

        `meanwhile` is called on this thread every so often: see `Worker.run`.

        Raises:
            StoreStuckError: no answer by `until` (monotonic clock).
            StoreGoneError: the connection broke and nothing listens there any more.
        """
        try:
            try:
                return self._worker.run(call, until=until, meanwhile=meanwhile)
            except CheckpointError:
                raise  # by `meanwhile`, and no word of the store's, even if it is an OSError
            except (OSError, dist.DistError):
                self._worker.renew()
                return self._worker.run(call, until=until, meanwhile=meanwhile)
        except CheckpointError:
            raise
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
