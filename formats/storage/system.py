"""System calls with their rules: what is retried, what is not, and how an errno becomes a typed error with a hint.

Owns the retry of transient errors, short reads and writes, and the wording of `StorageError`. Knows nothing about
paths below a root; it works on descriptors.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

__all__ = ["UNSUPPORTED", "SystemCalls", "raised_as_storage_error", "read_fully", "storage_error", "write_fully"]

UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})
"""What file systems answer to a call or flag that they do not know."""

_OUT_OF_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_EIO_RETRIES = 2
_EIO_PAUSE_SECS = 0.02
_RENAME_NOREPLACE = 1

_HINTS = {
    errno.EROFS: "The file system is mounted read-only: choose another root, or open it for reading only.",
    errno.EACCES: "Check the permissions of this path and of the directories above it.",
    errno.EPERM: "Check the owner, the permissions and the attributes of this path.",
    errno.EIO: "The device failed, also when asked again: check the disk and the kernel's log.",
    errno.EMFILE: "This process has too many files open: raise `ulimit -n`.",
    errno.ENFILE: "This machine has too many files open: raise fs.file-max.",
    errno.ENAMETOOLONG: "The storage does not take names as long as this one: shorten it.",
    errno.ENOTDIR: "A file or symbolic link stands where a directory is needed; links are not followed below the root.",
    errno.ELOOP: "A symbolic link is in the way; links are not followed below the root.",
    errno.ESTALE: "The network file system lost this file: check the mount, then try again.",
    errno.EEXIST: "Something by this name is there already: remove it, or choose another name.",
    errno.ENOENT: "It, or its directory, is not there (any more): check whether another process removed it.",
}


def storage_error(
    error: OSError, action: str, path: str, *, needed_bytes: int | None = None, free_bytes: int | None = None
) -> StorageError:
    """Return the typed error for what the operating system answered.

    Args:
        error: the answer.
        action: what was tried, to stand after "cannot".
        path: the file or directory concerned, in full.
        needed_bytes: what the operation needs in all, for errors about space.
        free_bytes: what is free, for errors about space.
    """
    number = error.errno
    hint = _HINTS.get(number) if number is not None else None
    if number in _OUT_OF_SPACE:
        needed = "an unknown number of" if needed_bytes is None else f"{needed_bytes:,}"
        free = "an unknown number are" if free_bytes is None else f"{free_bytes:,} are"
        limit = "the quota may be lower; " if number == errno.EDQUOT else ""
        hint = f"It needs {needed} bytes and {free} free: {limit}free some space, or keep fewer steps."
    reason = os.strerror(number) if number is not None else str(error)
    return StorageError(f"cannot {action}: {reason}", path=path, errno=number, hint=hint)


def raised_as_storage_error(
    action: str,
    path: str,
    *,
    needed_bytes: int | None = None,
    free_bytes: Callable[[], int | None] | None = None,
    instead: Callable[[OSError], CheckpointError | None] | None = None,
) -> AbstractContextManager[None]:
    """Turn an OSError of the block into a StorageError; see `storage_error`.

    Args:
        action: as there.
        path: as there.
        needed_bytes: as there.
        free_bytes: asked for, when space is out, as there.
        instead: returns the error to raise in its place, or None.
    """
    return _Raised(action, path, needed_bytes, free_bytes, instead)


class _Raised(AbstractContextManager[None]):
    """What `raised_as_storage_error` returns."""

    __slots__ = ("_action", "_free_bytes", "_instead", "_needed_bytes", "_path")

    def __init__(
        self,
        action: str,
        path: str,
        needed_bytes: int | None,
        free_bytes: Callable[[], int | None] | None,
        instead: Callable[[OSError], CheckpointError | None] | None,
    ) -> None:
        self._action = action
        self._path = path
        self._needed_bytes = needed_bytes
        self._free_bytes = free_bytes
        self._instead = instead

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, StorageError):
            return
        other = None if self._instead is None else self._instead(error)
        if other is not None:
            raise other from error
        free = self._free_bytes() if self._free_bytes is not None and error.errno in _OUT_OF_SPACE else None
        raise storage_error(
            error, self._action, self._path, needed_bytes=self._needed_bytes, free_bytes=free
        ) from error


def _rename_noreplace(source_dir: int, source: str, target_dir: int, target: str) -> None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    function.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    arguments = (source_dir, os.fsencode(source), target_dir, os.fsencode(target), _RENAME_NOREPLACE)
    if function(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def _expect_in_order(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # it is advice only
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemCalls:
    """The calls whose failures have rules of their own; tests hand in failing ones.

    Attributes:
        pwrite: as os.pwrite.
        preadv: as os.preadv.
        fsync: as os.fsync.
        expect_in_order: (descriptor): advises the system to read ahead further: several threads that take turns look
            like no order to it.
        link: (directory descriptor, existing name, new name): hard link; EEXIST when the new name is taken.
        link_into: (directory, existing name, directory, new name): the same between two directories.
        rename_noreplace: (directory, name, directory, name) renames unless the target exists (EEXIST); an error of
            `UNSUPPORTED` where kernel, library or file system do not have it.
    """

    pwrite: Callable[[int, Buffer, int], int] = os.pwrite
    preadv: Callable[[int, Sequence[Buffer], int], int] = os.preadv
    fsync: Callable[[int], None] = os.fsync
    expect_in_order: Callable[[int], None] = _expect_in_order
    link: Callable[[int, str, str], None] = lambda directory, old, new: os.link(
        old, new, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False
    )
    link_into: Callable[[int, str, int, str], None] = lambda source_dir, source, target_dir, target: os.link(
        source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir, follow_symlinks=False
    )
    rename_noreplace: Callable[[int, str, int, str], None] = _rename_noreplace


def write_fully(calls: SystemCalls, descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; a short write is continued, EIO tried again twice.

    An fsync that fails is never tried again: the kernel may have dropped the pages and would then report success.
    """
    done, retries = 0, _EIO_RETRIES
    while done < len(data):
        try:
            count = calls.pwrite(descriptor, data[done:] if done else data, offset + done)
        except OSError as error:
            if error.errno != errno.EIO or retries == 0:
                raise
            retries -= 1
            time.sleep(_EIO_PAUSE_SECS)
            continue
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote nothing and gave no reason")
        done += count


def read_fully(calls: SystemCalls, descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read until `buffer` is full or the file ends and return the number of bytes; EIO is tried again twice."""
    done, retries = 0, _EIO_RETRIES
    while done < len(buffer):
        try:
            count = calls.preadv(descriptor, [buffer[done:] if done else buffer], offset + done)
        except OSError as error:
            if error.errno != errno.EIO or retries == 0:
                raise
            retries -= 1
            time.sleep(_EIO_PAUSE_SECS)
            continue
        if count == 0:
            break
        done += count
    return done
