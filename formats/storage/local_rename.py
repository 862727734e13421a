"""Renaming a local directory so that one of several wins and nothing is ever replaced, whatever the kernel has.

Works on descriptors of the directories that hold the two names.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

from safepoint.formats.storage.system import UNSUPPORTED

if TYPE_CHECKING:
    from safepoint.formats.storage.system import SystemCalls

__all__ = ["rename_if_there"]


def rename_if_there(calls: SystemCalls, source_dir: int, source: str, target_dir: int, target: str) -> bool:
    """Rename a directory; return False when it is not there (any more).

    Raises:
        OSError: ENOTDIR when it is no directory, EEXIST when the target is there, as a directory or otherwise.
    """
    mode = _mode_of(source_dir, source)
    if mode is None:
        return False
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), source)
    try:
        _rename(calls, source_dir, source, target_dir, target)
    except FileNotFoundError:
        if _mode_of(source_dir, source) is not None:
            raise
        return False
    return True


def _rename(calls: SystemCalls, source_dir: int, source: str, target_dir: int, target: str) -> None:
    try:
        calls.rename_noreplace(source_dir, source, target_dir, target)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    else:
        return
    # A plain rename replaces an empty directory. Everything that is renamed here holds files, so of two that
    # race for one name the second is refused by the kernel (ENOTEMPTY) even without this look ahead.
    if _mode_of(target_dir, target) is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
    try:
        os.rename(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error


def _mode_of(directory: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None
