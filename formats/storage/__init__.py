"""Storages: where named bytes live. `base` is the contract; the others keep it."""

from __future__ import annotations

from safepoint.formats.storage.base import Entry, FileReader, FileWriter, Storage, VersionedBytes, WrittenFile
from safepoint.formats.storage.local import LocalStorage
from safepoint.formats.storage.memory import MemoryStorage
from safepoint.formats.storage.memory_objects import MemoryObjects
from safepoint.formats.storage.objects import ObjectStorage
from safepoint.formats.storage.opening import open_storage
from safepoint.formats.storage.options import StorageOptions

__all__ = [
    "Entry",
    "FileReader",
    "FileWriter",
    "LocalStorage",
    "MemoryObjects",
    "MemoryStorage",
    "ObjectStorage",
    "Storage",
    "StorageOptions",
    "VersionedBytes",
    "WrittenFile",
    "open_storage",
]
