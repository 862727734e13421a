"""The canonical text of a manifest's leaves: written at once, and read by its pattern.

Writers write one text, so nearly every manifest that is read has it. To make JSON values of it first would cost more
than all else: where the pattern fits and every number is sound, entries are made of the pieces of the text. Where
anything is odd, nothing is said about it: `LeafEntry.from_json` reads any JSON, and tells what is wrong.
"""

from __future__ import annotations

import json
import math
import re
from functools import lru_cache, partial
from json.encoder import encode_basestring_ascii as _quoted
from typing import TYPE_CHECKING, Any

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.entries import LeafEntry, ShardEntry, can_hold, is_box, is_inside, is_possible
from safepoint.formats.errors import CorruptDataError
from safepoint.formats.fields import INT64_MAX, known_json, parse_json
from safepoint.formats.region import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.tree import JSON, TreePath

__all__ = ["cut_leaves", "leaf_text", "read_leaf_texts"]

_BEGIN, _END = b',"leaves":[{"dtype":', b'],"mode":'

_INT = "(0|[1-9][0-9]{0,18})"
_INTS = r"\[[0-9,]*+\]"
_TEXT = r'([^"\\\x00-\x1f]*+(?:\\[^\x00-\x1f][^"\\\x00-\x1f]*+)*+)'
_PATTERN = re.compile(
    rf'(?:\{{"dtype":"([a-z0-9_]++)","node":{_INT},"shape":({_INTS}),"shards":\[)?+'  # only the first shard has it
    r'\{(?:"codec":"([a-z0-9_]++)",)?+(?:"digest":"([0-9a-f]{32})",)?+'
    rf'"file":{_INT},"key":"{_TEXT}","num_bytes":{_INT},"offset":{_INT},'
    rf'"region":(\[{_INTS},{_INTS}\])(?:,"stored_shape":({_INTS}))?+\}}(\]\}})?+(?:,(?=\{{)|\Z)'
)
_STRIDE = _PATTERN.groups + 1

_new_leaf: Callable[[tuple[Any, ...]], LeafEntry] = partial(tuple.__new__, LeafEntry)
_new_shard: Callable[[tuple[Any, ...]], ShardEntry] = partial(tuple.__new__, ShardEntry)


def leaf_text(leaf: LeafEntry, node: int) -> str:
    """Return the canonical JSON text of `leaf.to_json(node)`."""
    if len(leaf.shards) != 1 or leaf.shards[0].stored_shape is not None or leaf.shards[0].codec is not None:
        return known_json(leaf.to_json(node))
    shard = leaf.shards[0]
    digest = "" if shard.digest is None else f'"digest":"{shard.digest}",'
    return (
        f'{{"dtype":"{leaf.dtype}","node":{node},"shape":{_text(leaf.shape)},"shards":[{{{digest}"file":{shard.file},'
        f'"key":{_quoted(shard.key)},"num_bytes":{shard.num_bytes},"offset":{shard.offset},'
        f'"region":[{_text(shard.region.offsets)},{_text(shard.region.shape)}]}}]}}'
    )


@lru_cache(maxsize=4096)
def _text(numbers: tuple[int, ...]) -> str:
    return f"[{','.join(str(int(number)) for number in numbers)}]"  # True equals 1, and may have come first


def cut_leaves(data: bytes) -> tuple[dict[str, JSON], str] | None:
    """Return the members of a canonical manifest without its leaves, and the text of those; None where it is another.

    What comes before the leaves and what comes after them are valid objects by themselves. So if the text between is
    one of leaves, the whole is a valid object, and they are its own: no inner object can be cut like that.
    """
    start = data.find(_BEGIN)
    stop = data.find(_END, start)
    if start < 0 or stop < 0:
        return None
    outer = (data[:start] + b"}", b"{" + data[stop + _END.index(b'"') :])
    try:
        before, after = (parse_json(part, what="a part of the manifest", path="") for part in outer)
        leaves = data[start + _BEGIN.index(b"{") : stop].decode("utf-8")
    except (CorruptDataError, UnicodeDecodeError):
        return None
    members = {**before, **after}
    is_whole = len(members) == len(before) + len(after) and "leaves" not in members  # or a key is there twice
    return (members, leaves) if is_whole else None


def read_leaf_texts(
    text: str, *, paths: Sequence[TreePath], files: Sequence[FileEntry]
) -> tuple[LeafEntry, ...] | None:
    """Return the checked entries of leaves whose text anybody may have written; None where one needs a closer look."""
    pieces = _PATTERN.split(text)
    if any(pieces[::_STRIDE]):  # what lies between two that fit
        return None
    try:
        return tuple(_entries(pieces, paths, [file.num_bytes for file in files]))
    except (ValueError, LookupError):
        return None


def _entries(pieces: Sequence[Any], paths: Sequence[TreePath], file_sizes: Sequence[int]) -> Iterator[LeafEntry]:
    """Yield the leaves of all shards; a shard that is the first or last of its leaf says so.

    Raises:
        ValueError, LookupError: something is not as it should be.
    """
    path: TreePath = ()
    own_dtype = own_shape = None
    shards: list[ShardEntry] = []
    dtypes, nodes, shapes, codecs, digests, files, keys, sizes, starts, *rest = (
        pieces[column::_STRIDE] for column in range(1, _STRIDE)
    )
    numbers = (map(int, column) for column in (files, sizes, starts))
    texts = (json.loads(f'"{key}"') if "\\" in key else key for key in keys)
    rows = zip(dtypes, nodes, shapes, codecs, digests, *numbers, texts, *rest, strict=True)
    for dtype, node, shape, codec, digest, file, num_bytes, offset, key, region, stored, last in rows:
        if dtype is not None:
            if own_dtype is not None:
                raise ValueError("the leaf before has no end")
            own_dtype, own_shape, path = dtype, shape, paths[int(node)]
        like, box, stored_shape, expected = _box(own_dtype, own_shape, region, stored)
        if offset + num_bytes > file_sizes[file]:
            raise ValueError("a shard outside its file")
        if (num_bytes != expected or codec is not None) and not can_hold(num_bytes, expected, codec):
            raise ValueError("a shard of another size than its region")
        shards.append(_new_shard((box, file, offset, num_bytes, key, stored_shape, digest, codec)))
        if last is not None:
            yield _new_leaf((path, *like, tuple(shards)))
            own_dtype, shards = None, []
    if own_dtype is not None:
        raise ValueError("the last leaf has no end")


@lru_cache(maxsize=4096)
def _box(
    dtype: str | None, shape_text: str, region: str, stored: str | None
) -> tuple[tuple[str, tuple[int, ...]], Region, tuple[int, ...] | None, int]:
    """Return dtype and shape of a shard's leaf, its region, the shape that is stored, and its bytes. Many are alike.

    Args:
        dtype: of the leaf; None for a shard of none.
        shape_text: text of the leaf's shape.
        region: text of `[offsets, shape]`.
        stored: text of the shape of what is stored, where that is more.

    Raises:
        ValueError, LookupError: there is no such leaf, or it has no such region.
    """
    if dtype is None:
        raise ValueError("a shard of no leaf")
    shape = tuple(json.loads(shape_text))
    offsets, sizes = map(tuple, json.loads(region))
    if not (
        is_possible(dtype, shape) and len(offsets) == len(sizes) == len(shape) and is_inside(offsets, sizes, shape)
    ):
        raise ValueError("an impossible leaf, or a region outside it")
    box = Region.whole(shape) if sizes == shape else Region(offsets, sizes)
    if stored is None:
        return (dtype, shape), box, None, box.num_elements * ITEM_BYTES[dtype]
    stored_shape = tuple(json.loads(stored))
    if not is_box(stored_shape, box) or max(stored_shape, default=0) > INT64_MAX:
        raise ValueError("a stored shape that cannot hold its region")
    return (dtype, shape), box, stored_shape, math.prod(stored_shape) * ITEM_BYTES[dtype]
