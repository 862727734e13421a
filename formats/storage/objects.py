"""ObjectStorage: the contract of a storage kept on an object store (gs://, s3://).

Owns what a flat set of keys makes of directories, and what becomes of an answer that is in doubt: a conditional write
that failed, or that was refused after a lost answer was tried again, is settled by reading back. Requests, their
deadlines and errors: `object_client`. Large files: `object_files`.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.checksum import BLOCK_BYTES
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, StorageError
from safepoint.formats.storage.base import (
    PART_BYTES,
    Entry,
    FileReader,
    FileWriter,
    Storage,
    VersionedBytes,
    split_name,
    split_path,
)
from safepoint.formats.storage.block_writer import BlockWriter
from safepoint.formats.storage.buffers import BUFFERS
from safepoint.formats.storage.flight import ByteBudget
from safepoint.formats.storage.object_client import MISSING, ObjectClient, Stored
from safepoint.formats.storage.object_files import ObjectFile, ObjectReader
from safepoint.formats.storage.options import StorageOptions
from safepoint.formats.storage.system import storage_error

if TYPE_CHECKING:
    from collections.abc import Hashable

    from safepoint.formats.storage.object_urls import ObjectRoot

__all__ = ["ObjectStorage"]

_QUICK_SECS = 1.0  # a small object that takes longer may be a huge one
_MAX_KEY_BYTES = 1024  # both services
_NUM_TRIES = 3
_NUM_SWEEPS = 4


class ObjectStorage(Storage):
    """A prefix of a bucket."""

    renames = False
    is_remote = True
    part_bytes = PART_BYTES
    read_bytes = 16 << 20

    def __init__(self, root: ObjectRoot, options: StorageOptions | None = None) -> None:
        """Touch nothing; the first request connects.

        Args:
            root: where.
            options: how to reach it.
        """
        options = options or StorageOptions()
        self.location = root.location
        self.num_streams = options.num_streams
        self._deadline_secs = options.deadline_secs
        self._max_object_bytes = root.max_object_bytes
        self._client = ObjectClient(
            root.spec, root.location, deadline_secs=options.deadline_secs, bucket_url=root.bucket_url
        )
        self._prefix_bytes = str(root.spec["path"]).encode()
        self._budget = ByteBudget(options.max_in_flight_bytes)

    # Directories are what keys have in front

    @override
    def make_dir(self, path: str, *, exist_ok: bool = True) -> None:
        split_path(path)
        if not exist_ok and self.list(path):
            raise self._error(errno.EEXIST, "create the directory", path)
        if not path:
            self._client.keys(".safepoint/")  # the cheapest question that a missing bucket does not answer

    @override
    def list(self, path: str) -> list[Entry]:
        start = f"{path}/" if split_path(path) else ""
        found: set[tuple[str, bool]] = set()
        for key in self._client.keys(start):
            name, below, _ = key.partition("/")
            if name not in ("", ".", ".."):  # not to be reached by any path
                found.add((name, bool(below)))
        return [Entry(name, is_dir) for name, is_dir in found]

    @override
    def sync_dir(self, path: str) -> None:
        split_path(path)

    @override
    def rename_dir(self, source: str, target: str) -> bool:
        split_name(source)
        split_name(target)
        raise self._error(errno.EOPNOTSUPP, f"rename {self.describe(source)} to this name", target)

    @override
    def delete_dir(self, path: str) -> bool:
        split_name(path)
        return not self.list(path)

    @override
    def delete_tree(self, path: str) -> None:
        self._key(path)
        self._client.delete_all([path])
        for _ in range(_NUM_SWEEPS):  # others may be adding
            keys = self._client.keys(f"{path}/")
            if not keys:
                return
            self._client.delete_all(f"{path}/{key}" for key in keys)

    @override
    def delete(self, path: str) -> None:
        self._key(path)
        self._client.delete_all([path])

    @override
    def free_bytes(self) -> int | None:
        return None

    # Small files

    @override
    def size(self, path: str, *, expected: int | None = None) -> int | None:
        self._key(path)
        return self._client.size(path, expected=expected)

    @override
    def get(self, path: str, *, max_bytes: int) -> bytes:
        found = self.read_versioned(path, max_bytes=max_bytes)
        if found is None:
            raise self._error(errno.ENOENT, "read", path)
        return found.data

    @override
    def read_versioned(self, path: str, *, max_bytes: int) -> VersionedBytes | None:
        self._key(path)
        request = self._client.start_read(path)
        found: Stored | None
        try:
            found = self._client.read_result(request, within_secs=_QUICK_SECS)
        except TimeoutError:
            if self._client.is_longer(path, max_bytes):
                self._client.cancel(request)
                raise self._too_long(path, "more", max_bytes) from None
            found = self._client.read_result(request)
        if found is None:
            return None
        if len(found.data) > max_bytes:
            raise self._too_long(path, f"{len(found.data):,}", max_bytes)
        return VersionedBytes(found.data, found.version)

    @override
    def put(self, path: str, data: bytes) -> None:
        if not self.put_if_absent(path, data):
            raise self._error(errno.EEXIST, "write", path)

    @override
    def put_if_absent(self, path: str, data: bytes) -> bool:
        self._key(path)
        for _ in range(_NUM_TRIES):
            if self._write(path, data, MISSING):
                return True
            found = self._client.read(path)
            if found is not None:
                return found.data == data  # we may have been the first: an answer was lost, and the second try refused
            self._check_bucket()  # a missing one refuses just so; else somebody deleted what had been there
        raise StorageError(
            "cannot write: others keep creating and deleting it", path=self.describe(path), errno=errno.EAGAIN
        )

    @override
    def put_if_unchanged(self, path: str, data: bytes, version: Hashable) -> bool:
        self._key(path)
        if not isinstance(version, bytes) or version == MISSING:
            raise InvalidArgumentError("not a version of an object", path=self.describe(path))
        if self._write(path, data, version):
            return True
        found = self._client.read(path)
        if found is None:
            self._check_bucket()
            return False
        if found.version != version:
            return found.data == data
        raise StorageError(
            "cannot write: the store refuses a condition that holds",
            path=self.describe(path),
            errno=errno.EOPNOTSUPP,
            hint="It does not keep `If-Match` on writes: use another server, or a newer release of it. (Ceph 16 takes "
            "the quotes of an entity tag for a part of it.)",
        )

    @override
    def delete_if_unchanged(self, path: str, version: Hashable) -> bool:
        """Delete a file if it is still the one that was read.

        S3 compares and then deletes, in two requests: a file that is replaced between them is lost.
        """
        self._key(path)
        if not isinstance(version, bytes):
            raise InvalidArgumentError("not a version of an object", path=self.describe(path))
        request = self._client.start_write(path, None, version=version)
        try:
            if self._client.written(request):
                return True
        except StorageError:
            if self._client.read(path) is not None:
                raise
            return True
        return self._client.read(path) is None

    @override
    def replace(self, path: str, data: bytes) -> None:
        self._key(path)
        self._client.written(self._client.start_write(path, data))

    def _write(self, path: str, data: bytes, version: bytes) -> bool:
        """Write if the version is this, and return whether it is certain that it was written, here and now.

        Raises:
            StorageError: it was not, as far as one can see. A request without an answer may still be carried out.
        """
        try:
            return self._client.written(self._client.start_write(path, data, version=version))
        except StorageError as error:
            found = self._read_after(error, path)
            if found is None or found.version == version:
                raise
            return found.data == data

    def _read_after(self, error: StorageError, path: str) -> Stored | None:
        try:
            return self._client.read(path)
        except StorageError:
            raise error from None

    # Large files

    @override
    def open_writer(self, path: str, *, num_bytes: int, block_bytes: int = BLOCK_BYTES) -> FileWriter:
        """Begin to gather a file, which `finish` sends as one object.

        Blocks while `max_in_flight_bytes` are gathered or on their way: a thread has one writer at a time. That the
        name is taken is found out by `finish`, which raises it.
        """
        self._key(path)
        if num_bytes < 0 or block_bytes <= 0:
            raise InvalidArgumentError(f"cannot write {num_bytes} bytes in blocks of {block_bytes}")
        if num_bytes > self._max_object_bytes:
            raise StorageError(
                f"cannot write {num_bytes:,} bytes as one object",
                path=self.describe(path),
                errno=errno.EFBIG,
                hint=f"This store takes at most {self._max_object_bytes:,}: cut it into smaller parts.",
            )
        file = ObjectFile(
            self._client,
            path,
            num_bytes=num_bytes,
            budget=self._budget,
            path=self.describe(path),
            deadline_secs=self._deadline_secs,
        )
        return BlockWriter(file, num_bytes=num_bytes, block_bytes=block_bytes, pool=BUFFERS)

    @override
    def open_reader(self, path: str, *, num_bytes: int | None = None) -> FileReader:
        found = self.size(path, expected=num_bytes)
        if found is None:
            raise self._error(errno.ENOENT, "read", path)
        return ObjectReader(self._client, path, num_bytes=found, path=self.describe(path))

    # Names and errors

    def _key(self, path: str) -> None:
        """Check the name of an object. Control characters are allowed by some services, and lost by their tools."""
        split_name(path)
        if any(character < " " or "\ud800" <= character <= "\udfff" for character in path):
            raise StorageError(
                f"cannot use the name {path!r}: it has control characters, or is not Unicode",
                path=self.describe(path),
                errno=errno.EINVAL,
                hint="Object stores, and the tools for them, take plain names only: choose another.",
            )
        if len(self._prefix_bytes + path.encode()) > _MAX_KEY_BYTES:
            raise self._error(errno.ENAMETOOLONG, f"use a key of more than {_MAX_KEY_BYTES} bytes", path)

    def _check_bucket(self) -> None:
        """Raise where the bucket is missing: many questions about keys are answered then as if only the key were."""
        self._client.keys(".safepoint/")

    def _too_long(self, path: str, size: str, max_bytes: int) -> CorruptDataError:
        return CorruptDataError(
            f"the file has {size} bytes where at most {max_bytes:,} are expected",
            path=self.describe(path),
            hint="It was not written by safepoint, or was changed since.",
        )

    def _error(self, number: int, action: str, path: str) -> StorageError:
        return storage_error(OSError(number, ""), action, self.describe(path))
