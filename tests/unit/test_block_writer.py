"""The writer's pipeline over a block file that records, fails and waits; no disk."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from typing_extensions import override

from safepoint.formats.checksum import digest
from safepoint.formats.errors import InvalidArgumentError, StorageError
from safepoint.formats.storage.block_writer import BlockFile, BlockWriter
from safepoint.formats.storage.buffers import ALIGNMENT, BufferPool

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 4 * ALIGNMENT


class RecordingFile(BlockFile):
    """Keeps what is written; fails at chosen blocks; holds writes back while `gate` is closed."""

    path = "recording/file"

    def __init__(self, *, alignment: int = 1, fail_at: frozenset[int] = frozenset()) -> None:
        self.alignment = alignment
        self.content: dict[int, bytes] = {}
        self.events: list[str] = []
        self.threads: set[int] = set()
        self.borrowed = 0
        self.gate = threading.Event()
        self.gate.set()
        self._fail_at = fail_at
        self._lock = threading.Lock()

    @override
    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        assert len(block) % self.alignment == 0
        assert len(block) < num_bytes + self.alignment
        assert not any(block[num_bytes:])
        assert self.gate.wait(30)
        with self._lock:
            self.threads.add(threading.get_ident())
            if offset in self._fail_at:
                raise StorageError("no", errno=errno.EIO, path=self.path)
            assert offset not in self.content
            self.content[offset] = bytes(block[:num_bytes])

    @override
    def finish(self) -> None:
        self.events.append("finish")

    @override
    def discard(self) -> None:
        self.events.append("discard")

    def joined(self) -> bytes:
        return b"".join(self.content[offset] for offset in sorted(self.content))


def make_writer(file: BlockFile, num_bytes: int, pool: BufferPool | None = None, workers: int = 2) -> BlockWriter:
    pool = pool or BufferPool(8 * BLOCK)
    return BlockWriter(file, num_bytes=num_bytes, block_bytes=BLOCK, pool=pool, num_workers=workers)


@pytest.fixture(autouse=True)
def no_thread_outlives_its_writer() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "safepoint-block-writer"]


@pytest.mark.parametrize("alignment", [1, ALIGNMENT])
@pytest.mark.parametrize("piece", [1000, BLOCK - 1, BLOCK, 3 * BLOCK + 1])
def test_pieces_of_any_size_become_the_same_blocks(piece: int, alignment: int) -> None:
    data = np.random.default_rng(1).bytes(5 * BLOCK + 77)
    file = RecordingFile(alignment=alignment)
    with make_writer(file, len(data)) as writer:
        for start in range(0, len(data), piece):
            writer.append(data[start : start + piece])
        written = writer.finish()
    assert file.joined() == data
    assert written.digests == tuple(digest(data[start : start + BLOCK]) for start in range(0, len(data), BLOCK))
    assert file.events == ["finish"]


def test_a_file_of_one_block_is_written_without_a_thread() -> None:
    file = RecordingFile()
    with make_writer(file, BLOCK) as writer:
        writer.append(bytes(BLOCK))
        writer.finish()
    assert file.threads == {threading.get_ident()}


def test_blocks_of_a_larger_file_are_written_behind_the_caller() -> None:
    file = RecordingFile()
    with make_writer(file, 4 * BLOCK) as writer:
        writer.append(bytes(4 * BLOCK))
        writer.finish()
    assert threading.get_ident() not in file.threads


def test_a_machine_without_more_threads_writes_on_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    file = RecordingFile()
    data = np.random.default_rng(2).bytes(4 * BLOCK)
    with make_writer(file, len(data)) as writer:
        writer.append(data[:100])
        writer.append(data[100:])
        writer.finish()
    assert file.joined() == data
    assert file.threads == {threading.get_ident()}


@pytest.mark.parametrize("aligned", [True, False])
def test_memory_that_the_caller_changes_after_an_append_is_never_written(*, aligned: bool) -> None:
    memory = np.zeros(4 * BLOCK + ALIGNMENT, dtype=np.uint8)
    start = (-memory.ctypes.data) % ALIGNMENT + (0 if aligned else 1)
    scratch = memory[start : start + 3 * BLOCK]
    file = RecordingFile(alignment=ALIGNMENT)
    with make_writer(file, 6 * BLOCK) as writer:
        for value in (1, 2):
            scratch[:] = value
            writer.append(scratch.data)
            scratch[:] = 99
        writer.finish()
    assert file.joined() == b"\1" * (3 * BLOCK) + b"\2" * (3 * BLOCK)


@pytest.mark.parametrize("fail_at", range(6))
@pytest.mark.parametrize("piece", [100, BLOCK, 6 * BLOCK])
def test_an_error_of_any_block_surfaces_typed_and_the_file_is_discarded(fail_at: int, piece: int) -> None:
    pool = BufferPool(8 * BLOCK)
    file = RecordingFile(fail_at=frozenset({fail_at * BLOCK}))

    def write() -> None:
        with make_writer(file, 6 * BLOCK, pool) as writer:
            for start in range(0, 6 * BLOCK, piece):
                writer.append(bytes(min(piece, 6 * BLOCK - start)))
            writer.finish()

    with pytest.raises(StorageError) as caught:
        write()
    assert caught.value.errno == errno.EIO
    assert file.events == ["discard"]
    assert pool.lent_bytes == 0


def test_buffers_are_bounded_while_the_disk_does_not_keep_up() -> None:
    pool = BufferPool(3 * BLOCK)
    file = RecordingFile(alignment=ALIGNMENT)
    file.gate.clear()
    writer = make_writer(file, 32 * BLOCK, pool)
    appended = threading.Event()

    def append() -> None:
        for _ in range(32 * 4):
            writer.append(bytes(BLOCK // 4))
        appended.set()

    caller = threading.Thread(target=append)
    caller.start()
    assert not appended.wait(0.3)
    assert pool.held_bytes == 3 * BLOCK
    file.gate.set()
    caller.join()
    writer.finish()
    assert pool.held_bytes == 3 * BLOCK
    assert len(file.content) == 32


def test_many_open_writers_share_a_small_pool_without_waiting_for_each_other() -> None:
    pool = BufferPool(2 * BLOCK)
    files = [RecordingFile() for _ in range(5)]
    writers = [make_writer(file, 2 * BLOCK + 5, pool) for file in files]
    for length in (BLOCK - 1, BLOCK - 1, 7):
        for writer in writers:
            writer.append(bytes(length))
    for writer in writers:
        writer.finish()
    assert all(file.joined() == bytes(2 * BLOCK + 5) for file in files)
    assert pool.lent_bytes == 0
    assert pool.held_bytes <= 2 * BLOCK


def test_buffers_are_used_again_by_the_next_file() -> None:
    pool = BufferPool(8 * BLOCK)
    for _ in range(20):
        with make_writer(RecordingFile(alignment=ALIGNMENT), 3 * BLOCK, pool) as writer:
            for _ in range(3):
                writer.append(b"x")
                writer.append(bytes(BLOCK - 1))
            writer.finish()
    assert pool.held_bytes <= 3 * BLOCK
    assert pool.lent_bytes == 0


def test_abort_while_blocks_are_under_way_ends_the_threads_and_returns_the_buffers() -> None:
    pool = BufferPool(8 * BLOCK)
    file = RecordingFile()
    file.gate.clear()
    writer = make_writer(file, 8 * BLOCK, pool)
    for _ in range(2):
        writer.append(b"x")
        writer.append(bytes(BLOCK - 1))
    writer.append(b"x")
    threading.Timer(0.1, file.gate.set).start()
    writer.abort()
    assert file.events == ["discard"]
    assert pool.lent_bytes == 0


def test_sizes_are_checked_before_anything_is_taken() -> None:
    file = RecordingFile()
    with make_writer(file, 10) as writer:
        with pytest.raises(InvalidArgumentError):
            writer.append(bytes(11))
        writer.append(bytes(10))
        writer.finish()
    assert file.content == {0: bytes(10)}


def test_pooled_buffers_are_aligned_and_survive_another_size() -> None:
    pool = BufferPool(64 << 20)
    first = pool.take(8 << 20)
    assert first is not None
    assert np.frombuffer(first, dtype=np.uint8).ctypes.data % (2 << 20) == 0
    pool.give_back(first)
    small = pool.take(5000)
    assert small is not None
    assert len(small) == 2 * ALIGNMENT
    assert pool.take(8 << 20) is first
