"""A second name for a file of a local file system, or the finding that it cannot have one.

Works on descriptors of the two directories; knows nothing about paths below a root.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from safepoint.formats.storage.system import UNSUPPORTED

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.storage.system import SystemCalls

__all__ = ["link_between"]

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a FIFO must not hold us up
_REFUSED = UNSUPPORTED | {errno.EXDEV, errno.EMLINK}
"""What says that this file cannot have another name there, now and later."""


def link_between(
    calls: SystemCalls, open_source_dir: Callable[[], int], source: str, target_dir: int, target: str
) -> bool:
    """Link a regular file to a new name, its link count durably; the target's directory is the caller's to sync.

    The link count matters: should a crash lose it and keep the name, a later deletion of one name would free the file.

    Returns:
        False when the file system refuses, or there is no such file; nothing has changed then.

    Raises:
        OSError: ELOOP when `source` is no regular file, EEXIST when `target` is there, and what else the system
            answers; nothing has changed.
    """
    opened: list[int] = []
    try:
        try:
            opened.append(open_source_dir())
            opened.append(os.open(source, _READ_FLAGS, dir_fd=opened[0]))
        except FileNotFoundError:
            return False
        source_dir, descriptor = opened
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), source)
        if not _try_link(calls, source_dir, source, target_dir, target):
            return False
        try:
            linked = os.stat(target, dir_fd=target_dir, follow_symlinks=False)
            if (linked.st_dev, linked.st_ino) != (found.st_dev, found.st_ino):  # swapped between the two calls
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), source)
            calls.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                os.unlink(target, dir_fd=target_dir)
            raise
    finally:
        for one in opened:
            os.close(one)
    return True


def _try_link(calls: SystemCalls, source_dir: int, source: str, target_dir: int, target: str) -> bool:
    try:
        calls.link_into(source_dir, source, target_dir, target)
    except FileNotFoundError:
        if _is_there(source_dir, source):
            raise
        return False
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return False
    return True


def _is_there(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
