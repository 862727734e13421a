"""From the text that names a root to its storage. Touches nothing."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.storage.local import LocalStorage
from safepoint.formats.storage.memory_objects import MemoryObjects
from safepoint.formats.storage.object_urls import parse_object_url
from safepoint.formats.storage.objects import ObjectStorage
from safepoint.formats.storage.options import StorageOptions

if TYPE_CHECKING:
    from safepoint.formats.storage.base import Storage

__all__ = ["is_url", "open_storage"]

_memory: dict[str, MemoryObjects] = {}
_memory_lock = threading.Lock()


def is_url(root: str) -> bool:
    """Say whether this names a root by URL, not by path."""
    return "://" in root


def open_storage(root: str | os.PathLike[str], options: StorageOptions | None = None) -> Storage:
    """Return the storage of a root.

    Args:
        root: a local path, a `file://` URL of one, `gs://bucket/prefix`, `s3://bucket/prefix`, or `memory://name`: an
            object store of that name in this process.
        options: for gs:// and s3://.

    Raises:
        InvalidArgumentError: it is none of these, or the options make no sense for it.
    """
    text = os.fspath(root)
    if not is_url(text):
        return LocalStorage(text)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return LocalStorage(unquote(parts.path))
    if parts.scheme == "memory" and (parts.netloc or parts.path):
        location = text.rstrip("/")
        with _memory_lock:
            return _memory.setdefault(location, MemoryObjects(location))
    root_of_objects = parse_object_url(text, options or StorageOptions())
    if root_of_objects is not None:
        return ObjectStorage(root_of_objects, options)
    raise InvalidArgumentError(
        f"{text!r} names no storage that is known here", hint="Give a path, gs://bucket/prefix or s3://bucket/prefix."
    )
