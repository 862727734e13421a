"""Directories of torch.distributed.checkpoint: tensors by their parts, each a file of torch.save inside a larger one.

Also those of torch_xla's experimental checkpoint manager, which are such directories. Their metadata: `dcp_metadata`.
"""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES, dtype_name
from safepoint.formats.errors import CorruptDataError, StorageError, UnsupportedValueError
from safepoint.formats.foreign.base import (
    ForeignArray,
    ForeignCheckpoint,
    Keys,
    build_nested,
    checked_region,
    read_exactly,
)
from safepoint.formats.foreign.dcp_metadata import StoredPart, StoredTensor, read_metadata
from safepoint.formats.foreign.torch_archive import TensorPlace, find_tensor
from safepoint.formats.foreign.torch_files import replace_tensors, tensor_bytes

if TYPE_CHECKING:
    from safepoint.formats.region import Region
    from safepoint.formats.tree import TreePath

__all__ = ["METADATA_NAME", "is_dcp", "open_dcp"]

METADATA_NAME = ".metadata"
_MAX_METADATA_BYTES = 1 << 30


def is_dcp(path: str) -> bool:
    """Say whether a directory is one."""
    return os.path.isfile(os.path.join(path, METADATA_NAME))


def open_dcp(path: str) -> ForeignCheckpoint:
    """Open a directory. Reads the metadata and the values that are no tensors.

    Raises:
        UnsupportedValueError: a pickle in it holds something else than it should.
        CorruptDataError: damaged, or a file is missing or cut short.
        StorageError: it cannot be read.
    """
    file = os.path.join(path, METADATA_NAME)
    metadata = read_metadata(_read(file, 0, _size(file, limit=_MAX_METADATA_BYTES)), path=file)
    arrays: dict[TreePath, ForeignArray] = {}
    leaves: list[tuple[Keys, Any]] = []
    loaded = _Loaded()
    for name in (*metadata.tensors, *metadata.values):
        keys = metadata.paths.get(name, (name,))
        at = tuple(key if isinstance(key, str | int) else str(key) for key in keys)
        value: Any
        if name in metadata.tensors:
            stored = metadata.tensors[name]
            for part in stored.parts:
                _check_part(path, part, name)
            arrays[at] = _DcpTensor(path, name, stored, loaded)
            value = LeafRef(at)
        else:
            value = replace_tensors(_load(path, metadata.values[name], name), at, arrays)
        leaves.append((tuple((str(key), isinstance(key, int)) for key in at), value))
    tree = build_nested(leaves, path=path)
    lost = tuple(sorted(set(metadata.paths) - set(metadata.tensors) - set(metadata.values)))
    return ForeignCheckpoint(kind="dcp", location=path, tree=tree, arrays=arrays, lost=lost)


def _size(path: str, *, limit: int) -> int:
    try:
        size = os.path.getsize(path)
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", path=path, errno=error.errno) from error
    if size > limit:
        raise CorruptDataError("the file is too large for what it should be", path=path)
    return size


def _check_part(path: str, part: StoredPart, name: str) -> None:
    full = os.path.join(path, part.file)
    if not os.path.isfile(full):
        raise CorruptDataError("a file of the checkpoint is missing", path=full, leaf=name)
    if os.path.getsize(full) < part.offset + part.num_bytes:
        raise CorruptDataError("a file of the checkpoint is cut short", path=full, leaf=name)


def _read(path: str, offset: int, num_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(num_bytes)
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", path=path, errno=error.errno) from error
    if len(data) != num_bytes:
        raise CorruptDataError("the file is cut short", path=path)
    return data


def _load(path: str, part: StoredPart, name: str) -> Any:
    _check_part(path, part, name)
    full = os.path.join(path, part.file)
    data = _read(full, part.offset, part.num_bytes)
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        text = str(error) or type(error).__name__
        line = text.partition("\n")[0][:200]
        if "weights_only" in text.lower() or "unsupported" in text.lower():
            raise UnsupportedValueError(
                f"a value is more than tensors and plain values: {line}", path=full, leaf=name
            ) from error
        raise CorruptDataError(f"a part cannot be read: {line}", path=full, leaf=name) from error


class _Loaded:
    """The part that was loaded last, of all tensors of a checkpoint: one is in memory."""

    part: StoredPart | None = None
    tensor: torch.Tensor


class _DcpTensor(ForeignArray):
    def __init__(self, path: str, name: str, stored: StoredTensor, loaded: _Loaded) -> None:
        self._path = path
        self._name = name
        self._parts = stored.parts
        self._loaded = loaded
        self._places: dict[StoredPart, TensorPlace | None] = {}
        self.dtype = stored.dtype
        self.shape = stored.shape

    def read_into(self, region: Region, out: memoryview) -> None:
        item_bytes = ITEM_BYTES[self.dtype]
        if not checked_region(self, region, out, item_bytes):
            return
        for part in self._parts:
            common = None if part.region is None else part.region.intersect(region)
            if common is not None and part.region is not None:
                self._read_part(part, part.region, common, region, out)

    def _read_part(self, part: StoredPart, held: Region, common: Region, region: Region, out: memoryview) -> None:
        """Read what a part has of a region: from its place in the file, or all of the part where that is not plain."""
        place = self._place(part)
        item_bytes = ITEM_BYTES[self.dtype]
        if place is None:
            target = torch.frombuffer(out, dtype=torch.uint8).reshape(*region.shape, item_bytes)
            data = tensor_bytes(self._load(part)).reshape(*held.shape, item_bytes)
            target[common.slices_in(region)] = data[common.slices_in(held)]
            return
        self._check(part, place.dtype, place.shape)
        if common == region:
            self._read_runs(part, place, held, common, out)
            return
        # As much as one part's share of the region is there twice.
        memory = memoryview(bytearray(common.num_elements * item_bytes))
        self._read_runs(part, place, held, common, memory)
        target = torch.frombuffer(out, dtype=torch.uint8).reshape(*region.shape, item_bytes)
        data = torch.frombuffer(memory, dtype=torch.uint8).reshape(*common.shape, item_bytes)
        target[common.slices_in(region)] = data

    def _read_runs(self, part: StoredPart, place: TensorPlace, held: Region, common: Region, out: memoryview) -> None:
        item_bytes = ITEM_BYTES[self.dtype]
        filled = 0
        full = os.path.join(self._path, part.file)
        try:
            with open(full, "rb", buffering=0) as file:
                for start, length in common.runs_in(held):
                    size = length * item_bytes
                    read_exactly(file, place.offset + start * item_bytes, out[filled : filled + size])
                    filled += size
        except OSError as error:
            raise StorageError(
                f"cannot read it: {error.strerror}", path=full, leaf=self._name, errno=error.errno
            ) from error
        except EOFError:
            raise CorruptDataError("a file of the checkpoint is cut short", path=full, leaf=self._name) from None

    def _place(self, part: StoredPart) -> TensorPlace | None:
        if part not in self._places:
            self._places[part] = find_tensor(os.path.join(self._path, part.file), part.offset, part.num_bytes)
        return self._places[part]

    def _load(self, part: StoredPart) -> torch.Tensor:
        if self._loaded.part is not part:
            self._loaded.part = None
            data = _load(self._path, part, self._name)
            if not isinstance(data, torch.Tensor):
                raise self._wrong(part)
            self._check(part, dtype_name(data.dtype), tuple(data.shape))
            self._loaded.part, self._loaded.tensor = part, data.contiguous()
        return self._loaded.tensor

    def _check(self, part: StoredPart, dtype: str, shape: tuple[int, ...]) -> None:
        wanted = part.region.shape if part.region is not None else ()
        if (dtype, shape) != (self.dtype, wanted):
            raise self._wrong(part)

    def _wrong(self, part: StoredPart) -> CorruptDataError:
        return CorruptDataError(
            "a part is not of the dtype and shape that the metadata tell",
            path=os.path.join(self._path, part.file),
            leaf=self._name,
        )
