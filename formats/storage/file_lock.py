"""The lock of a local file or directory, waited for no longer than the caller allows.

flock(2): it goes when its holder dies, and holds between processes of one host, on network file systems often of all.
Where the file system has no such lock, none is taken: what it protects is then only unlikely to go wrong.
"""

from __future__ import annotations

import errno
import fcntl
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["held_lock"]

_PAUSE_SECS = 0.01
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF})
"""EBADF: NFS locks only what is open for writing, which a directory never is."""


@contextmanager
def held_lock(descriptor: int, *, deadline_secs: float) -> Iterator[bool]:
    """Hold the lock of an open file for a block; yield False when somebody else held it all the time."""
    try:
        yield _lock(descriptor, time.monotonic() + deadline_secs)
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # said aloud, since a child forked meanwhile has the descriptor too


def _lock(descriptor: int, give_up: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return True
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR) or time.monotonic() > give_up:
                return False
            time.sleep(_PAUSE_SECS)
        else:
            return True
