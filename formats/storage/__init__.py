"""Storages: where named bytes live. `base` is the contract; `LocalStorage` and `MemoryStorage` keep it."""

from __future__ import annotations

from safepoint.formats.storage.base import Entry, FileReader, FileWriter, Storage, WrittenFile
from safepoint.formats.storage.local import LocalStorage
from safepoint.formats.storage.memory import MemoryStorage

__all__ = ["Entry", "FileReader", "FileWriter", "LocalStorage", "MemoryStorage", "Storage", "WrittenFile"]
