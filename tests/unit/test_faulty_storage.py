"""The fault injection that other tests rely on."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from safepoint.formats.errors import StorageError
from safepoint.formats.storage import MemoryStorage, Storage

from support.faulty_storage import Fail, FaultyStorage, Stall


def memory() -> MemoryStorage:
    storage = MemoryStorage()
    storage.make_dir("")
    return storage


def work(storage: Storage) -> None:
    storage.make_dir("a")
    with storage.open_writer("a/f", num_bytes=2) as writer:
        writer.append(b"1")
        writer.append(b"2")
        writer.finish()
    with storage.open_reader("a/f") as reader:
        reader.read_into(0, memoryview(bytearray(2)))
    storage.free_bytes()
    assert storage.rename_dir("a", "b")


def test_every_call_is_counted_by_name_and_in_order() -> None:
    storage = FaultyStorage(memory())
    work(storage)
    assert [call.name for call in storage.log] == [
        *("make_dir", "open_writer", "writer.append", "writer.append", "writer.finish", "writer.abort"),
        *("open_reader", "reader.read_into", "reader.close", "free_bytes", "rename_dir"),
    ]
    assert storage.num_calls == 11
    assert storage.counts["writer.append"] == 2
    assert storage.log[-1].path == "a -> b"


def test_the_kth_call_fails_with_the_given_errno_for_every_k() -> None:
    for at in range(1, 12):
        storage = FaultyStorage(memory(), at=at, fault=Fail(errno.ENOSPC))
        try:
            work(storage)
        except StorageError as error:
            assert error.errno == errno.ENOSPC  # noqa: PT017
            assert storage.fired == 1
        else:
            assert not storage.fired
            assert storage.log[at - 1].name in ("writer.abort", "reader.close", "free_bytes")
        if at <= 6:
            assert storage.inner.list("a") == [] or not storage.fired


def test_a_failure_may_come_after_the_effect() -> None:
    storage = FaultyStorage(memory(), at=1, fault=Fail(errno.EIO, done=True), only={"rename_dir"})
    with pytest.raises(StorageError):
        work(storage)
    assert [entry.name for entry in storage.inner.list("")] == ["b"]


def test_all_later_calls_may_fail_too() -> None:
    storage = FaultyStorage(memory(), at=2, times=None, only={"put"})
    storage.put("a", b"")
    for _ in range(3):
        with pytest.raises(StorageError):
            storage.put("b", b"")
    assert storage.fired == 3


def test_a_stalled_call_waits_until_it_is_resumed() -> None:
    stall = Stall()
    storage = FaultyStorage(memory(), at=1, fault=stall)
    caller = threading.Thread(target=storage.put, args=("f", b"1"))
    caller.start()
    assert stall.reached.wait(10)
    assert storage.inner.list("") == []
    stall.resume.set()
    caller.join()
    assert storage.inner.size("f") == 1


def test_a_kill_ends_the_process_before_the_call(tmp_path: Path) -> None:
    script = f"""
from safepoint.formats.storage import LocalStorage
from support.faulty_storage import FaultyStorage, Kill
storage = FaultyStorage(LocalStorage({str(tmp_path)!r}), at=2, fault=Kill())
storage.put("first", b"")
storage.put("second", b"")
"""
    tests = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", script], cwd=tests, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
