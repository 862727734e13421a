"""A storage that fails, stalls or kills its process at the k-th call, for sweeps over every k.

    storage = FaultyStorage(LocalStorage(root))                       # first run: count
    run(storage); total = storage.num_calls
    for k in range(1, total + 1):
        run(FaultyStorage(LocalStorage(root), at=k, fault=Fail(errno.EIO)))

Calls of the writers and readers that it hands out count too, as "writer.append", "reader.read_into", …. With `only`,
other calls pass uncounted. `log` has every call in order, counted or not.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from safepoint.formats.checksum import BLOCK_BYTES
from safepoint.formats.errors import StorageError
from safepoint.formats.storage import Entry, FileReader, FileWriter, Storage, VersionedBytes, WrittenFile

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable

    from typing_extensions import Buffer

__all__ = ["Call", "Fail", "Fault", "FaultyStorage", "Kill", "Stall"]

_T = TypeVar("_T")

_NEVER_FAIL = frozenset({"writer.abort", "reader.close", "free_bytes"})
"""Calls that raise no StorageError, by their contract: a `Fail` lets them pass, and `fired` stays false."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its name and the path, or the paths, that it was about."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Raise a StorageError.

    Attributes:
        number: the errno.
        done: whether the call takes effect all the same, as when only the answer is lost.
    """

    number: int = errno.EIO
    done: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True)
class Kill:
    """End this process with SIGKILL before the call takes effect."""


@dataclass(frozen=True, slots=True)
class Stall:
    """Wait before the call until `resume` is set; `reached` tells that it waits."""

    resume: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)


Fault = Fail | Kill | Stall


class FaultyStorage(Storage):
    """`inner`, with one fault (or several, one after another) at chosen calls."""

    def __init__(
        self,
        inner: Storage,
        *,
        at: int | None = None,
        times: int | None = 1,
        fault: Fault | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        """Wrap a storage.

        Args:
            inner: does the work.
            at: the counted call, from 1, that meets the fault; None for no fault.
            times: how many counted calls from that one on do; None for all.
            fault: what happens.
            only: names of the calls that count; None for all.
        """
        self.inner = inner
        self.location = inner.location
        self.renames = inner.renames
        self.part_bytes = inner.part_bytes
        self.num_streams = inner.num_streams
        self.read_bytes = inner.read_bytes
        self.is_remote = inner.is_remote
        self.log: list[Call] = []
        self.num_calls = 0
        self.fired = 0
        self._at = at
        self._times = times
        self._fault = fault if fault is not None else Fail()
        self._only = only
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        """How often each call was made, by name."""
        with self._lock:
            return Counter(call.name for call in self.log)

    def call(self, name: str, path: str, action: Callable[[], _T], *, undo: Callable[[], None] | None = None) -> _T:
        """Count a call, then do it or meet the fault; `undo` is what a failed call leaves behind by its contract."""
        fault = self._next_fault(name, path)
        if isinstance(fault, Kill):
            os.kill(os.getpid(), signal.SIGKILL)
        if isinstance(fault, Stall):
            fault.reached.set()
            fault.resume.wait()
        if not isinstance(fault, Fail):
            return action()
        if undo is not None:
            undo()
        elif fault.done:
            action()
        raise StorageError(
            f"injected into {name}: {os.strerror(fault.number)}", path=self.describe(path), errno=fault.number
        )

    def _next_fault(self, name: str, path: str) -> Fault | None:
        with self._lock:
            self.log.append(Call(name, path))
            if self._only is not None and name not in self._only:
                return None
            self.num_calls += 1
            if self._at is None or self.num_calls < self._at:
                return None
            if self._times is not None and self.num_calls >= self._at + self._times:
                return None
            if isinstance(self._fault, Fail) and name in _NEVER_FAIL:
                return None
            self.fired += 1
            return self._fault

    @override
    def describe(self, path: str) -> str:
        return self.inner.describe(path)

    @override
    def make_dir(self, path: str, *, exist_ok: bool = True) -> None:
        self.call("make_dir", path, lambda: self.inner.make_dir(path, exist_ok=exist_ok))

    @override
    def list(self, path: str) -> list[Entry]:
        return self.call("list", path, lambda: self.inner.list(path))

    @override
    def size(self, path: str, *, expected: int | None = None) -> int | None:
        return self.call("size", path, lambda: self.inner.size(path, expected=expected))

    @override
    def get(self, path: str, *, max_bytes: int) -> bytes:
        return self.call("get", path, lambda: self.inner.get(path, max_bytes=max_bytes))

    @override
    def put(self, path: str, data: bytes) -> None:
        self.call("put", path, lambda: self.inner.put(path, data))

    @override
    def put_if_absent(self, path: str, data: bytes) -> bool:
        return self.call("put_if_absent", path, lambda: self.inner.put_if_absent(path, data))

    @override
    def replace(self, path: str, data: bytes) -> None:
        self.call("replace", path, lambda: self.inner.replace(path, data))

    @override
    def read_versioned(self, path: str, *, max_bytes: int) -> VersionedBytes | None:
        return self.call("read_versioned", path, lambda: self.inner.read_versioned(path, max_bytes=max_bytes))

    @override
    def put_if_unchanged(self, path: str, data: bytes, version: Hashable) -> bool:
        return self.call("put_if_unchanged", path, lambda: self.inner.put_if_unchanged(path, data, version))

    @override
    def delete_if_unchanged(self, path: str, version: Hashable) -> bool:
        return self.call("delete_if_unchanged", path, lambda: self.inner.delete_if_unchanged(path, version))

    @override
    def rename_dir(self, source: str, target: str) -> bool:
        return self.call("rename_dir", f"{source} -> {target}", lambda: self.inner.rename_dir(source, target))

    @override
    def sync_dir(self, path: str) -> None:
        self.call("sync_dir", path, lambda: self.inner.sync_dir(path))

    @override
    def delete(self, path: str) -> None:
        self.call("delete", path, lambda: self.inner.delete(path))

    @override
    def delete_tree(self, path: str) -> None:
        self.call("delete_tree", path, lambda: self.inner.delete_tree(path))

    @override
    def delete_dir(self, path: str) -> bool:
        return self.call("delete_dir", path, lambda: self.inner.delete_dir(path))

    @override
    def free_bytes(self) -> int | None:
        return self.call("free_bytes", "", self.inner.free_bytes)

    @override
    def link_file(self, source: str, target: str) -> bool:
        return self.call("link_file", f"{source} -> {target}", lambda: self.inner.link_file(source, target))

    @override
    def open_writer(self, path: str, *, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> FileWriter:
        def open_inner() -> FileWriter:
            return self.inner.open_writer(path, num_bytes=num_bytes, block_bytes=block_bytes)

        return _FaultyWriter(self, path, self.call("open_writer", path, open_inner))

    @override
    def open_reader(self, path: str, *, num_bytes: int | None = None) -> FileReader:
        def open_inner() -> FileReader:
            return self.inner.open_reader(path, num_bytes=num_bytes)

        return _FaultyReader(self, path, self.call("open_reader", path, open_inner))


class _FaultyWriter(FileWriter):
    def __init__(self, storage: FaultyStorage, path: str, inner: FileWriter) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    @override
    def append(self, data: Buffer) -> None:
        self._storage.call("writer.append", self._path, lambda: self._inner.append(data))

    @override
    def finish(self) -> WrittenFile:
        # A writer that could not finish has removed its file.
        return self._storage.call("writer.finish", self._path, self._inner.finish, undo=self._inner.abort)

    @override
    def abort(self) -> None:
        self._storage.call("writer.abort", self._path, self._inner.abort)


class _FaultyReader(FileReader):
    def __init__(self, storage: FaultyStorage, path: str, inner: FileReader) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner
        self.num_bytes = inner.num_bytes

    @override
    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._storage.call("reader.read_into", self._path, lambda: self._inner.read_into(offset, buffer))

    @override
    def bypass_cache(self) -> None:
        self._inner.bypass_cache()

    @override
    def expect_in_order(self) -> None:
        self._inner.expect_in_order()

    @override
    def close(self) -> None:
        self._storage.call("reader.close", self._path, self._inner.close)
