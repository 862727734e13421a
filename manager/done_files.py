"""What long work on files has finished, kept beside them: whoever goes on after a kill does not do it again.

A note is written after its file is durable, so a lost note costs work and never more. Knows nothing of what is noted.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Self

from safepoint.formats.checksum import digest
from safepoint.manager.errors import CheckpointError

if TYPE_CHECKING:
    from types import TracebackType

    from safepoint.formats.storage import Storage

__all__ = ["DoneFiles"]

_MAX_BYTES = 1 << 30
_INTERVAL_SECS = 1.0
_SHARE = 20
"""Between two writings of the notes passes at least so many times as long as one took."""


class DoneFiles:
    """Notes by file name, kept in one file that is replaced now and then, and when the block ends.

    Args:
        storage: of the directory.
        path: of the file with the notes; one that cannot be read counts as none.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._notes = _read(storage, path)
        self._is_changed = False
        self._due = 0.0

    def get(self, name: str) -> Any:
        """Return the note of a file that is done; None where it is not."""
        return self._notes.get(name)

    def add(self, name: str, note: Any) -> None:
        """Note that a file is done, and durable.

        Args:
            name: of the file.
            note: JSON.
        """
        self._notes[name] = note
        self._is_changed = True
        if time.monotonic() >= self._due:
            self._write()

    def remove(self) -> None:
        """Forget everything: the work is done."""
        self._is_changed = False
        self._storage.delete(self._path)

    def _write(self) -> None:
        started = time.monotonic()
        text = json.dumps(self._notes)
        self._storage.replace(self._path, json.dumps({"digest": digest(text.encode()), "notes": text}).encode())
        self._is_changed = False
        ended = time.monotonic()
        self._due = ended + max(_INTERVAL_SECS, _SHARE * (ended - started))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_changed:
            return
        try:
            self._write()
        except CheckpointError:
            if error is None:  # what ended the work counts more
                raise


def _read(storage: Storage, path: str) -> dict[str, Any]:
    try:
        if storage.size(path) is None:
            return {}
        value = json.loads(storage.get(path, max_bytes=_MAX_BYTES))
        notes = json.loads(value["notes"])
        is_whole = value["digest"] == digest(value["notes"].encode())
    except (CheckpointError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return notes if is_whole and isinstance(notes, dict) else {}
