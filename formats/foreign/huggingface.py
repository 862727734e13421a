"""Plans a model as Hugging Face lays it out: one safetensors file, or several with an index.

Source: transformers' `save_pretrained` (names, index) and safetensors' `save_model` (tied weights in the metadata).
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from safepoint.formats.base import LeafRef, Piece
from safepoint.formats.dtypes import SAFETENSORS_NAMES
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.foreign.base import array_bytes
from safepoint.formats.foreign.exporting import ArrayData, ExportFile, ExportPlan
from safepoint.formats.foreign.safetensors_files import SINGLE_NAME, open_safetensors
from safepoint.formats.safetensors import SafetensorsFormat
from safepoint.formats.storage import LocalStorage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint

__all__ = ["MAX_FILE_BYTES", "plan_huggingface"]

MAX_FILE_BYTES = 5 * 10**9
_INDEX_NAME = "model.safetensors.index.json"


def plan_huggingface(tree: Any, checkpoint: ForeignCheckpoint, *, max_file_bytes: int) -> ExportPlan:
    """Return files for the tensors of a tree; plain values are left out. A tied weight is kept under its first name.

    Raises:
        UnsupportedValueError: a dtype that safetensors does not have, or two tensors of one name.
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
    names = [SINGLE_NAME] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    files = []
    for name, group in zip(names, groups, strict=True):
        held = {alias: kept for alias, kept in tied.items() if kept in group}
        files.append(_file(name, group, {"format": "pt", **held}))

    def finish(path: str) -> None:
        if count > 1:
            weight_map = {key: name for name, group in zip(names, groups, strict=True) for key in group}
            total = sum(map(array_bytes, arrays.values()))
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            LocalStorage(path).replace(_INDEX_NAME, json.dumps(index, indent=2, sort_keys=True).encode())

    return ExportPlan(files=tuple(files), finish=finish, read_back=_read_back)


def _read_back(path: str) -> Mapping[str, ForeignArray]:
    # By name: `open_safetensors` would take a lone file of several for the whole.
    index = os.path.join(path, _INDEX_NAME)
    found = open_safetensors(path if os.path.exists(index) else os.path.join(path, SINGLE_NAME))
    return {str(name): array for (name,), array in found.arrays.items()}


def _refs(prefix: str, value: Any) -> Iterator[tuple[str, LeafRef]]:
    if isinstance(value, LeafRef):
        yield prefix or "tensor", value
    elif isinstance(value, dict | list | tuple):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _refs(f"{prefix}.{key}" if prefix else str(key), child)


def _groups(arrays: Mapping[str, ForeignArray], limit: int) -> list[dict[str, ForeignArray]]:
    groups: list[dict[str, ForeignArray]] = [{}]
    room = limit
    for name, array in arrays.items():
        size = array_bytes(array)
        if groups[-1] and size > room:
            groups.append({})
            room = limit
        groups[-1][name] = array
        room -= size
    return groups


def _file(name: str, group: Mapping[str, ForeignArray], metadata: Mapping[str, str]) -> ExportFile:
    pieces = [Piece(key=key, dtype=array.dtype, shape=array.shape) for key, array in group.items()]
    layout = SafetensorsFormat().layout(pieces, metadata)
    held = [placement.piece.key for placement in layout.placements]
    return ExportFile(name=name, parts=(layout.header, *(ArrayData(name=key, array=group[key]) for key in held)))
