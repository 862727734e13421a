"""What a step's files must be: of the size, and with the digests, that were committed.

Owns the errors about those that are not. Opens files and reads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.formats.blocks import block_bounds
from safepoint.formats.errors import CheckpointError, CorruptDataError

if TYPE_CHECKING:
    from safepoint.formats.entries import FileEntry
    from safepoint.formats.storage.base import FileReader, Storage

__all__ = ["check_digest", "in_restore", "open_committed", "path_in"]

_HINT = "It was changed or damaged after it was written: restore another step, or a copy of this one."
_RESTORE_HINT = (
    "The target is partly overwritten: restore another step into it (restore_latest does), or a copy of this one."
)


def path_in(prefix: str, path: str) -> str:
    """Return the path of a file of a step."""
    return f"{prefix}/{path}" if prefix else path


def open_committed(storage: Storage, prefix: str, entry: FileEntry) -> FileReader:
    """Open a file of a step, and refuse one of another size.

    Raises:
        CorruptDataError: it has another one than its entry says.
        StorageError: it is missing or cannot be opened.
    """
    path = path_in(prefix, entry.path)
    reader = storage.open_reader(path, num_bytes=entry.num_bytes)
    if reader.num_bytes == entry.num_bytes:
        return reader
    reader.close()
    raise CorruptDataError(
        f"the file has {reader.num_bytes:,} bytes, and had {entry.num_bytes:,} when it was committed",
        path=storage.describe(path),
        target_modified=False,
        hint=_HINT,
    )


def check_digest(found: str, entry: FileEntry, number: int, path: str) -> None:
    """Refuse a block that was changed.

    Args:
        found: its digest.
        entry: of the file.
        number: of the block.
        path: in full, for messages.

    Raises:
        CorruptDataError: its digest is another one than its entry says.
    """
    if found != entry.digests[number]:
        start, end = block_bounds(entry, number)
        raise CorruptDataError(
            f"bytes {start:,} to {end:,} are not those that were committed: their digest differs",
            path=path,
            target_modified=False,
            hint=_HINT,
        )


def in_restore(error: CheckpointError, leaf: str) -> CheckpointError:
    """Add to an error what it means for a restore under way: its targets are no longer what they were."""
    if isinstance(error, CorruptDataError):
        error.target_modified = True
        error.hint = _RESTORE_HINT
    return error.with_context(leaf=leaf)
