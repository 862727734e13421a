"""Clearing the control directory of a root of what killed processes left there.

A process that opens a root proves with a small file that all see the same one, and files there are replaced through
temporary ones; whoever is killed in between leaves a file. Only names of exactly these shapes are touched, and only
when they are so old that nobody can be using them. Old is told by the file system's own clock.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from contextlib import suppress

from safepoint.manager.pins import CONTROL_DIR

__all__ = ["clear_control_dir"]

logger = logging.getLogger("safepoint")

_LEFT_BEHIND = re.compile(r"nonce-[0-9a-f]{16}|\.tmp-[0-9a-f]{16}", re.ASCII)
_OLD_SECS = 3600.0
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def clear_control_dir(root: str, *, now: float) -> list[str]:
    """Remove what is old and of ours in the control directory and below its pins; return the names.

    Called by: the root's owner, when it became that. Failures are logged: the next owner tries again.

    Args:
        root: the root directory.
        now: the time by the file system's clock, in seconds: that of a file just written there.
    """
    removed: list[str] = []
    for directory in (f"{root}/{CONTROL_DIR}", f"{root}/{CONTROL_DIR}/pins"):
        try:
            removed += _clear(directory, now)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("cannot clear %s: %s", directory, error)
    return removed


def _clear(directory: str, now: float) -> list[str]:
    removed: list[str] = []
    descriptor = os.open(directory, _FLAGS)
    try:
        for name in os.listdir(descriptor):
            if _LEFT_BEHIND.fullmatch(name) is None:
                continue
            with suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and now - found.st_mtime > _OLD_SECS:
                    os.unlink(name, dir_fd=descriptor)
                    removed.append(name)
    finally:
        os.close(descriptor)
    return removed
