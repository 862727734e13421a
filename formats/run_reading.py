"""Blocks of a step's files that follow each other, read into given memory and verified, in any order.

Owns the open files: each is opened once, however many runs are read of it. Knows of leaves but a name for messages,
and nothing of segments: see `reading`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from safepoint.formats.blocks import block_bounds
from safepoint.formats.committed import check_digest, in_restore, open_committed, path_in
from safepoint.formats.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.storage.base import FileReader, Storage

__all__ = ["BlockRun", "LeafAt", "RunReader", "run_bytes"]


LeafAt: TypeAlias = "Callable[[int, int], str]"
"""Names a leaf that has bytes in a block: by the file's index and the block's number."""


class BlockRun(NamedTuple):
    """Blocks of one file that follow each other.

    Attributes:
        file: index into the step's files.
        first: number of its first block.
        last: number of its last block.
    """

    file: int
    first: int
    last: int


def run_bytes(files: Sequence[FileEntry], run: BlockRun) -> int:
    """Return how many bytes a run has."""
    entry = files[run.file]
    return block_bounds(entry, run.last)[1] - block_bounds(entry, run.first)[0]


class RunReader:
    """Reads runs of blocks of one step; may be used by several threads at once."""

    def __init__(self, storage: Storage, prefix: str, files: Sequence[FileEntry], leaf_at: LeafAt) -> None:
        """Open nothing yet.

        Args:
            storage: holds the files.
            prefix: the step's directory.
            files: as in the step's manifest.
            leaf_at: names a leaf that is stored in a block.
        """
        self._storage = storage
        self._prefix = prefix
        self._files = files
        self._leaf_at = leaf_at
        self._lock = threading.Lock()
        self._open: dict[int, FileReader] = {}

    def read(self, run: BlockRun, buffer: memoryview) -> None:
        """Fill `buffer`, which has the size of the run, and verify each block.

        Raises:
            CorruptDataError: the file has another size, or a block another digest.
            StorageError: it is missing or cannot be read.
        """
        number = run.first
        try:
            entry = self._files[run.file]
            path = self._storage.describe(path_in(self._prefix, entry.path))
            start, _ = block_bounds(entry, run.first)
            bounds = [block_bounds(entry, number) for number in range(run.first, run.last + 1)]
            blocks = [[buffer[first - start : last - start]] for first, last in bounds]
            found = self._reader(run.file, entry).read_digested(start, blocks)
            for number, digest in enumerate(found, run.first):
                check_digest(digest, entry, number, path)
        except CheckpointError as error:
            raise in_restore(error, self._leaf_at(run.file, number)) from None

    def close(self) -> None:
        """Close all files; nobody reads any more."""
        with self._lock:
            for reader in self._open.values():
                reader.close()
            self._open.clear()

    def _reader(self, file: int, entry: FileEntry) -> FileReader:
        with self._lock:
            reader = self._open.get(file)
            if reader is None:
                reader = self._open[file] = open_committed(self._storage, self._prefix, entry)
            return reader
