"""What directories take on disk and what deleting them frees, where several names may be one file.

Looks at sizes and link counts; reads no content and follows no symbolic link.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

from safepoint.formats.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from safepoint.formats.storage import Storage

__all__ = ["bytes_freed", "bytes_freed_in", "bytes_of_each", "num_bytes_below", "num_bytes_in"]


def num_bytes_in(storage: Storage, name: str) -> int:
    """Return the size of a file of any storage, or of all files below a directory there."""
    if isinstance(storage, LocalStorage):
        return num_bytes_below(storage.root / name)
    return _num_bytes_below(storage, name) or storage.size(name) or 0


def _num_bytes_below(storage: Storage, name: str) -> int:
    entries = [(f"{name}/{entry.name}", entry.is_dir) for entry in storage.list(name)]
    return sum(_num_bytes_below(storage, path) if is_dir else storage.size(path) or 0 for path, is_dir in entries)


def bytes_freed_in(storage: Storage, names: Sequence[str]) -> list[int]:
    """Return how many bytes deleting each frees, as `bytes_freed`."""
    if isinstance(storage, LocalStorage):
        return bytes_freed([storage.root / name for name in names])
    return [num_bytes_in(storage, name) for name in names]


def num_bytes_below(path: Path) -> int:
    """Return the size of a file, or of all files below a directory, each file once; links are not followed."""
    return bytes_of_each([path])[0]


def bytes_of_each(paths: Sequence[Path]) -> list[int]:
    """Return the size of each, in bytes, without the files that one before it has: so they add up to what is there."""
    seen: set[tuple[int, int]] = set()
    sizes = []
    for path in paths:
        new = {(found.st_dev, found.st_ino): found.st_size for found in _files(path)}
        sizes.append(sum(size for inode, size in new.items() if inode not in seen))
        seen.update(new)
    return sizes


def bytes_freed(paths: Sequence[Path]) -> list[int]:
    """Return how many bytes deleting each frees when all are deleted, one after the other.

    A file that has another name elsewhere stays; one that several of them have goes with the last.
    """
    names: Counter[tuple[int, int]] = Counter()
    freed = []
    for path in paths:
        size = 0
        for found in _files(path):
            names[found.st_dev, found.st_ino] += 1
            if names[found.st_dev, found.st_ino] == found.st_nlink:
                size += found.st_size
        freed.append(size)
    return freed


def _files(path: Path) -> Iterator[os.stat_result]:
    """Yield what is known of each name of a file; what goes away meanwhile is left out."""
    is_folder = path.is_dir() and not path.is_symlink()
    walk = ((folder, names) for folder, _, names in os.walk(path)) if is_folder else [(str(path.parent), [path.name])]
    for folder, names in walk:
        for name in names:
            with suppress(FileNotFoundError):
                yield os.lstat(os.path.join(folder, name))
