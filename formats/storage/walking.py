"""The walk from the root of a local storage to a name: one component at a time, following no symbolic link below it.

A root of ten thousand steps is walked ten thousand times, so these are plain objects: a context manager made of a
generator costs more than the system calls.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from safepoint.formats.errors import StorageError
from safepoint.formats.storage.base import split_name

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["OpenDirectory", "OpenParent", "leads_to", "open_directory", "refuse_dead_link"]

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def open_directory(root: str, parts: Sequence[str]) -> int:
    """Return a descriptor of the directory, for the caller to close.

    Args:
        root: absolute path; may be a symbolic link itself.
        parts: names below it.

    Raises:
        OSError: it is not there, or something else is.
    """
    descriptor = os.open(root, _DIRECTORY_FLAGS)
    for part in parts:
        try:
            below = os.open(part, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        descriptor = below
    return descriptor


def refuse_dead_link(root: str | os.PathLike[str]) -> None:
    """Raise where a root is not there since it, or a directory above it, is a symbolic link that leads nowhere.

    Raises:
        StorageError: it is: a root that is not there yet can be made, and this one was, somewhere else.
    """
    place = Path(root)
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if place.is_symlink() and not os.path.exists(place):
        raise StorageError(
            f"the root cannot be reached: a symbolic link leads to {os.readlink(place)}, which is not there",
            path=str(place),
            errno=errno.ENOENT,
            hint="Mount or make what it leads to, or remove the link.",
        )


def leads_to(link: str, name: str) -> bool:
    """Say whether a symbolic link leads to a directory with this name in it, or nowhere. Follows it, reads nothing."""
    return not os.path.exists(link) or os.path.lexists(os.path.join(link, name))


class OpenDirectory:
    """Holds a directory open for the length of a block, as a descriptor."""

    __slots__ = ("_descriptor", "_parts", "_root")

    def __init__(self, root: str, parts: Sequence[str]) -> None:
        """Take what `open_directory` does."""
        self._root = root
        self._parts = parts

    def __enter__(self) -> int:
        """Open it."""
        self._descriptor = open_directory(self._root, self._parts)
        return self._descriptor

    def __exit__(self, *_: object) -> None:
        """Close it."""
        os.close(self._descriptor)


class OpenParent:
    """Holds the directory of a name open for the length of a block: its descriptor, and the name in it."""

    __slots__ = ("_directory", "_name")

    def __init__(self, root: str, path: str) -> None:
        """Take the root, and a path relative to it that is not the root's."""
        *parents, self._name = split_name(path)
        self._directory = OpenDirectory(root, parents)

    def __enter__(self) -> tuple[int, str]:
        """Open it."""
        return self._directory.__enter__(), self._name

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._directory.__exit__()
