"""Paths below the root of a storage: relative, with "/" between their parts, in one spelling each."""

from __future__ import annotations

from safepoint.formats.errors import InvalidArgumentError

__all__ = ["split_name", "split_path"]

_NO_NAMES = frozenset({"", ".", ".."})


def split_path(path: str) -> tuple[str, ...]:
    """Return the parts of a storage path, () for the root.

    Raises:
        InvalidArgumentError: it could name something outside the root, or is not in its one spelling.
    """
    if path == "":
        return ()
    parts = tuple(path.split("/"))
    if "\0" in path or not _NO_NAMES.isdisjoint(parts):
        raise InvalidArgumentError(
            f"not a path inside the storage: {path!r}",
            hint='Give a relative path with "/" between its parts, without empty, "." and ".." parts.',
        )
    return parts


def split_name(path: str) -> tuple[str, ...]:
    """Return the parts of a storage path that is not the root's; there is at least one.

    Raises:
        InvalidArgumentError: as `split_path`, and for "".
    """
    parts = split_path(path)
    if not parts:
        raise InvalidArgumentError("the root of a storage is neither a file nor to be removed or renamed")
    return parts
