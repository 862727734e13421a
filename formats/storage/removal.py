"""Removal of a directory tree through descriptors: links are removed, never followed; others may remove meanwhile."""

from __future__ import annotations

import errno
import os
from contextlib import suppress

__all__ = ["remove_tree"]

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_DEPTH = 64
_MAX_SWEEPS = 16


def remove_tree(parent: int, name: str, *, depth: int = 0) -> None:
    """Remove `name` in the directory `parent`, with all below it.

    Entries that vanish are fine; entries that others add are removed too, within reason.

    Raises:
        OSError: ENOTEMPTY when others add faster than this removes; ELOOP when directories lie deeper than any
            checkpoint's (one descriptor is held a level).
    """
    if depth > _MAX_DEPTH:
        raise OSError(errno.ELOOP, f"directories are nested deeper than {_MAX_DEPTH}", name)
    try:
        directory = os.open(name, _FLAGS, dir_fd=parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        return
    try:
        _remove_content(directory, parent, name, depth)
    finally:
        os.close(directory)


def _remove_content(directory: int, parent: int, name: str, depth: int) -> None:
    for sweep in range(_MAX_SWEEPS):
        with os.scandir(directory) as scan:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in scan]
        for child, is_dir in found:
            _remove_entry(directory, child, is_dir=is_dir, depth=depth)
        try:
            os.rmdir(name, dir_fd=parent)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or sweep == _MAX_SWEEPS - 1:
                raise
        else:
            return


def _remove_entry(directory: int, name: str, *, is_dir: bool, depth: int) -> None:
    if not is_dir:
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            return
        except IsADirectoryError:  # swapped since it was listed
            pass
        else:
            return
    remove_tree(directory, name, depth=depth + 1)
