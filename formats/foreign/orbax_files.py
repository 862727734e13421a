"""Orbax's own checkpoints, of version 0 and 1, with OCDBT or files, zarr 2 or 3, read by regions through TensorStore.

Neither Orbax nor JAX is needed. Source: orbax-checkpoint 0.12, `_src/metadata/tree.py` (`_METADATA`),
`_src/serialization/tensorstore_utils.py` (specs), `_src/handlers` (items).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import CheckpointError, CorruptDataError, StorageError, UnsupportedValueError
from safepoint.formats.fields import Fields
from safepoint.formats.foreign.base import (
    ForeignArray,
    ForeignCheckpoint,
    Keys,
    Refused,
    build_nested,
    checked_region,
    tree_key,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from safepoint.formats.region import Region
    from safepoint.formats.tree import TreePath

__all__ = ["TREE_NAME", "is_orbax", "open_orbax"]

TREE_NAME = "_METADATA"
STEP_NAME = "_CHECKPOINT_METADATA"
_JSON_NAME = "metadata"
_DATABASE = "manifest.ocdbt"
_PROCESS = "ocdbt.process_"
_LONE_ITEMS = ("default", "state")
_MAX_JSON_BYTES = 1 << 30
_CACHE_BYTES = 256 << 20  # of decoded chunks: of a chunk with all layers, one after the other is read
_EMPTY: Mapping[str, Any] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": None}
_WITHOUT_ARRAY = (*_EMPTY, "string")
_INDEX_KEY = 1
_UNKNOWN = r"is not registered|Unsupported zarr dtype|member \"(zarr_format|data_type|chunk_grid|chunk_key_encoding)\""
"""In what TensorStore says of metadata that it understands, and of which it does not have what they ask for."""


def is_orbax(path: str) -> bool:
    """Say whether a directory is a step or an item of Orbax."""
    return any(os.path.isfile(os.path.join(path, name)) for name in (TREE_NAME, STEP_NAME))


def open_orbax(path: str) -> ForeignCheckpoint:
    """Open a step, or one item of it. Reads metadata only.

    Items come by name; the one item that Orbax calls `default` or `state` comes as what it is.

    Raises:
        CorruptDataError: the metadata are not Orbax's.
        StorageError: they cannot be read.
    """
    found = _Found()
    if os.path.isfile(os.path.join(path, TREE_NAME)):
        tree = _read_item(path, (), found)
        return ForeignCheckpoint(kind="orbax", location=path, tree=tree, arrays=found.arrays, refused=found.refused)
    step = _load_json(os.path.join(path, STEP_NAME))
    names = [name for name in sorted(os.listdir(path)) if _is_item(os.path.join(path, name))]
    if not names:
        raise CorruptDataError("an Orbax step without items", path=path)
    metrics = _read_metrics(path, names, step)
    if len(names) == 1 and names[0] in _LONE_ITEMS:
        tree = _read_item(os.path.join(path, names[0]), (), found)
    else:
        tree = {name: _read_item(os.path.join(path, name), (name,), found) for name in names}
    custom = step.get("custom_metadata") if isinstance(step, dict) else None
    return ForeignCheckpoint(
        kind="orbax",
        location=path,
        tree=tree,
        arrays=found.arrays,
        refused=found.refused,
        metadata={"metrics": metrics, "custom": custom or {}},
    )


def _is_item(path: str) -> bool:
    return any(os.path.isfile(os.path.join(path, name)) for name in (TREE_NAME, _JSON_NAME, "metrics"))


def _read_metrics(path: str, names: list[str], step: Any) -> Any:
    metrics = os.path.join(path, "metrics", "metrics")
    if not os.path.isfile(metrics):
        return (step.get("metrics") if isinstance(step, dict) else None) or {}
    names.remove("metrics")
    return _load_json(metrics)


def _load_json(path: str) -> Any:
    try:
        if os.path.getsize(path) > _MAX_JSON_BYTES:
            raise CorruptDataError("the file is too large for what it should be", path=path)
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", path=path, errno=error.errno) from error
    try:
        return json.loads(data)  # Orbax writes NaN as it is
    except ValueError as error:
        raise CorruptDataError(f"not JSON: {error}", path=path) from None


def _read_item(path: str, prefix: TreePath, found: _Found) -> Any:
    if not os.path.isfile(os.path.join(path, TREE_NAME)):
        return _load_json(os.path.join(path, _JSON_NAME))
    item = _Item(path)
    item.open_arrays([".".join(key for key, _ in keys) for keys, kind in item.entries if kind not in _WITHOUT_ARRAY])
    leaves = []
    for keys, kind in item.entries:
        value: Any
        name = ".".join(key for key, _ in keys)
        if kind in _EMPTY:
            value = _EMPTY[kind]
        elif kind == "string":
            value = item.text(name)
        elif kind == "scalar":
            value = item.scalar(name)
        else:
            at = (*prefix, *(tree_key(key, is_index) for key, is_index in keys))
            value = found.take(at, item, name)
        leaves.append((keys, value))
    return build_nested(leaves, path=path)


@dataclass(frozen=True)
class _Found:
    """The arrays of a step or item, and those that cannot be read, which somebody may not want."""

    arrays: dict[TreePath, ForeignArray] = field(default_factory=dict)
    refused: dict[str, str | UnsupportedValueError] = field(default_factory=dict)

    def take(self, at: TreePath, item: _Item, name: str) -> LeafRef | Refused:
        """Return what stands for an array in the tree."""
        try:
            self.arrays[at] = item.array(name)
        except UnsupportedValueError as error:
            self.refused[".".join(map(str, at))] = error
            return Refused(error.message)
        return LeafRef(at)


class _Item:
    """One item: a tree whose arrays are in one OCDBT database, or a directory each."""

    def __init__(self, path: str) -> None:
        import tensorstore as ts  # noqa: PLC0415 - only where it is used: it starts threads

        self._ts = ts
        self._path = path
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
        file = os.path.join(path, TREE_NAME)
        fields = Fields(_load_json(file), what="Orbax's tree", path=file)
        self._use_ocdbt = fields.flag("use_ocdbt") if fields.has("use_ocdbt") else self._has_ocdbt()
        self._use_zarr3 = fields.flag("use_zarr3") if fields.has("use_zarr3") else False
        name = "store_array_data_equal_to_fill_value"
        self._is_complete = fields.flag(name) if fields.has(name) else False
        if self._use_ocdbt and not self._has_ocdbt():
            raise CorruptDataError(
                "the OCDBT database of the item is missing: its processes' parts were not merged", path=path
            )
        if self._use_ocdbt and not self._is_complete:
            self._check_merged()
        self.entries = [_entry(value, file) for value in fields.table("tree_metadata").values()]
        self._strings: dict[str, Any] | None = None
        self._opening: dict[str, Any] = {}

    def _has_ocdbt(self) -> bool:
        return os.path.isfile(os.path.join(self._path, _DATABASE))

    def text(self, name: str) -> str:
        if self._strings is None:
            self._strings = _load_json(os.path.join(self._path, "_strings.json"))
        value = self._strings.get(name) if isinstance(self._strings, dict) else None
        if not isinstance(value, str):
            raise CorruptDataError("a text is missing", path=self._path, leaf=name)
        return value

    def scalar(self, name: str) -> Any:
        array = self.array(name)
        if array.shape:
            raise CorruptDataError(f"a number has the shape {array.shape}", path=self._path, leaf=name)
        return array.store.read().result().item()

    def open_arrays(self, names: Iterable[str]) -> None:
        """Begin to open arrays, all at once: one after the other, each would wait for its metadata."""
        self._opening = {name: self._open(name) for name in names}

    def array(self, name: str) -> _OrbaxArray:
        """Return an array that was begun to be opened."""
        opening = self._opening[name]
        try:
            store = opening if isinstance(opening, Exception) else opening.result()
        except Exception as error:
            raise _translated(error, self._path, name) from error
        if isinstance(store, Exception):
            raise _translated(store, self._path, name) from store
        return _OrbaxArray(store, self._ts, self._path, name)

    def _open(self, name: str) -> Any:
        place = f"{name}/" if name else ""
        kvstore = {"driver": "ocdbt", "base": self._base(""), "path": place} if self._use_ocdbt else self._base(place)
        spec = {
            "driver": "zarr3" if self._use_zarr3 else "zarr",
            "kvstore": kvstore,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
            # A chunk that is not stored is a lost one, unless Orbax left out those that are all zeros.
            "fill_missing_data_reads": not self._is_complete,
        }
        try:
            return self._ts.open(spec, open=True, read=True, context=self._context)
        except Exception as error:  # noqa: BLE001 - raised where the array is asked for
            return error

    def _base(self, below: str) -> dict[str, str]:
        return {"driver": "file", "path": f"{self._path}/{below}"}

    def _check_merged(self) -> None:
        """Refuse a database that lacks what a process wrote, where that would be read as zeros.

        Merging does not notice a process that was late. Where every chunk is stored, one that is lost is missed anyhow.
        """
        merged = self._keys("")
        for name in sorted(os.listdir(self._path)):
            if not name.startswith(_PROCESS) or not os.path.isfile(os.path.join(self._path, name, _DATABASE)):
                continue
            lost = self._keys(f"{name}/") - merged
            if lost:
                raise CorruptDataError(
                    f"{len(lost)} keys of this process, such as {min(lost)!r}, are not in the database of the item",
                    path=os.path.join(self._path, name),
                    leaf=min(lost).partition("/")[0],
                    hint="It was not merged, or only in part: the item is not whole.",
                )

    def _keys(self, below: str) -> set[str]:
        spec = {"driver": "ocdbt", "base": self._base(below)}
        try:
            found = self._ts.KvStore.open(spec, context=self._context).result().list().result()
        except Exception as error:
            raise _translated(error, os.path.join(self._path, below), None) from error
        return {key.decode(errors="replace") for key in found}


def _entry(value: Any, file: str) -> tuple[Keys, str]:
    fields = Fields(value, what="an entry of Orbax's tree", path=file)
    keys = []
    for part in fields.items("key_metadata"):
        key = Fields(part, what="a key of Orbax's tree", path=file)
        keys.append((key.text("key"), key.integer("key_type") == _INDEX_KEY))
    kind = Fields(fields.value("value_metadata"), what="a value of Orbax's tree", path=file).text("value_type")
    return tuple(keys), kind


class _OrbaxArray(ForeignArray):
    def __init__(self, store: Any, ts: Any, path: str, name: str) -> None:
        self.store = store
        self._ts = ts
        self._path = path
        self._name = name
        self.dtype = store.dtype.name
        self.shape = tuple(store.shape)
        if self.dtype not in ITEM_BYTES or ITEM_BYTES[self.dtype] != store.dtype.numpy_dtype.itemsize:
            raise UnsupportedValueError(f"torch has no dtype {self.dtype!r}", leaf=name, path=path)
        if self.dtype in ("int2", "int4", "uint4"):
            raise UnsupportedValueError(f"arrays of {self.dtype} cannot be read", leaf=name, path=path)

    def read_into(self, region: Region, out: memoryview) -> None:
        if not checked_region(self, region, out, ITEM_BYTES[self.dtype]):
            return
        target = np.frombuffer(out, dtype=self.store.dtype.numpy_dtype).reshape(region.shape)
        index = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))
        try:
            self._ts.array(target, dtype=self.store.dtype, copy=False).write(self.store[index]).result()
        except Exception as error:
            raise _translated(error, self._path, self._name) from error


def _translated(error: Exception, path: str, leaf: str | None) -> CheckpointError:
    """Return our error for one of TensorStore's, which are all ValueErrors that begin with a code."""
    text = re.sub(r" \[(tensorstore_spec|source locations)=.*", "", str(error), flags=re.DOTALL)
    files = re.findall(r'local file "([^"]+)"', text)
    if files and files[-1].startswith(f"{path}/"):
        path = files[-1].rstrip("/")
    if text.startswith(("PERMISSION_DENIED", "UNAVAILABLE", "RESOURCE_EXHAUSTED")):
        return StorageError(f"cannot read it: {text}", path=path, leaf=leaf)
    if text.startswith("NOT_FOUND"):
        return CorruptDataError(f"a part of the array is missing: {text}", path=path, leaf=leaf)
    if re.search(_UNKNOWN, text):
        return UnsupportedValueError(f"the array is stored as TensorStore cannot read it: {text}", path=path, leaf=leaf)
    return CorruptDataError(f"the array cannot be read: {text}", path=path, leaf=leaf)
