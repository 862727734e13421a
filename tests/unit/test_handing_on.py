"""What members of a group hand on to each other arrives whole, whatever the order in which each of them wants it."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typing_extensions import override

from safepoint.formats.errors import CorruptDataError, StorageError
from safepoint.formats.run_reading import BlockRun, RunReader
from safepoint.formats.segments import ReadSegment
from safepoint.formats.storage import MemoryStorage
from safepoint.formats.storage.buffers import BUFFERS
from safepoint.manager.errors import PeerFailedError
from safepoint.manager.handing_on import Exchange, Sharing
from safepoint.manager.host_plan import Group

from support.faulty_storage import Fail, FaultyStorage
from support.stored_files import STEP, add_file, content
from support.thread_transport import Switchboard, ThreadTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from safepoint.formats.entries import FileEntry
    from safepoint.manager.coordination import Transport

BLOCK = 100
SIZES = [1000, 250, 730]
EVERYTHING = (BlockRun(0, 0, 9), BlockRun(1, 0, 2), BlockRun(2, 0, 7))
NUM_BYTES = sum(SIZES)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "safepoint-ahead"]
    assert BUFFERS.lent_bytes == 0


class Host:
    """Processes of one host, each a thread, with a storage in memory that counts and may fail.

    Attributes:
        storages: of each process.
        contents: of the files.
        progress: what each process was told.
    """

    def __init__(self, num_processes: int, *, patience_secs: float = 30.0, round_bytes: int = 250) -> None:
        inner = MemoryStorage()
        inner.make_dir("")
        inner.make_dir(STEP)
        self.contents = [content(index, size) for index, size in enumerate(SIZES)]
        self.files: list[FileEntry] = [
            add_file(inner, f"f{index}", data, BLOCK) for index, data in enumerate(self.contents)
        ]
        self.inner = inner
        self.storages = [FaultyStorage(inner) for _ in range(num_processes)]
        board = Switchboard()
        self.transports: list[Transport] = [ThreadTransport(board, own) for own in range(num_processes)]
        self.progress: list[list[int]] = [[] for _ in range(num_processes)]
        self.on_progress: Callable[[int], None] = lambda _: None
        self._patience_secs = patience_secs
        self._round_bytes = round_bytes

    def read(self, own: int, runs: Sequence[BlockRun], batches: Sequence[Sequence[ReadSegment]]) -> int:
        """Do what one process does; return the bytes that it read."""
        reader = RunReader(self.storages[own], STEP, self.files, lambda file, number: f"leaf.{file}.{number}")

        def progress(num_bytes: int) -> None:
            self.progress[own].append(num_bytes)
            self.on_progress(own)

        exchange = Exchange(
            Group(tuple(range(len(self.storages))), tuple(runs)),
            Sharing(
                transport=self.transports[own],
                process_index=own,
                files=self.files,
                reader=reader,
                request_bytes=200,
                num_threads=3,
                patience_secs=self._patience_secs,
                progress=progress,
                round_bytes=self._round_bytes,
            ),
        )
        try:
            return sum(exchange.read(batch) for batch in batches) + exchange.finish()
        except Exception as error:
            exchange.tell(error)
            raise
        finally:
            exchange.close()
            reader.close()

    def read_all(self, runs: Sequence[BlockRun], batches: Sequence[Sequence[Sequence[ReadSegment]]]) -> list[Any]:
        """Return what each process read, or the error that it raised."""

        def one(own: int) -> Any:
            try:
                return self.read(own, runs, batches[own])
            except Exception as error:  # noqa: BLE001 - looked at by the test
                return error

        with ThreadPoolExecutor(len(self.storages)) as pool:
            return list(pool.map(one, range(len(self.storages))))

    def is_right(self, segment: ReadSegment) -> bool:
        return segment.target == self.contents[segment.file][segment.offset : segment.end]


def segment(file: int, offset: int, num_bytes: int) -> ReadSegment:
    return ReadSegment(file=file, offset=offset, target=memoryview(bytearray(num_bytes)), leaf="model.w")


def all_segments() -> list[ReadSegment]:
    return [segment(file, 0, size) for file, size in enumerate(SIZES)]


@pytest.mark.parametrize("num_processes", [1, 2, 3, 5])
def test_each_block_is_read_once_by_one_process_and_reaches_all(num_processes: int) -> None:
    host = Host(num_processes)
    wanted = [all_segments() for _ in range(num_processes)]
    read = host.read_all(EVERYTHING, [[segments] for segments in wanted])
    assert sum(read) == NUM_BYTES
    assert max(read) - min(read) <= 2 * BLOCK
    assert all(host.is_right(one) for segments in wanted for one in segments)
    assert [sum(told) for told in host.progress] == [NUM_BYTES] * num_processes
    assert all(storage.counts["open_reader"] <= len(SIZES) for storage in host.storages)


def test_batches_that_end_in_the_middle_of_a_block_read_it_once() -> None:
    host = Host(2)
    wanted = [[[segment(0, 0, 150)], [segment(0, 150, 300)], [segment(0, 450, 550)]], [[segment(0, 0, 1000)]]]
    assert sum(host.read_all(EVERYTHING[:1], wanted)) == SIZES[0]
    assert all(host.is_right(one) for batches in wanted for batch in batches for one in batch)


def test_rounds_that_a_process_wants_nothing_of_are_gone_through_all_the_same() -> None:
    host = Host(2)
    wanted = [[[segment(0, 0, 10)]], [all_segments()]]
    assert sum(host.read_all(EVERYTHING, wanted)) == NUM_BYTES
    assert all(host.is_right(one) for batches in wanted for batch in batches for one in batch)


@settings(max_examples=40)
@given(st.data())
def test_any_wants_in_any_order_are_filled(data: st.DataObject) -> None:
    num_processes = data.draw(st.integers(1, 4))
    host = Host(num_processes, round_bytes=data.draw(st.integers(1, 700)))
    runs = data.draw(st.permutations(EVERYTHING))
    batches: list[list[list[ReadSegment]]] = []
    for _ in range(num_processes):
        own = []
        for _ in range(data.draw(st.integers(0, 3))):
            file = data.draw(st.integers(0, len(SIZES) - 1))
            cuts = sorted(data.draw(st.lists(st.integers(0, SIZES[file]), max_size=4)))
            own.append([segment(file, first, last - first) for first, last in itertools.pairwise(cuts)])
        batches.append(own)
    read = host.read_all(runs, batches)
    assert sum(read) >= NUM_BYTES
    assert all(host.is_right(one) for own in batches for batch in own for one in batch)


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_read_that_fails_fails_on_all_with_the_same_error(failing: int, at: int) -> None:
    host = Host(3)
    host.storages[failing] = FaultyStorage(host.inner, at=at, times=None, fault=Fail(), only={"reader.read_into"})
    for error in host.read_all(EVERYTHING, [[all_segments()] for _ in range(3)]):
        assert isinstance(error, StorageError)
        assert error.process_index == failing
        assert error.leaf is not None
        assert error.leaf.startswith("leaf.")


def test_a_damaged_block_is_everybodys_damage() -> None:
    host = Host(2)
    spoiled = bytearray(host.contents[1])
    spoiled[130] ^= 1
    host.inner.delete(f"{STEP}/f1")
    add_file(host.inner, "f1", bytes(spoiled), BLOCK)
    for error in host.read_all(EVERYTHING, [[all_segments()] for _ in range(2)]):
        assert isinstance(error, CorruptDataError)
        assert error.target_modified
        assert error.leaf == "leaf.1.1"


def test_a_process_that_fails_at_something_else_tells_the_others() -> None:
    host = Host(3)

    def fail(own: int) -> None:
        if own == 1:
            raise ZeroDivisionError

    host.on_progress = fail
    first, own, last = host.read_all(EVERYTHING, [[all_segments()] for _ in range(3)])
    assert isinstance(own, ZeroDivisionError)
    for error in (first, last):
        assert isinstance(error, PeerFailedError)
        assert error.process_index == 1


class Spoiling(ThreadTransport):
    """Changes a byte on the way."""

    @override
    def receive(self, buffer: torch.Tensor, source: int, deadline_secs: float) -> None:
        super().receive(buffer, source, deadline_secs)
        if buffer.numel() > BLOCK // 2:
            buffer[7] ^= 1


def test_bytes_that_were_changed_on_the_way_are_read_from_the_storage() -> None:
    host = Host(2)
    board = Switchboard()
    host.transports = [ThreadTransport(board, 0), Spoiling(board, 1)]
    wanted = [all_segments(), all_segments()]
    first, second = host.read_all(EVERYTHING, [[segments] for segments in wanted])
    assert first + second > NUM_BYTES
    assert all(host.is_right(one) for segments in wanted for one in segments)


class Breaking(ThreadTransport):
    """Breaks at the n-th message."""

    def __init__(self, board: Switchboard, own: int, left: int) -> None:
        super().__init__(board, own)
        self.left = left

    @override
    def send(self, buffer: torch.Tensor, to: int, deadline_secs: float) -> None:
        self.left -= 1
        if self.left < 0:
            raise PeerFailedError("The connection broke.", process_index=to)
        super().send(buffer, to, deadline_secs)


@pytest.mark.parametrize("num_messages", [0, 1, 2, 3, 4, 7, 12, 20, 33])
def test_a_connection_that_breaks_leaves_each_process_to_itself(
    caplog: pytest.LogCaptureFixture, num_messages: int
) -> None:
    host = Host(3)
    board = Switchboard()
    host.transports = [ThreadTransport(board, 0), Breaking(board, 1, num_messages), ThreadTransport(board, 2)]
    wanted = [all_segments() for _ in range(3)]
    read = host.read_all(EVERYTHING, [[segments] for segments in wanted])
    assert NUM_BYTES < sum(read) <= 3 * NUM_BYTES + 250  # the shares of the round in which it broke, anew
    assert all(host.is_right(one) for segments in wanted for one in segments)
    assert [sum(told) for told in host.progress] == [NUM_BYTES] * 3
    assert "handing on" in caplog.text


def test_a_process_that_does_not_come_is_not_waited_for_longer_than_the_patience() -> None:
    host = Host(2, patience_secs=0.05)
    wanted = all_segments()
    assert host.read(0, EVERYTHING, [wanted]) >= NUM_BYTES
    assert all(host.is_right(one) for one in wanted)
