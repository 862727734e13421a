"""Where in a file of torch.save the bytes of its one tensor lie, so that a region of it is read and nothing else.

The pickle in it is read as data, with a table of the few names that a plain tensor has. What is not that plain is no
error here: then torch's own restricted reader is to be asked. Source: torch/_utils.py (`_rebuild_tensor_v2`, `_v3`).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.pickle_machine import PickleMachine, run_pickle
from safepoint.formats.pickle_writer import STORAGES, contiguous_strides
from safepoint.formats.region import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["ArchivedTensor", "TensorMachine", "TensorPlace", "data_offset", "find_tensor", "read_pickled"]

_MAX_PICKLE_BYTES = 1 << 28
_LOCAL_SIGNATURE = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A contiguous tensor: its dtype by our name, its shape, and its first byte in the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str | None  # None: untyped
    key: str


@dataclass(frozen=True, slots=True)
class ArchivedTensor:
    """A tensor as a pickle describes it: its storage, and in items its first element there, shape and strides."""

    storage: _Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def find_tensor(path: str, offset: int, num_bytes: int) -> TensorPlace | None:
    """Return where the tensor lies that `torch.save` wrote into a part of a file; None where it is not a plain one.

    Args:
        path: of the file.
        offset: first byte of the part.
        num_bytes: its size.
    """
    try:
        with _Window(path, offset, num_bytes) as window, zipfile.ZipFile(window) as archive:
            return _find(archive, window, offset, num_bytes)
    except Exception:  # noqa: BLE001 - what is wrong with the file is told by the reader that is asked then
        return None


def _find(archive: zipfile.ZipFile, window: _Window, offset: int, num_bytes: int) -> TensorPlace | None:
    entries, pickled = read_pickled(archive)
    tensor = run_pickle(TensorMachine(window.path), pickled, path=window.path)
    if not isinstance(tensor, ArchivedTensor) or tensor.strides != contiguous_strides(tensor.shape):
        return None
    entry = entries[f"data/{tensor.storage.key}"]
    first = tensor.first * ITEM_BYTES[tensor.dtype]
    size = Region.whole(tensor.shape).num_elements * ITEM_BYTES[tensor.dtype]
    start = data_offset(window, entry)
    if first < 0 or first + size > entry.file_size or start + entry.file_size > num_bytes:
        return None
    return TensorPlace(tensor.dtype, tensor.shape, offset + start + first)


def read_pickled(archive: zipfile.ZipFile) -> tuple[dict[str, zipfile.ZipInfo], bytes]:
    """Return the entries of an archive by their names below its folder, and its pickle.

    Raises:
        ValueError: it is of a machine with another byte order, or too large for what it should be.
        KeyError: it is none of torch's.
    """
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if "byteorder" in entries and archive.read(entries["byteorder"]).strip() != b"little":
        raise ValueError("another byte order")
    if entries["data.pkl"].file_size > _MAX_PICKLE_BYTES:
        raise ValueError("a large pickle")
    return entries, archive.read(entries["data.pkl"])


def data_offset(file: IO[bytes] | io.RawIOBase, entry: zipfile.ZipInfo) -> int:
    """Return where the bytes of an entry that is not compressed begin in its archive.

    Raises:
        ValueError: it is compressed, or damaged.
    """
    file.seek(entry.header_offset)
    header = file.read(_LOCAL_HEADER.size) or b""
    if entry.compress_type != zipfile.ZIP_STORED or len(header) != _LOCAL_HEADER.size:
        raise ValueError("compressed, or damaged")
    fields = _LOCAL_HEADER.unpack(header)
    if fields[0] != _LOCAL_SIGNATURE:
        raise ValueError("damaged")
    return int(entry.header_offset + _LOCAL_HEADER.size + fields[-2] + fields[-1])


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, path: str, offset: int, num_bytes: int) -> None:
        self.path = path
        self._handle = os.open(path, os.O_RDONLY)
        self._offset = offset
        self._num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise OSError(22, "before the start")  # as a file says it
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._num_bytes - self._position)]
        count = os.preadv(self._handle, [view], self._offset + self._position) if len(view) else 0
        self._position += count
        return count

    def close(self) -> None:
        if not self.closed:
            os.close(self._handle)
        super().close()


def _storage(identity: Any) -> _Storage:
    kind, dtype, key, _, _ = identity
    if kind != "storage":
        raise ValueError(kind)
    return _Storage(dtype.dtype, str(key))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Stands for the class of a storage, or for a dtype."""

    dtype: str | None


def _rebuild_v2(
    storage: _Storage, first: int, shape: Any, strides: Any, _grad: Any, _hooks: Any, *more: Any
) -> ArchivedTensor:
    return _rebuilt(storage, storage.dtype, (first, shape, strides), more)


def _rebuild_v3(
    storage: _Storage, first: int, shape: Any, strides: Any, _grad: Any, _hooks: Any, kind: _Kind, *more: Any
) -> ArchivedTensor:
    return _rebuilt(storage, kind.dtype, (first, shape, strides), more)


def _rebuilt(
    storage: _Storage, dtype: str | None, geometry: tuple[int, Any, Any], more: tuple[Any, ...]
) -> ArchivedTensor:
    if dtype is None or any(more):  # its bits are to be read as conjugated or negated
        raise ValueError("no plain tensor")
    first, shape, strides = geometry
    return ArchivedTensor(storage, first, tuple(shape), tuple(strides), dtype)


_CONSTANTS: Mapping[str, _Kind] = {
    **{f"torch.{name}": _Kind(dtype) for dtype, name in STORAGES.items()},
    **{f"torch.{name}": _Kind(name) for name in ITEM_BYTES},
    "torch.storage.UntypedStorage": _Kind(None),
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_v2,
    "torch._utils._rebuild_tensor_v3": _rebuild_v3,
    "collections.OrderedDict": lambda items=(): dict(items),
}


class TensorMachine(PickleMachine):
    """Makes an `ArchivedTensor` of each tensor, and knows no other names.

    Attributes:
        known: those that it knows.
    """

    known = frozenset({*_CONSTANTS, *_FUNCTIONS})

    def __init__(self, path: str) -> None:
        super().__init__(frozenset(), _FUNCTIONS, path)

    def _push_name(self, text: str) -> None:
        if text in _CONSTANTS:
            self.stack.append(_CONSTANTS[text])
        else:
            super()._push_name(text)

    def _binpersid(self, _: Any) -> None:
        self.stack.append(_storage(self.stack.pop()))
