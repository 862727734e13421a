"""Cutting data files into parts of a bounded size, for stores that take a file as one piece of memory.

Each part is a file of its format by itself. A leaf that is larger than a part is cut into boxes. Pure.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from safepoint.formats.base import Content
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.naming import file_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.formats.base import Portion
    from safepoint.formats.layout import Mode

__all__ = ["hugging_face_index", "part_path", "spread"]

_HEADER_BYTES = 8192
"""Kept free in each part for what its header always has, padding included."""

_ENTRY_BYTES = 160
"""What a header needs for each tensor, beside its key and the digits of its shape."""

_DIM_BYTES = 21


def spread(
    portions: Sequence[Portion], indices: Sequence[int], mode: Mode, part_bytes: int
) -> list[list[tuple[str, Content]]]:
    """Return what each part of a file holds: the key of each piece, and what it is.

    Keys are those that the pieces would have in one file, so that no two parts have the same.

    Args:
        portions: of this process.
        indices: of those in the file.
        mode: of the save.
        part_bytes: size of a part with its header; a piece of a larger item has a part of its own.

    Raises:
        UnsupportedValueError: an unknown dtype.
    """
    piece_bytes = max(part_bytes - 2 * _HEADER_BYTES, part_bytes // 2)
    contents = [
        Content(portion=index, region=box)
        for index in indices
        for box in portions[index].region.cut(piece_bytes // _item_bytes(portions[index]))
    ]
    shapes = {portions[index].path: portions[index].shape for index in indices}
    pieces = [(portions[content.portion].path, content.region) for content in contents]
    parts: list[list[tuple[str, Content]]] = [[]]
    used = _HEADER_BYTES
    for key, content in zip(file_keys(pieces, shapes, mode=mode), contents, strict=True):
        size = _item_bytes(portions[content.portion]) * math.prod(content.region.shape)
        size += len(key.encode("utf-8", "surrogatepass")) * 6 + _ENTRY_BYTES + _DIM_BYTES * len(content.region.shape)
        if parts[-1] and used + size > part_bytes:
            parts.append([])
            used = _HEADER_BYTES
        parts[-1].append((key, content))
        used += size
    return parts


def _item_bytes(portion: Portion) -> int:
    size = ITEM_BYTES.get(portion.dtype)
    if size is None:
        raise UnsupportedValueError(f"unknown dtype {portion.dtype!r}")
    return size


def part_path(path: str, index: int, count: int, suffix: str) -> str:
    """Return the path of a part of the file `path`, as Hugging Face names them: `model-00001-of-00003.safetensors`."""
    if count == 1:
        return path
    return f"{path.removesuffix(suffix)}-{index + 1:05d}-of-{count:05d}{suffix}"


def hugging_face_index(path: str, names: Sequence[tuple[str, Sequence[str]]], num_bytes: int) -> tuple[str, bytes]:
    """Return path and content of the index by which Hugging Face's tools find the tensors of several files.

    Args:
        path: of the file that was cut.
        names: of each part: its path, and the keys in it.
        num_bytes: of all tensors.
    """
    weights = {key: part.rpartition("/")[2] for part, keys in names for key in keys}
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weights}
    return f"{path}.index.json", json.dumps(index, indent=2, sort_keys=True).encode()
