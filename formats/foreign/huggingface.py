"""Writes a model as Hugging Face lays it out: one safetensors file, or several with an index. Streams leaf by leaf.

Source: transformers' `save_pretrained` (names, index) and safetensors' `save_model` (tied weights in the metadata).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safepoint.formats.base import LeafRef, Piece
from safepoint.formats.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.region import Region
from safepoint.formats.safetensors import SafetensorsFormat
from safepoint.formats.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint

__all__ = ["MAX_FILE_BYTES", "write_huggingface"]

MAX_FILE_BYTES = 5 * 10**9


def write_huggingface(tree: Any, checkpoint: ForeignCheckpoint, path: str, *, max_file_bytes: int) -> None:
    """Write the tensors of a tree into an empty directory; plain values are left out.

    Raises:
        UnsupportedValueError: a dtype that safetensors does not have, or two tensors of one name.
        StorageError: the directory cannot be written to.
    """
    arrays: dict[str, ForeignArray] = {}
    first: dict[LeafRef, str] = {}
    tied: dict[str, str] = {}
    for name, ref in _refs("", tree):
        if ref in first:
            tied[name] = first[ref]
            continue
        if name in arrays or name in tied:
            raise UnsupportedValueError("two tensors have one name when their keys are joined by dots", leaf=name)
        first[ref] = name
        arrays[name] = checkpoint.arrays[ref.path]
        if arrays[name].dtype not in SAFETENSORS_NAMES:
            raise UnsupportedValueError(f"safetensors has no dtype {arrays[name].dtype}", leaf=name)
    groups = _groups(arrays, max_file_bytes)
    count = len(groups)
    storage = LocalStorage(path)
    weight_map: dict[str, str] = {}
    for index, group in enumerate(groups):
        file = "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"
        held = {alias: kept for alias, kept in tied.items() if kept in group}
        _write_file(storage, file, group, {"format": "pt", **held})
        weight_map.update(dict.fromkeys(group, file))
    if count > 1:
        total = sum(map(_num_bytes, arrays.values()))
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        storage.put("model.safetensors.index.json", json.dumps(index_json, indent=2, sort_keys=True).encode())
    storage.sync_dir("")


def _refs(prefix: str, value: Any) -> Iterator[tuple[str, LeafRef]]:
    if isinstance(value, LeafRef):
        yield prefix or "tensor", value
    elif isinstance(value, dict | list | tuple):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _refs(f"{prefix}.{key}" if prefix else str(key), child)


def _num_bytes(array: ForeignArray) -> int:
    return Region.whole(array.shape).num_elements * ITEM_BYTES[array.dtype]


def _groups(arrays: Mapping[str, ForeignArray], limit: int) -> list[dict[str, ForeignArray]]:
    groups: list[dict[str, ForeignArray]] = [{}]
    room = limit
    for name, array in arrays.items():
        size = _num_bytes(array)
        if groups[-1] and size > room:
            groups.append({})
            room = limit
        groups[-1][name] = array
        room -= size
    return groups


def _write_file(
    storage: LocalStorage, file: str, group: Mapping[str, ForeignArray], metadata: Mapping[str, str]
) -> None:
    pieces = [Piece(key=name, dtype=array.dtype, shape=array.shape) for name, array in group.items()]
    layout = SafetensorsFormat().layout(pieces, metadata)
    with storage.open_writer(file, num_bytes=layout.num_bytes) as writer:
        writer.append(layout.header)
        for placement in layout.placements:
            data = memoryview(bytearray(placement.num_bytes))
            group[placement.piece.key].read_into(Region.whole(placement.piece.shape), data)
            writer.append(data)
        writer.finish()
