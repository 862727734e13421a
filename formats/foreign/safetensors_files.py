"""A safetensors file, or a directory as Hugging Face lays it out: one file, or several and an index.

Byte ranges are read straight into the target. Source: https://huggingface.co/docs/safetensors; transformers'
`model.safetensors.index.json`. The tree is flat: keys are those of the file.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from safepoint.formats.errors import CorruptDataError, StorageError
from safepoint.formats.fields import Fields, check_relative_path, parse_json
from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint, checked_region, read_exactly
from safepoint.formats.region import Region
from safepoint.formats.safetensors import FileHeader, StoredTensor, read_header

if TYPE_CHECKING:
    from safepoint.formats.tree import TreePath

__all__ = ["INDEX_SUFFIX", "SINGLE_NAME", "is_safetensors", "open_safetensors"]

SINGLE_NAME = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_MAX_INDEX_BYTES = 1 << 28
_MAX_HEADER_BYTES = 100_000_008
_NAMES = {stored: name for name, stored in SAFETENSORS_NAMES.items()}


def is_safetensors(path: str) -> bool:
    """Say whether it is such a file, or a directory with one."""
    return path.endswith(".safetensors") if os.path.isfile(path) else bool(_index_of(path) or _single_of(path))


def open_safetensors(path: str) -> ForeignCheckpoint:
    """Open a file, or a directory. Reads headers only.

    Raises:
        CorruptDataError: a header is wrong, or the index names a file outside the directory, one that is missing, or a
            tensor that its file does not have.
        StorageError: a file cannot be read.
    """
    index = None if os.path.isfile(path) else _index_of(path)
    if index is None:
        single = path if os.path.isfile(path) else _single_of(path)
        if single is None:
            raise CorruptDataError("no safetensors file is here", path=path)
        held = _open_file(single)
        metadata: dict[str, Any] = dict(_headers_metadata(single))
    else:
        held, metadata = _open_index(path, index)
    arrays: dict[TreePath, ForeignArray] = {(key,): array for key, array in held.items()}
    tree = {key: LeafRef((key,)) for key in held}
    return ForeignCheckpoint(kind="safetensors", location=path, tree=tree, arrays=arrays, metadata=metadata)


def _single_of(path: str) -> str | None:
    if not os.path.isdir(path):
        return None
    names = [name for name in os.listdir(path) if name.endswith(".safetensors")]
    if SINGLE_NAME in names:
        return os.path.join(path, SINGLE_NAME)
    return os.path.join(path, names[0]) if len(names) == 1 else None


def _index_of(path: str) -> str | None:
    names = [name for name in os.listdir(path) if name.endswith(INDEX_SUFFIX)] if os.path.isdir(path) else []
    return os.path.join(path, names[0]) if len(names) == 1 else None


def _open_index(path: str, index: str) -> tuple[dict[str, _Tensor], dict[str, Any]]:
    fields = Fields(
        parse_json(_read(index, max_bytes=_MAX_INDEX_BYTES), what="the index", path=index), what="the index", path=index
    )
    held: dict[str, _Tensor] = {}
    files: dict[str, dict[str, _Tensor]] = {}
    for key, name in fields.table("weight_map").items():
        if type(name) is not str:
            raise fields.error(f"has for {key!r} no file")
        if name not in files:
            full = os.path.join(path, check_relative_path(name, what="the index"))
            if os.path.islink(full) and not _is_inside(full, path):
                raise CorruptDataError("a link leads out of the directory", path=full)
            if not os.path.isfile(full):
                raise CorruptDataError("the index names a file that is missing", path=full, leaf=key)
            files[name] = _open_file(full)
        if key not in files[name]:
            raise CorruptDataError(
                f"the index says that {name} has a tensor which it does not have", path=index, leaf=key
            )
        held[key] = files[name][key]
    return held, fields.table("metadata") if fields.has("metadata") else {}


def _is_inside(path: str, directory: str) -> bool:
    # Hugging Face's cache links to blobs beside the snapshots: the same repository, two levels up.
    root = os.path.realpath(os.path.join(directory, "..", ".."))
    return os.path.realpath(path).startswith(
        (os.path.realpath(directory) + os.sep, os.path.join(root, "blobs") + os.sep)
    )


def _read(path: str, *, max_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", path=path, errno=error.errno) from error
    if len(data) > max_bytes:
        raise CorruptDataError("the file is too large for what it should be", path=path)
    return data


def _header_of(path: str) -> FileHeader:
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            length = min(int.from_bytes(start, "little"), _MAX_HEADER_BYTES)
            data = start + file.read(length)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", path=path, errno=error.errno) from error
    return read_header(data, path=path, file_bytes=size)


def _headers_metadata(path: str) -> dict[str, str]:
    return dict(_header_of(path).metadata)


def _open_file(path: str) -> dict[str, _Tensor]:
    return {key: _Tensor(path, tensor) for key, tensor in _header_of(path).tensors.items()}


class _Tensor(ForeignArray):
    def __init__(self, path: str, stored: StoredTensor) -> None:
        self._path = path
        self._offset = stored.offset
        self._key = stored.key
        self.dtype = _NAMES[stored.dtype]
        self.shape = stored.shape

    def read_into(self, region: Region, out: memoryview) -> None:
        item_bytes = ITEM_BYTES[self.dtype]
        if not checked_region(self, region, out, item_bytes):
            return
        filled = 0
        try:
            with open(self._path, "rb", buffering=0) as file:
                for start, length in region.runs_in(Region.whole(self.shape)):
                    size = length * item_bytes
                    read_exactly(file, self._offset + start * item_bytes, out[filled : filled + size])
                    filled += size
        except OSError as error:
            raise StorageError(
                f"cannot read it: {error.strerror}", path=self._path, leaf=self._key, errno=error.errno
            ) from error
        except EOFError:
            raise CorruptDataError("the file is cut short", path=self._path, leaf=self._key) from None
