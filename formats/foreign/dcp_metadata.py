"""`.metadata` of torch.distributed.checkpoint, read with a table of its own types: where each part of each tensor lies.

Source: torch/distributed/checkpoint/metadata.py and filesystem.py. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import CheckpointError, CorruptDataError, UnsupportedValueError
from safepoint.formats.fields import check_relative_path
from safepoint.formats.pickle_machine import Record, read_pickle
from safepoint.formats.region import Region, check_tiling

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DcpMetadata", "StoredPart", "StoredTensor", "read_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_CLASSES = frozenset(
    {
        *(
            f"{_METADATA}.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
            )
        ),
        f"{_FILES}._StorageInfo",
        # Before torch 2.4.
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    }
)
_FUNCTIONS: Mapping[str, Any] = {
    **{f"torch.{name}": name for name in ITEM_BYTES},  # a dtype: a constant
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.serialization._get_layout": str,
    f"{_METADATA}._MEM_FORMAT_ENCODING": int,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": int,
    "collections.OrderedDict": lambda items=(): dict(items),
    **{
        f"pathlib{local}.{name}": lambda *parts: "/".join(map(str, parts))
        for local in ("", "._local")
        for name in ("PosixPath", "PurePosixPath", "Path")
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPart:
    """Bytes in one of the files.

    Attributes:
        region: of the tensor; None for a value that is no tensor.
        file: relative to the checkpoint.
        offset: first byte.
        num_bytes: how many.
    """

    region: Region | None
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """A tensor by its parts, which tile it."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


@dataclass(frozen=True, kw_only=True)
class DcpMetadata:
    """What a checkpoint holds.

    Attributes:
        tensors: by their full name.
        values: where everything else lies, by full name.
        paths: of the state that was flattened, by full name.
    """

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredPart]
    paths: Mapping[str, tuple[Any, ...]]


def read_metadata(data: bytes, *, path: str) -> DcpMetadata:
    """Return the checked metadata.

    Raises:
        UnsupportedValueError: the pickle names something else than the types of such metadata.
        CorruptDataError: it is damaged, or parts do not tile their tensor, or leave the directory.
    """
    record = read_pickle(data, classes=_CLASSES, functions=_FUNCTIONS, path=path)
    try:
        return _read(record, path)
    except CheckpointError as error:
        raise error.with_context(path=path) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"the metadata are malformed: {type(error).__name__}: {error}", path=path) from error


def _read(record: Any, path: str) -> DcpMetadata:
    if not isinstance(record, Record) or record.name != f"{_METADATA}.Metadata":
        raise CorruptDataError("these are no metadata of torch.distributed.checkpoint", path=path)
    places: dict[str, dict[tuple[int, ...] | None, StoredPart]] = {}
    for index, info in record.state["storage_data"].items():
        name, offset = index.state["fqn"], index.state.get("offset")
        places.setdefault(name, {})[offset] = _place(name, info, path)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredPart] = {}
    for name, stored in record.state["state_dict_metadata"].items():
        if stored.name.endswith(".TensorStorageMetadata"):
            tensors[name] = _tensor(name, stored, places.get(name, {}))
        else:
            values[name] = places[name][None]
    planner_data = record.state.get("planner_data")
    paths = {name: tuple(keys) for name, keys in planner_data.items()} if isinstance(planner_data, dict) else {}
    return DcpMetadata(tensors=tensors, values=values, paths=paths)


def _place(name: str, info: Record, path: str) -> StoredPart:
    if info.state.get("transform_descriptors"):
        raise UnsupportedValueError("its files are compressed or otherwise transformed", leaf=name, path=path)
    offset, length = info.state["offset"], info.state["length"]
    if type(offset) is not int or type(length) is not int or offset < 0 or length < 0:
        raise CorruptDataError(f"it lies at {offset!r}, {length!r}", leaf=name, path=path)
    file = check_relative_path(info.state["relative_path"], what="a part of the checkpoint")
    return StoredPart(region=None, file=file, offset=offset, num_bytes=length)


def _tensor(name: str, stored: Record, places: Mapping[tuple[int, ...] | None, StoredPart]) -> StoredTensor:
    shape = tuple(stored.state["size"])
    dtype = _dtype(stored.state["properties"], name)
    parts = []
    for chunk in stored.state["chunks"]:
        offsets = tuple(chunk.state["offsets"])
        place = places.get(offsets) or (places.get(None) if len(stored.state["chunks"]) == 1 else None)
        if place is None:
            raise CorruptDataError(f"the part at {offsets} lies nowhere", leaf=name)
        region = Region(offsets, tuple(chunk.state["sizes"]))
        parts.append(StoredPart(region=region, file=place.file, offset=place.offset, num_bytes=place.num_bytes))
    check_tiling(shape, [part.region for part in parts if part.region is not None], leaf=name)
    return StoredTensor(dtype=dtype, shape=shape, parts=tuple(parts))


def _dtype(properties: Record, leaf: str) -> str:
    state = properties.state.get("state")
    name = state[0] if isinstance(state, tuple) else properties.state.get("dtype")
    text = getattr(name, "text", "").removeprefix("torch.")
    if text not in ITEM_BYTES:
        raise UnsupportedValueError(f"a tensor has the dtype {text!r}", leaf=leaf)
    return str(text)
