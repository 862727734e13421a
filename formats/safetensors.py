"""safetensors files: an 8-byte length, a JSON header, then all tensors without gaps.

Source: https://github.com/huggingface/safetensors (README, "Format"). Written by hand so that the data section begins
on a page and the tensors can be appended by whoever has their bytes; read by any safetensors reader. Here is also a
strict reader of headers. Knows nothing of leaves, manifests and storage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safepoint.formats.base import FileLayout, FilePlan, Piece, Placement, Portion, WriteJob
from safepoint.formats.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, UnsupportedValueError
from safepoint.formats.fields import INT64_MAX, Fields, known_json, parse_json
from safepoint.formats.grouping import file_plan, group_portions, pieces_of, portion_keys
from safepoint.formats.parts import hugging_face_index, part_path, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from safepoint.formats.base import Content, LeafParts, WrittenPart
    from safepoint.formats.layout import Mode
    from safepoint.formats.tree import JSON, TreePath

__all__ = ["DATA_ALIGNMENT", "METADATA_KEY", "FileHeader", "SafetensorsFormat", "StoredTensor", "read_header"]

METADATA_KEY = "__metadata__"
"""The one key that is no tensor's."""

DATA_ALIGNMENT = 4096
"""The data section begins at a multiple of it, so that it can be mapped and read directly."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # what safetensors' own readers accept
_MAX_RANK = 65  # of a leaf, and the last dimension of one stored as bytes
_BYTES_DTYPE = "U8"

_ITEM_BYTES = {stored: ITEM_BYTES[name] for name, stored in SAFETENSORS_NAMES.items()}


class SafetensorsFormat:
    """The format `safetensors`."""

    name = "safetensors"
    suffix = ".safetensors"
    modes: tuple[Mode, ...] = ("consolidated", "sharded")
    allows_private_roots = True
    allows_parts = True
    plans_by_geometry = True

    def arrange(self, leaves: Sequence[LeafParts], outline: Callable[[], Mapping[str, Any]]) -> Mapping[TreePath, JSON]:
        """Return nothing: a process needs to know its own portions only."""
        del leaves, outline
        return {}

    def plan(self, portions: Sequence[Portion], job: WriteJob) -> list[FilePlan]:
        """Return one file an item (consolidated), or one for all (sharded), or several parts of it."""
        plans = []
        for path, indices in group_portions(portions, job, self.suffix).items():
            parts = [] if job.part_bytes is None else spread(portions, indices, job.mode, job.part_bytes)
            if len(parts) > 1:
                plans += self._plan_parts(path, portions, parts, job.mode)
                continue
            keys = portion_keys(portions, indices, job)
            layout = self.layout(pieces_of(portions, keys), {"format": "pt"})
            plans.append(file_plan(path, layout, portions, keys))
        return plans

    def _plan_parts(
        self, path: str, portions: Sequence[Portion], parts: Sequence[Sequence[tuple[str, Content]]], mode: Mode
    ) -> list[FilePlan]:
        plans = []
        for index, part in enumerate(parts):
            contents = dict(part)
            pieces = [Piece(key=key, dtype=portions[c.portion].dtype, shape=c.region.shape) for key, c in part]
            layout = self.layout(pieces, {"format": "pt"})
            held = tuple(contents[placement.piece.key] for placement in layout.placements)
            name = part_path(path, index, len(parts), self.suffix)
            plans.append(FilePlan(path=name, layout=layout, contents=held))
        if mode == "consolidated":
            names = [(plan.path, [placement.piece.key for placement in plan.layout.placements]) for plan in plans]
            num_bytes = sum(placement.num_bytes for plan in plans for placement in plan.layout.placements)
            name, data = hugging_face_index(path, names, num_bytes)
            plans.append(FilePlan(path=name, layout=FileLayout(header=data, placements=(), num_bytes=len(data))))
        return plans

    def conclude(self, parts: Iterable[WrittenPart], job: WriteJob) -> list[FilePlan]:
        """Return nothing: each file says itself what is in it."""
        del parts, job
        return []

    def layout(self, pieces: Sequence[Piece], metadata: Mapping[str, str]) -> FileLayout:
        """Return header and placements of a file that holds `pieces`; equal arguments give equal bytes.

        Wide dtypes come first, so that every tensor is aligned to its item; among equals the order is that of `pieces`.
        A dtype that safetensors' readers do not know is stored as bytes with a last dimension of one item. `metadata`
        gets `format = "pt"` where it has no `format`, as Hugging Face's loaders ask for.

        Raises:
            InvalidArgumentError: a key twice, a negative size, or a header beyond the 100 MB that readers accept.
            UnsupportedValueError: an unknown dtype, or a key or text that the header cannot hold.
        """
        _check_keys(pieces)
        ordered = sorted(pieces, key=_item_bytes, reverse=True)  # stable
        header: dict[str, Any] = {METADATA_KEY: _checked_metadata({"format": "pt", **metadata})}
        sizes = []
        end = 0
        for piece in ordered:
            dtype, shape = _stored_form(piece)
            size = math.prod(piece.shape) * _item_bytes(piece)
            header[piece.key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            sizes.append(size)
            end += size
        encoded = _encode(header)
        offset = len(encoded)
        placements = []
        for piece, size in zip(ordered, sizes, strict=True):
            placements.append(Placement(piece=piece, offset=offset, num_bytes=size))
            offset += size
        return FileLayout(header=encoded, placements=tuple(placements), num_bytes=offset)


def _item_bytes(piece: Piece) -> int:
    size = ITEM_BYTES.get(piece.dtype)
    if size is None:
        raise UnsupportedValueError(f"{piece.key!r} has the unknown dtype {piece.dtype!r}")
    return size


def _stored_form(piece: Piece) -> tuple[str, list[int]]:
    stored = SAFETENSORS_NAMES.get(piece.dtype)
    if stored is not None:
        return stored, list(piece.shape)
    return _BYTES_DTYPE, [*piece.shape, ITEM_BYTES[piece.dtype]]


def _check_keys(pieces: Sequence[Piece]) -> None:
    seen = set()
    for piece in pieces:
        if piece.key == METADATA_KEY or not _is_utf8(piece.key):
            raise UnsupportedValueError(
                f"a tensor in a safetensors file cannot have the key {piece.key!r}",
                hint="It is reserved, or no Unicode text: encode it.",
            )
        if piece.key in seen:
            raise InvalidArgumentError(f"two tensors of one file have the key {piece.key!r}")
        if any(size < 0 for size in piece.shape):
            raise InvalidArgumentError(f"{piece.key!r} has the shape {piece.shape}")
        seen.add(piece.key)


def _checked_metadata(metadata: dict[Any, Any]) -> dict[str, str]:
    for name, text in metadata.items():
        if not (isinstance(name, str) and isinstance(text, str) and _is_utf8(name) and _is_utf8(text)):
            raise UnsupportedValueError(f"the metadata of a safetensors file are texts, not {name!r}: {text!r}")
    return metadata


def _is_utf8(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _encode(header: dict[str, Any]) -> bytes:
    """Return length and JSON, padded with spaces so that the data begins on a page."""
    text = known_json(header).encode("ascii")
    length = -(-(_LENGTH_BYTES + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - _LENGTH_BYTES
    if length > _MAX_HEADER_BYTES:
        raise InvalidArgumentError(
            f"a safetensors header of {length} bytes is beyond the {_MAX_HEADER_BYTES} that readers accept",
            hint='Split the state into several items, or save it with mode="sharded".',
        )
    return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length, b" ")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """One tensor of a file, as its header has it.

    Attributes:
        key: its name.
        dtype: safetensors' name of it.
        shape: in items.
        offset: its first byte, from the start of the file.
        num_bytes: its size.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileHeader:
    """A checked header.

    Attributes:
        metadata: texts.
        tensors: by key, in file order; they fill the file from `data_offset` to its end.
        data_offset: where the data section begins.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]
    data_offset: int


def read_header(data: bytes, *, path: str, file_bytes: int) -> FileHeader:
    """Return the header of a file that anybody may have written, checked throughout.

    Args:
        data: the first bytes of the file, at least to the end of the header.
        path: the file, for errors.
        file_bytes: size of the whole file.

    Raises:
        CorruptDataError: cut short, too long, not JSON, a key twice, a dtype that is unknown, or tensors that do not
            fill the file without gaps and overlaps.
    """
    text = _header_text(data, path=path, file_bytes=file_bytes)
    values = parse_json(text, what="the safetensors header", path=path)
    fields = Fields(values, what="the safetensors header", path=path)
    data_offset = _LENGTH_BYTES + len(text)
    tensors = [_read_tensor(fields, key, data_offset) for key in values if key != METADATA_KEY]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = data_offset
    for tensor in tensors:
        if tensor.offset != end:
            raise fields.error(f"has {tensor.key[:80]!r} at byte {tensor.offset}, where byte {end} is next")
        end += tensor.num_bytes
    if end != file_bytes:
        raise fields.error(f"describes a file of {end} bytes, and it has {file_bytes}")
    return FileHeader(
        metadata=_read_metadata(fields, values), tensors={t.key: t for t in tensors}, data_offset=data_offset
    )


def _header_text(data: bytes, *, path: str, file_bytes: int) -> bytes:
    if len(data) < _LENGTH_BYTES:
        raise CorruptDataError(f"a safetensors file of {len(data)} bytes is cut short", path=path)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    end = _LENGTH_BYTES + length
    if length > _MAX_HEADER_BYTES or end > min(len(data), file_bytes):
        raise CorruptDataError(
            f"the safetensors header says it has {length} bytes, of which {len(data) - _LENGTH_BYTES} are there",
            path=path,
        )
    text = data[_LENGTH_BYTES:end]
    if not text.startswith(b"{"):
        raise CorruptDataError("the safetensors header does not begin with a brace", path=path)
    return text


def _read_tensor(fields: Fields, key: str, data_offset: int) -> StoredTensor:
    tensor = Fields(fields.value(key), what=f"{key[:80]!r} in the safetensors header", path=fields.path)
    dtype = tensor.text("dtype")
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None:
        raise tensor.error(f"has the unknown dtype {dtype[:40]!r}")
    shape = tensor.integers("shape", max_items=_MAX_RANK)
    offsets = tensor.integers("data_offsets", max_items=2)
    size = math.prod(shape) * item_bytes
    if len(offsets) != 2 or offsets[1] - offsets[0] != size or size > INT64_MAX:  # noqa: PLR2004  # begin and end
        raise tensor.error(f"has the data_offsets {list(offsets)} where its shape has {size} bytes")
    return StoredTensor(key=key, dtype=dtype, shape=shape, offset=data_offset + offsets[0], num_bytes=size)


def _read_metadata(fields: Fields, values: dict[str, Any]) -> dict[str, str]:
    if METADATA_KEY not in values:
        return {}
    table = fields.table(METADATA_KEY)
    if not all(type(text) is str for text in table.values()):
        raise fields.error("has metadata that are no texts")
    return table
