"""Reading a step's files again before they are linked on, behind the training loop as far as there is time.

A thread reads file after file and compares the digests: of the blocks, by which a restore will judge, and of the stored
regions, by which the next save will say that they did not change. That save waits for what it wants of the rest, or
stops the thread, where writing would be faster than waiting.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from safepoint.formats.checksum import digest_of_parts
from safepoint.formats.reading import read_blocks
from safepoint.manager.errors import CheckpointError, CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from safepoint.formats.entries import ShardEntry
    from safepoint.formats.storage import Storage
    from safepoint.manager.unchanged import LinkBase

__all__ = ["Recheck"]

logger = logging.getLogger("safepoint")

_JOIN_SECS = 2.0
"""How long to wait for the thread after it was told to stop: it does after the block that it is reading."""


_STUCK_SECS = 30.0
"""How long one read may take before the save does without the file."""

_UNREAD = CheckpointError("not read yet")


class _StoppedError(Exception):
    pass


class Recheck:
    """The files of one committed step, and which of them were found sound since its commit."""

    def __init__(self, storage: Storage, base: LinkBase) -> None:
        """Remember the files; reads none.

        Args:
            storage: of the root.
            base: the step.
        """
        self._storage = storage
        self._files = base.files
        self._shards: list[list[ShardEntry]] = [[] for _ in base.files]
        for _, shard in base.shards.values():
            self._shards[shard.file].append(shard)
        self._found: dict[int, CheckpointError | None] = {}
        self._current = -1, 0  # the file that the thread reads, and how far it is
        self._wanted: frozenset[int] | None = None  # by the save that waits for the thread
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, find_prefix: Callable[[], str | None], wanted: Sequence[int]) -> None:
        """Read these files, given as indices, on a thread of its own, which first asks where they lie."""
        self._thread = threading.Thread(
            target=self._run, args=(find_prefix, wanted), name="safepoint-recheck", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no more threads to be had, or the interpreter is shutting down
            self._thread = None

    def wait(self, timeout_secs: float) -> bool:
        """Wait until all is read; say whether it is."""
        if self._thread is not None:
            self._thread.join(timeout_secs)
        return self._thread is None or not self._thread.is_alive()

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECS)

    def sound(self, prefix: str, wanted: Collection[int], *, patience_bytes: int | None) -> list[int]:
        """Return which of the files were read and are what was committed.

        Args:
            prefix: where the step lies now.
            wanted: indices of the files.
            patience_bytes: what is still to be read is waited for, or read here, up to so many bytes; None for all.
        """
        self._wanted = frozenset(wanted)
        is_much = patience_bytes is not None and self._unread_bytes(wanted) > patience_bytes
        if is_much or not self._wait_while_it_reads():
            self.stop()
        else:
            for index in wanted:
                if index not in self._found:
                    self._found[index] = self._read(prefix, index)
        return [index for index in wanted if self._found.get(index, _UNREAD) is None]

    def _wait_while_it_reads(self) -> bool:
        """Wait for the thread; say whether it ended, rather than being stuck in one read."""
        while not self.wait(0.0):
            before = self._current
            if not self.wait(_STUCK_SECS) and self._current == before:
                return False
        return True

    def is_behind(self, wanted: Collection[int]) -> bool:
        """Say whether some of the files were not read."""
        return any(index not in self._found for index in wanted)

    def _unread_bytes(self, wanted: Collection[int]) -> int:
        current, done = self._current
        unread = sum(self._files[index].num_bytes for index in wanted if index not in self._found)
        return unread - done if current in wanted and current not in self._found else unread

    def _run(self, find_prefix: Callable[[], str | None], wanted: Sequence[int]) -> None:
        prefix = find_prefix()
        for index in wanted if prefix is not None else ():
            self._current = index, 0
            try:
                self._look(0)
                error = self._read(str(prefix), index, look=self._look)
            except _StoppedError:
                continue
            if error is None or isinstance(error, CorruptDataError):
                self._found[index] = error  # after any other error the save has a look of its own

    def _look(self, num_bytes: int) -> None:
        """Note how far the thread is; stop it when its file is not wanted any more."""
        index, done = self._current
        self._current = index, done + num_bytes
        if self._stopped.is_set() or (self._wanted is not None and index not in self._wanted):
            raise _StoppedError

    def _read(self, prefix: str, index: int, *, look: Callable[[int], None] | None = None) -> CheckpointError | None:
        file, path = self._files[index], f"{prefix}/{self._files[index].path}".lstrip("/")
        try:
            # From the page cache nothing would be learnt of the disk; and it is better used for other things.
            blocks = _Blocks(read_blocks(self._storage, prefix, file, cache="bypass"), look)
            for shard in sorted(self._shards[index], key=_offset):
                if digest_of_parts(blocks.parts(shard.offset, shard.num_bytes)) != shard.digest:
                    raise CorruptDataError(
                        f"the bytes of {shard.key!r} are not those of its digest, although those of the file are",
                        path=self._storage.describe(path),
                        hint="The state was changed while it was saved, or somebody changed the manifest.",
                    )
            blocks.finish()
        except CheckpointError as error:
            if look is None or isinstance(error, CorruptDataError):
                logger.warning("a file is not linked on, what is wanted of it will be written anew: %s", error)
            return error
        return None


def _offset(shard: ShardEntry) -> int:
    return shard.offset


class _Blocks:
    """The blocks of a file, one after the other; what is asked for lies ever further on."""

    def __init__(self, blocks: Iterator[memoryview], look: Callable[[int], None] | None) -> None:
        self._blocks = blocks
        self._look = look
        self._start = 0
        self._block = memoryview(b"")

    def parts(self, offset: int, num_bytes: int) -> Iterator[memoryview]:
        """Yield a range of the file, in as many parts as it has blocks; each is valid until the next is asked for."""
        end = offset + num_bytes
        while offset < end:
            while self._start + len(self._block) <= offset:
                self._start += len(self._block)
                self._block = next(self._blocks)
                if self._look is not None:
                    self._look(len(self._block))
            part = self._block[offset - self._start : end - self._start]
            offset += len(part)
            yield part

    def finish(self) -> None:
        """Read what is left."""
        for block in self._blocks:
            if self._look is not None:
                self._look(len(block))
