"""The contract of a storage: a tree of directories and files below one root.

Owns the interface (the check of paths: `paths`). Knows nothing about steps, manifests, formats or processes; it moves
named bytes, durably, and says precisely what failed.

Rules that every implementation keeps (tests/contract/test_storage.py holds them to it):

- Paths are relative to the root and "/"-separated; "" is the root. Absolute paths and empty, "." and ".." parts are
  refused.
- What is below the root stays below it: symbolic links found there are never followed.
- Files appear under the user's umask, are created exclusively, and a failed operation leaves no partial file behind.
- Where `renames` is false (object stores) directories are no things of their own, only what keys have in front: they
  are never missing, and never there without a file below.
- Failures are `StorageError` with `path` and `errno`. Something else than a regular file where one is to be read is
  `CorruptDataError`: whoever wrote the step did not put it there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from safepoint.formats.checksum import BLOCK_BYTES, digest_of_parts
from safepoint.formats.storage.paths import split_name, split_path

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from types import TracebackType

    from typing_extensions import Buffer

__all__ = [
    "PART_BYTES",
    "Entry",
    "FileReader",
    "FileWriter",
    "Storage",
    "VersionedBytes",
    "WrittenFile",
    "split_name",
    "split_path",
]


PART_BYTES = 64 << 20
"""How large data files are at most on object stores, in bytes."""


class Entry(NamedTuple):
    """One name in a directory.

    Attributes:
        name: the name, without its directory.
        is_dir: whether it is a directory; a symbolic link never is one.
        identity: changes when the entry is replaced by another, or (for a directory) when names in it come and go.
            Only for comparing; it lets a caller skip reading again what it has read.
        is_link: whether it is a symbolic link.
    """

    name: str
    is_dir: bool
    identity: tuple[int, ...] = ()
    is_link: bool = False


class VersionedBytes(NamedTuple):
    """A small file as it was at one moment.

    Attributes:
        data: its content.
        version: only for `Storage.put_if_unchanged` and `delete_if_unchanged`; another content has another version.
    """

    data: bytes
    version: Hashable


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """What a finished writer put on disk.

    Attributes:
        num_bytes: size of the file.
        block_bytes: size of each digested block; the last one may be shorter.
        digests: one digest a block, in order (`safepoint.formats.checksum`).
    """

    num_bytes: int
    block_bytes: int
    digests: tuple[str, ...]


class FileWriter(ABC):
    """Writes one new file from start to end; used by one thread at a time.

    As a context manager it aborts when left without `finish`, by an exception or otherwise.
    """

    def report_to(self, progress: Callable[[int], None]) -> None:
        """Have a function called with the number of bytes each time that so many more are with the storage.

        From any thread, never from two at once. Before the first append. An implementation that cannot tell calls it
        never.
        """
        del progress

    @abstractmethod
    def append(self, data: Buffer) -> None:
        """Append bytes.

        Args:
            data: any C-contiguous buffer of any length; has been read when this returns.

        Raises:
            StorageError: this or an earlier append failed; abort, nothing else helps.
            InvalidArgumentError: more bytes than announced.
        """

    @abstractmethod
    def finish(self) -> WrittenFile:
        """Make the file durable and return what was written; the file's directory is the caller's to sync.

        Raises:
            StorageError: the file could not be written; it has been removed.
            InvalidArgumentError: fewer bytes than announced; the file has been removed.
        """

    @abstractmethod
    def abort(self) -> None:
        """Stop and remove the file. Does nothing after `finish` or a first `abort`; never raises StorageError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()


class FileReader(ABC):
    """Reads one regular file; may be used by several threads at once."""

    num_bytes: int
    """Size of the file when it was opened."""

    @abstractmethod
    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole of `buffer` (writable, contiguous) with the bytes from `offset` on.

        Raises:
            CorruptDataError: the file ends before the buffer is full.
            StorageError: the storage failed.
        """

    def read_parts_into(self, offset: int, parts: list[memoryview]) -> None:
        """Fill buffers one after the other with the bytes from `offset` on, in one request where that is cheaper.

        Raises:
            CorruptDataError: the file ends before the last is full.
            StorageError: the storage failed.
        """
        for part in parts:
            self.read_into(offset, part)
            offset += len(part)

    def read_digested(self, offset: int, blocks: list[list[memoryview]]) -> list[str]:
        """Do as `read_parts_into` does with the buffers of blocks that follow each other; return the digest of each."""
        self.read_parts_into(offset, [part for parts in blocks for part in parts])
        return [digest_of_parts(parts) for parts in blocks]

    def bypass_cache(self) -> None:
        """Read from the medium from now on, not from a cache, and leave nothing in one, where that can be had."""

    def expect_in_order(self) -> None:
        """Learn that most of the file will be read, from its beginning to its end, if that makes it any faster."""

    @abstractmethod
    def close(self) -> None:
        """Release the file; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Storage(ABC):
    """A root with directories and files. Methods may be called from several threads at once."""

    location: str
    """The root, for messages."""

    renames: bool = True
    """Whether `rename_dir` is one step here. Object stores have none: it is a bug of ours to call it there."""

    num_streams: int = 2
    """Files, or ranges of them, that are worth moving at once, each by a thread of its own."""

    read_bytes: int = 0
    """Bytes of a file that follow each other and are better asked for at once than one by one; 0: it makes no odds."""

    is_remote: bool = False
    """Whether each read goes over a network, also where another process of this host has just read the same bytes."""

    part_bytes: int | None = None
    """How large, in bytes, data files should be at most: a writer holds as much in memory. None for no limit."""

    def describe(self, path: str) -> str:
        """Return `path` in full, for messages and the `path` of errors."""
        return f"{self.location}/{path}" if path else self.location

    @abstractmethod
    def make_dir(self, path: str, *, exist_ok: bool = True) -> None:
        """Create one directory. Its parent must exist, so that what was renamed away is not brought back by accident.

        For "" the root is created with its parents. Object stores only check.

        Raises:
            StorageError: ENOENT without a parent; EEXIST when it is there and `exist_ok` is false, or is no directory.
        """

    @abstractmethod
    def list(self, path: str) -> list[Entry]:
        """Return the directory's entries in no particular order; [] when there is no such directory.

        Raises:
            StorageError: ENOTDIR when it is something else than a directory.
        """

    @abstractmethod
    def size(self, path: str, *, expected: int | None = None) -> int | None:
        """Return the size of a file in bytes, None when there is nothing by that name.

        Args:
            path: the file.
            expected: what it probably is; some object stores must search otherwise.

        Raises:
            CorruptDataError: something else than a regular file is there.
        """

    @abstractmethod
    def get(self, path: str, *, max_bytes: int) -> bytes:
        """Return the whole content of a file.

        Raises:
            StorageError: ENOENT when it is missing.
            CorruptDataError: it is larger than `max_bytes`, or no regular file.
        """

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Create a file with this content, durable when this returns; its directory is the caller's to sync.

        Raises:
            StorageError: EEXIST when something is there already.
        """

    @abstractmethod
    def put_if_absent(self, path: str, data: bytes) -> bool:
        """Create a file with this content at once and durably; return False, changing nothing, when the name is taken.

        Nobody ever sees a part of the content, and of several callers exactly one gets True.
        """

    @abstractmethod
    def replace(self, path: str, data: bytes) -> None:
        """Create or replace a small file at once and durably: everybody sees the old or the new content, whole."""

    @abstractmethod
    def read_versioned(self, path: str, *, max_bytes: int) -> VersionedBytes | None:
        """Return the content of a file and its version, None when it is missing.

        Raises:
            CorruptDataError: it is larger than `max_bytes`, or no regular file.
        """

    @abstractmethod
    def put_if_unchanged(self, path: str, data: bytes, version: Hashable) -> bool:
        """Replace a small file as `replace` does if it is still the one that was read; else change nothing.

        Of several callers who read one version exactly one gets True. An answer that is in doubt is settled by looking
        whether `data` is there, so callers put something in it that nobody else writes.

        Args:
            path: the file.
            data: the new content.
            version: of `read_versioned`.

        Returns:
            False when the file is missing, or another one by now.
        """

    @abstractmethod
    def delete_if_unchanged(self, path: str, version: Hashable) -> bool:
        """Delete a file if it is still the one that was read; return False, changing nothing, when it is another one.

        A file that is missing by now gives True.
        """

    @abstractmethod
    def rename_dir(self, source: str, target: str) -> bool:
        """Rename a directory in one step; the parents are the caller's to sync.

        Returns:
            True when this call did it; False when `source` is gone (somebody else was first), nothing having changed.

        Raises:
            StorageError: EEXIST when `target` is there, even an empty directory, nothing having changed;
                ENOTDIR when `source` is no directory; ENOENT when the parent of `target` is missing.
        """

    @abstractmethod
    def sync_dir(self, path: str) -> None:
        """Make the names in a directory durable."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file or a symbolic link; does nothing when it is gone."""

    @abstractmethod
    def delete_tree(self, path: str) -> None:
        """Remove a directory with all below it, or a file. Tolerates that others remove or add entries meanwhile.

        Links are removed, never followed. A directory that is gone is fine. The root itself cannot be removed.
        """

    @abstractmethod
    def delete_dir(self, path: str) -> bool:
        """Remove a directory if nothing is in it; return False when something is. One that is gone gives True."""

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return the bytes that may still be written, None where that is not known."""

    @abstractmethod
    def open_writer(self, path: str, *, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> FileWriter:
        """Create a new file to which exactly `num_bytes` will be appended.

        Args:
            path: the file; its directory exists.
            num_bytes: its size.
            block_bytes: size of the digested blocks; the default but for tests.

        Raises:
            StorageError: EEXIST when something is there already; object stores may find that out in `finish`.
        """

    @abstractmethod
    def open_reader(self, path: str, *, num_bytes: int | None = None) -> FileReader:
        """Open a file for reading.

        Args:
            path: the file.
            num_bytes: what its size probably is; some object stores must search otherwise.

        Raises:
            StorageError: ENOENT when it is missing.
            CorruptDataError: it is no regular file.
        """

    def link_file(self, source: str, target: str) -> bool:
        """Give a file a second name, the equal of the first. The target's directory is the caller's to sync.

        Returns:
            False, nothing having changed, where the storage has no links or refuses this one, or `source` is gone.

        Raises:
            StorageError: EEXIST when something is at `target`; ENOENT when its parent is missing.
            CorruptDataError: `source` is no regular file.
        """
        split_name(source)
        split_name(target)
        return False

    def map_file(self, path: str) -> memoryview | None:
        """Return the content of a file as memory that is read when it is looked at, or None where that cannot be had.

        It is writable; what is written stays in this process. It lives as long as a view of it does.

        Raises:
            StorageError: ENOENT when it is missing.
            CorruptDataError: it is no regular file.
        """
        del path
        return None
