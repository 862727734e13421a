"""The read engine: byte ranges of a step's files into memory, verified block by block on the way.

Owns which blocks are read, how often (once each) and by how many threads. Knows files, blocks and buffers; nothing of
leaves but a name for messages, nothing of regions and dtypes.

A block of few parts is read straight into its targets; others go through a buffer of the pool. Memory: one block a
thread, whatever is read; where a request is worth more than that (`Storage.read_bytes`), as much as one request brings.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Literal, NamedTuple

from safepoint.formats.blocks import Block, block_bounds, blocks_of, place_block, runs_of
from safepoint.formats.committed import check_digest, in_restore, open_committed, path_in
from safepoint.formats.errors import CheckpointError
from safepoint.formats.segments import ReadSegment, by_file
from safepoint.formats.storage.buffers import BUFFERS
from safepoint.formats.threads import start_helpers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.storage.base import FileReader, Storage

__all__ = ["read_blocks", "read_segments", "verify_file"]

Cache = Literal["use", "bypass"]

_BYTES_WORTH_A_THREAD = 4 << 20


def read_segments(
    storage: Storage,
    prefix: str,
    files: Sequence[FileEntry],
    segments: Iterable[ReadSegment],
    *,
    num_threads: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Fill the targets of all segments, verifying every block that they touch.

    Blocks until all is read; other threads help and have ended when it returns or raises. On an error targets are
    partly overwritten.

    Args:
        storage: holds the files.
        prefix: the step's directory.
        files: as in the step's manifest.
        segments: in any order; several may want the same bytes, but their targets must not overlap.
        num_threads: threads that read, this one included; None for as many as the storage can use.
        progress: called after each read with its bytes, from any of the threads, never twice at once.

    Returns:
        The bytes read from storage: whole blocks.

    Raises:
        CorruptDataError: a block differs from its digest or a file from its size.
        StorageError: a file is missing or cannot be read.
        InvalidArgumentError: a segment that lies in no file, or whose target cannot be filled.
    """
    wanted = by_file(segments, files)
    source = _Source(storage, prefix, [(files[index], wanted[index]) for index in sorted(wanted)], progress)
    wanted_bytes = sum(len(segment.target) for of_file in wanted.values() for segment in of_file)
    helpers: list[threading.Thread] = []
    try:
        count = min((num_threads or storage.num_streams) - 1, wanted_bytes // _BYTES_WORTH_A_THREAD)
        helpers.extend(start_helpers(source.work, count=count, name="safepoint-reader"))
        source.work()
    except BaseException as error:
        source.stop(error)
        raise
    finally:
        for helper in helpers:
            helper.join()
        source.close()
    return source.result()


def verify_file(
    storage: Storage, prefix: str, entry: FileEntry, *, progress: Callable[[int], None] | None = None
) -> None:
    """Read a file and compare its size and all of its digests.

    Args:
        storage: holds the file.
        prefix: the step's directory.
        entry: as in the step's manifest.
        progress: called after each block with its bytes.

    Raises:
        CorruptDataError: it differs.
        StorageError: it is missing or cannot be read.
    """
    for block in read_blocks(storage, prefix, entry):
        if progress is not None:
            progress(len(block))


def read_blocks(storage: Storage, prefix: str, entry: FileEntry, *, cache: Cache = "use") -> Iterator[memoryview]:
    """Yield the blocks of a file in order, each verified; it is valid until the next is asked for.

    Args:
        storage: holds the file.
        prefix: the step's directory.
        entry: as in the step's manifest.
        cache: "bypass" reads from the medium, where that can be had, and leaves what is cached alone.

    Raises:
        CorruptDataError: the file has another size, or a block another digest.
        StorageError: it is missing or cannot be read.
    """
    path = path_in(prefix, entry.path)
    at_once = max(1, storage.read_bytes // entry.block_bytes)
    buffer = BUFFERS.take_anyway(min(at_once * entry.block_bytes, max(1, entry.num_bytes)))
    try:
        with open_committed(storage, prefix, entry) as reader:
            if cache == "bypass":
                reader.bypass_cache()
            else:
                reader.expect_in_order()
            for first in range(0, len(entry.digests), at_once):
                numbers = range(first, min(first + at_once, len(entry.digests)))
                origin = block_bounds(entry, first)[0]
                bounds = [block_bounds(entry, number) for number in numbers]
                blocks = [buffer[start - origin : end - origin] for start, end in bounds]
                found = reader.read_digested(origin, [[block] for block in blocks])
                for number, block, own in zip(numbers, blocks, found, strict=True):
                    check_digest(own, entry, number, storage.describe(path))
                    yield block
    finally:
        BUFFERS.give_back(buffer)


class _OpenFile:
    """A file of which blocks are being read; closed after the last of them."""

    def __init__(self, entry: FileEntry, path: str, reader: FileReader) -> None:
        self.entry = entry
        self.path = path
        self.reader = reader
        self.users = 0
        self.exhausted = False

    def close_if_done(self) -> None:
        if self.exhausted and self.users == 0:
            self.reader.close()


class _Task(NamedTuple):
    """Blocks that follow each other in a file, to be read at once."""

    file: _OpenFile
    blocks: list[Block]


class _Scratch:
    """A thread's buffer: there when it is asked for, as large as it was ever wanted."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def get(self, num_bytes: int) -> memoryview:
        """Return a buffer of at least this size; what it held is gone."""
        if self._buffer is None or len(self._buffer) < num_bytes:
            self.give_back()
            self._buffer = BUFFERS.take_anyway(num_bytes)
        return self._buffer

    def give_back(self) -> None:
        """Return it to the pool."""
        if self._buffer is not None:
            BUFFERS.give_back(self._buffer)
            self._buffer = None


class _Source:
    """Hands out blocks to the threads and collects what became of them."""

    def __init__(
        self,
        storage: Storage,
        prefix: str,
        wanted: Sequence[tuple[FileEntry, list[ReadSegment]]],
        progress: Callable[[int], None] | None,
    ) -> None:
        self._storage = storage
        self._prefix = prefix
        self._progress = progress
        self._lock = threading.Lock()
        self._open: list[_OpenFile] = []
        self._tasks = self._all_tasks(wanted)
        self._num_bytes = 0
        self._error: BaseException | None = None

    def work(self) -> None:
        """Read blocks until none is left or one failed."""
        scratch = _Scratch()
        try:
            while (task := self._next()) is not None:
                self._done(task, _read_task(task, scratch))
        except BaseException as error:  # noqa: BLE001 - raised on the caller's thread
            self.stop(error)
        finally:
            scratch.give_back()

    def stop(self, error: BaseException) -> None:
        """Hand out no more; the first error counts."""
        with self._lock:
            self._error = self._error or error

    def close(self) -> None:
        """Close what is still open; all threads have ended."""
        for file in self._open:
            file.reader.close()

    def result(self) -> int:
        """Return the bytes read, or raise what stopped it."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._num_bytes

    def _next(self) -> _Task | None:
        with self._lock:
            if self._error is not None:
                return None
            task = next(self._tasks, None)
            if task is not None:
                task.file.users += 1
            return task

    def _done(self, task: _Task, num_bytes: int) -> None:
        with self._lock:
            task.file.users -= 1
            task.file.close_if_done()
            self._num_bytes += num_bytes
            if self._progress is not None:
                self._progress(num_bytes)

    def _all_tasks(self, wanted: Sequence[tuple[FileEntry, list[ReadSegment]]]) -> Iterator[_Task]:
        for entry, segments in wanted:
            segments.sort(key=_offset)
            file = self._open_file(entry, segments[0].leaf)
            self._open.append(file)
            if 2 * sum(len(segment.target) for segment in segments) > entry.num_bytes:
                file.reader.expect_in_order()
            for run in runs_of(blocks_of(entry, segments), self._storage.read_bytes // entry.block_bytes):
                yield _Task(file, run)
            file.exhausted = True
            file.close_if_done()
            self._open = [other for other in self._open if not (other.exhausted and other.users == 0)]

    def _open_file(self, entry: FileEntry, leaf: str) -> _OpenFile:
        try:
            reader = open_committed(self._storage, self._prefix, entry)
        except CheckpointError as error:
            raise in_restore(error, leaf) from None
        return _OpenFile(entry, self._storage.describe(path_in(self._prefix, entry.path)), reader)


def _read_task(task: _Task, scratch: _Scratch) -> int:
    entry = task.file.entry
    first, _ = block_bounds(entry, task.blocks[0].number)
    _, last = block_bounds(entry, task.blocks[-1].number)

    def room(start: int, end: int) -> memoryview:
        return scratch.get(last - first)[start - first : end - first]

    leaf = task.blocks[0].segments[0].leaf
    placed = [place_block(block, *block_bounds(entry, block.number), room) for block in task.blocks]
    try:
        found = task.file.reader.read_digested(first, [parts for _, parts in placed])
        for block, (whole, parts), own in zip(task.blocks, placed, found, strict=True):
            leaf = block.segments[0].leaf
            check_digest(own, entry, block.number, task.file.path)
            start, end = block_bounds(entry, block.number)
            # What was not read straight into its target lies in the block, or where the buffer has it.
            for segment in block.segments:
                if segment is not whole and (len(parts) == 1 or not isinstance(segment.target, memoryview)):
                    segment.put(parts[0] if len(parts) == 1 else room(start, end), start)
    except CheckpointError as error:
        raise in_restore(error, leaf) from None
    return last - first


def _offset(segment: ReadSegment) -> int:
    return segment.offset
