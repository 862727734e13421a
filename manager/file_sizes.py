"""The sizes of many files, asked for at once where each is a request to a server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from safepoint.manager.errors import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.storage import Storage

__all__ = ["sizes_of"]


def sizes_of(storage: Storage, prefix: str, files: Sequence[FileEntry]) -> list[int | CorruptDataError | None]:
    """Return for each file its size, None where it is missing, or what is wrong where it is no file.

    Raises:
        StorageError: the storage failed.
    """

    def look(file: FileEntry) -> int | CorruptDataError | None:
        try:
            return storage.size(f"{prefix}/{file.path}", expected=file.num_bytes)
        except CorruptDataError as error:
            return error

    if storage.part_bytes is None or len(files) <= 1:
        return [look(file) for file in files]
    with ThreadPoolExecutor(min(2 * storage.num_streams, len(files)), "safepoint-sizes") as pool:
        return list(pool.map(look, files))
