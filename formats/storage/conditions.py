"""Proof that a store keeps conditions: without them two jobs that save one step would both believe that they won.

Servers that know no `If-None-Match` take the write and say nothing.
"""

from __future__ import annotations

import errno
import secrets
from typing import TYPE_CHECKING

from safepoint.formats.errors import StorageError

if TYPE_CHECKING:
    from safepoint.formats.storage.base import Storage

__all__ = ["require_conditional_writes"]

_MAX_BYTES = 4096


def require_conditional_writes(storage: Storage, path: str) -> None:
    """Create the small file `path` twice, and replace it; it stays.

    The second try to create it, and every later one, must find it taken, and a version that was just read must do.

    Args:
        storage: to be tried.
        path: used for this alone.

    Raises:
        StorageError: EOPNOTSUPP when the store created what was there already, or refuses conditions that hold.
    """
    if all(storage.put_if_absent(path, _content()) for _ in range(2)):
        raise StorageError(
            "this store does not keep conditions: it created an object that was there already",
            path=storage.describe(path),
            errno=errno.EOPNOTSUPP,
            hint="Checkpoints would not be safe in it. Use a server that keeps `If-None-Match: *` (Amazon S3, Google "
            "Cloud Storage, MinIO and Ceph in newer releases), or a local root.",
        )
    found = storage.read_versioned(path, max_bytes=_MAX_BYTES)
    if found is not None:  # False: another process does the same, which proves it as well
        storage.put_if_unchanged(path, _content(), found.version)


def _content() -> bytes:
    return secrets.token_bytes(16)
