"""BlockWriter: appended bytes become digested blocks, written by a few threads while the caller brings the next.

Owns the pipeline: gather a block, hand it to a worker that digests it (in cache) and writes it, one block under way for
each worker. A block that lies whole in what was appended is written from there, without a copy, where the file can take
it so. Knows nothing about file systems: the file is a `BlockFile`.

A file of one block costs no thread; the workers of a larger one end with it. They share nothing but the queue, and hold
the GIL neither for the digest nor for the write.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from typing_extensions import override

from safepoint.formats.checksum import digest, num_blocks
from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.storage.base import FileWriter, WrittenFile
from safepoint.formats.storage.buffers import copy_bytes
from safepoint.formats.threads import start_helpers

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

    from safepoint.formats.storage.buffers import BufferPool

__all__ = ["BlockFile", "BlockWriter"]

_NUM_WORKERS = 2


class BlockFile(ABC):
    """A new file that takes blocks in any order, from several threads."""

    path: str
    """In full, for messages."""
    alignment: int
    """Blocks in memory whose address and length are multiples of it are taken as they are; see `write`."""

    @abstractmethod
    def write(self, offset: int, block: memoryview, num_bytes: int) -> None:
        """Write the first `num_bytes` of `block` at `offset`; what follows them is padding, not to be kept.

        Raises:
            StorageError: it could not be written whole.
        """

    @abstractmethod
    def finish(self) -> None:
        """Make the file durable and close it.

        Raises:
            StorageError: it is not durable; discard it.
        """

    @abstractmethod
    def discard(self) -> None:
        """Close the file and remove it; does not raise StorageError."""


class _Block(NamedTuple):
    number: int
    data: memoryview  # padded to the file's alignment
    num_bytes: int
    buffer: memoryview | None  # to be given back to the pool


class BlockWriter(FileWriter):
    """The writer of one `BlockFile`."""

    def __init__(
        self, file: BlockFile, *, num_bytes: int, block_bytes: int, pool: BufferPool, num_workers: int = _NUM_WORKERS
    ) -> None:
        """Start; threads come when needed.

        Args:
            file: taken over: finished or discarded by this writer.
            num_bytes: bytes that will be appended.
            block_bytes: size of a block.
            pool: lends the buffers in which blocks are gathered.
            num_workers: threads at most.
        """
        self._file = file
        self._num_bytes = num_bytes
        self._block_bytes = block_bytes
        self._pool = pool
        self._pipeline = _Pipeline(file, num_blocks(num_bytes, block_bytes), block_bytes, pool, num_workers)
        self._appended = 0  # bytes of whole blocks handed on, and of `_buffer`
        self._buffer: memoryview | None = None  # the block that is being gathered
        self._open = True

    @override
    def report_to(self, progress: Callable[[int], None]) -> None:
        self._pipeline.on_written = progress

    @override
    def append(self, data: Buffer) -> None:
        view = _byte_view(data)
        self._check_open()
        if self._appended + len(view) > self._num_bytes:
            raise self._wrong_size(self._appended + len(view))
        borrowed = False
        try:
            while len(view):
                taken = self._borrow(view)
                borrowed = borrowed or taken > 0
                view = view[taken or self._gather(view) :]
        finally:
            if borrowed:  # the caller may change its memory after this, whether we succeed or not
                self._pipeline.wait_until_idle()

    @override
    def finish(self) -> WrittenFile:
        self._check_open()
        if self._appended != self._num_bytes:
            self.abort()
            raise self._wrong_size(self._appended)
        try:
            digests = self._pipeline.finish()
            self._file.finish()
        except BaseException:
            self.abort()
            raise
        self._open = False
        return WrittenFile(num_bytes=self._num_bytes, block_bytes=self._block_bytes, digests=digests)

    @override
    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        self._pipeline.stop()
        if self._buffer is not None:
            self._pool.give_back(self._buffer)
            self._buffer = None
        self._file.discard()

    def _check_open(self) -> None:
        if not self._open:
            raise InvalidArgumentError("this writer was finished or aborted already", path=self._file.path)

    def _wrong_size(self, appended: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self._num_bytes:,} bytes were announced and {appended:,} appended", path=self._file.path
        )

    def _borrow(self, view: memoryview) -> int:
        """Hand on the next block straight from the caller's memory if it may be; return its size, else 0."""
        length = self._next_block_bytes()
        alignment = self._file.alignment
        if self._buffer is not None or len(view) < length or length % alignment or _address(view) % alignment:
            return 0
        self._hand_on(view[:length], length, buffer=None, new_bytes=length)
        return length

    def _gather(self, view: memoryview) -> int:
        """Copy bytes to the block that is being gathered, hand it on when it is full; return how many."""
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = self._take_buffer()
        start = self._appended % self._block_bytes
        length = self._next_block_bytes()
        count = min(len(view), length - start)
        copy_bytes(buffer[start : start + count], view[:count])
        if start + count < length:
            self._appended += count
            return count
        padded = -(-length // self._file.alignment) * self._file.alignment
        buffer[length:padded] = bytes(padded - length)
        self._buffer = None
        self._hand_on(buffer[:padded], length, buffer=buffer, new_bytes=count)
        return count

    def _next_block_bytes(self) -> int:
        start = self._appended - self._appended % self._block_bytes
        return min(self._block_bytes, self._num_bytes - start)

    def _hand_on(self, data: memoryview, num_bytes: int, *, buffer: memoryview | None, new_bytes: int) -> None:
        number = self._appended // self._block_bytes
        self._appended += new_bytes
        self._pipeline.submit(_Block(number, data, num_bytes, buffer))

    def _take_buffer(self) -> memoryview:
        while (buffer := self._pool.take(self._block_bytes)) is None:
            if not self._pipeline.wait_for_one():  # nothing of ours under way that could give one back
                return self._pool.take_anyway(self._block_bytes)
        return buffer


class _Pipeline:
    """The queue of blocks and the threads that empty it."""

    def __init__(self, file: BlockFile, count: int, block_bytes: int, pool: BufferPool, num_workers: int) -> None:
        self._file = file
        self._block_bytes = block_bytes
        self._pool = pool
        self._num_workers = min(num_workers, count) if count > 1 else 0
        # More than the workers can hold would only spread over more memory: measured, and slower by a tenth.
        self._most_under_way = max(1, self._num_workers)
        self._digests: list[str] = [""] * count
        self._changed = threading.Condition()
        self._queue: deque[_Block] = deque()
        self._under_way = 0  # queued, or in the hands of a worker
        self._error: BaseException | None = None
        self._closing = False
        self._threads: list[threading.Thread] = []
        self.on_written: Callable[[int], None] | None = None

    def submit(self, block: _Block) -> None:
        """Hand a block to the workers, waiting while all are busy; raise what an earlier one met with."""
        with self._changed:
            try:
                self._changed.wait_for(lambda: self._under_way < self._most_under_way or self._error)
                self._raise_error()
            except BaseException:
                self._give_back(block)
                raise
            self._under_way += 1
            self._queue.append(block)
            self._changed.notify_all()
        if not self._start_thread():
            self._work_off()

    def wait_for_one(self) -> bool:
        """Wait until fewer blocks are under way; False when there are none."""
        with self._changed:
            before = self._under_way
            self._changed.wait_for(lambda: self._under_way < before or not before or self._error)
            self._raise_error()
            return before > 0

    def wait_until_idle(self) -> None:
        """Wait until no block is under way and raise what they met with."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            self._raise_error()

    def finish(self) -> tuple[str, ...]:
        """Wait for all blocks, end the threads, return the digests."""
        self.wait_until_idle()
        self.stop()
        return tuple(self._digests)

    def stop(self) -> None:
        """Drop what is queued, and end the threads after what they are writing."""
        with self._changed:
            self._closing = True
            self._drop_queue()
            self._error = None  # it holds frames that hold us
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _start_thread(self) -> bool:
        """Start one more thread if work waits; False when there is no thread at all to do it."""
        if len(self._threads) < self._num_workers:
            self._threads.extend(start_helpers(self._work, count=1, name="safepoint-block-writer"))
        return bool(self._threads)

    def _work(self) -> None:
        while (block := self._next()) is not None:
            self._write(block)

    def _work_off(self) -> None:
        """Do a worker's work on the caller's thread."""
        with self._changed:
            block = self._queue.popleft()
        self._write(block)
        with self._changed:
            self._raise_error()

    def _next(self) -> _Block | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None

    def _write(self, block: _Block) -> None:
        error: BaseException | None = None
        try:
            # First the digest, which brings the block into the cache, then the write.
            self._digests[block.number] = digest(block.data[: block.num_bytes])
            self._file.write(block.number * self._block_bytes, block.data, block.num_bytes)
        except BaseException as caught:  # noqa: BLE001 - surfaces from the caller's next call
            error = caught
        with self._changed:
            self._under_way -= 1
            self._give_back(block)
            if error is not None:
                self._error = self._error or error
                self._drop_queue()
            elif self.on_written is not None:
                self.on_written(block.num_bytes)
            self._changed.notify_all()

    def _drop_queue(self) -> None:
        while self._queue:
            self._under_way -= 1
            self._give_back(self._queue.popleft())

    def _give_back(self, block: _Block) -> None:
        if block.buffer is not None:
            self._pool.give_back(block.buffer)


def _byte_view(data: Buffer) -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise InvalidArgumentError("a writer takes C-contiguous memory only")
    if view.nbytes == 0:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, dtype=np.uint8).ctypes.data
    return address
