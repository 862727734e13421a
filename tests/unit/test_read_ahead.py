"""Runs that are read ahead: in order, no further than allowed, with an error where it belongs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.entries import FileEntry
from safepoint.formats.errors import StorageError
from safepoint.formats.run_reading import BlockRun
from safepoint.formats.storage.buffers import BUFFERS
from safepoint.manager.read_ahead import ReadAhead

if TYPE_CHECKING:
    from collections.abc import Iterator

FILES = [FileEntry(path="f", num_bytes=950, block_bytes=100, digests=("",) * 10, process_index=0, attempt="a")]
RUNS = [BlockRun(0, number, number) for number in range(10)]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "safepoint-ahead"]
    assert BUFFERS.lent_bytes == 0


def test_runs_come_in_order_whichever_is_read_first() -> None:
    second_is_read = threading.Event()

    def read(run: BlockRun, buffer: memoryview) -> None:
        if run.first == 0:
            assert second_is_read.wait(10)
        if run.first == 1:
            second_is_read.set()
        buffer[:] = bytes([run.first]) * len(buffer)

    ahead = ReadAhead(RUNS, FILES, read, num_threads=2)
    for run in RUNS:
        buffer = ahead.take()
        assert buffer[:50] == bytes([run.first]) * 50
        BUFFERS.give_back(buffer)
    ahead.close()


def test_no_more_is_read_ahead_than_allowed() -> None:
    begun: list[int] = []
    ahead = ReadAhead(RUNS, FILES, lambda run, _: begun.append(run.first), num_threads=3, ahead_bytes=250)
    for number in range(len(RUNS)):
        BUFFERS.give_back(ahead.take())
        assert len(begun) <= number + 3
    ahead.close()


def test_an_error_is_raised_where_its_run_is_taken_and_nothing_is_read_after_it() -> None:
    begun: list[int] = []

    def read(run: BlockRun, buffer: memoryview) -> None:
        del buffer
        begun.append(run.first)
        if run.first == 2:
            raise StorageError("no", path="f")

    ahead = ReadAhead(RUNS, FILES, read, num_threads=1)
    for _ in range(2):
        BUFFERS.give_back(ahead.take())
    with pytest.raises(StorageError):
        ahead.take()
    ahead.close()
    assert begun == [0, 1, 2]


def test_what_was_read_and_not_taken_is_given_back() -> None:
    ahead = ReadAhead(RUNS, FILES, lambda *_: None, num_threads=3)
    BUFFERS.give_back(ahead.take())
    ahead.close()
    ahead.close()
