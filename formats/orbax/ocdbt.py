"""OCDBT, TensorStore's database of keys and values in few files: its manifest and its tree, from where the values lie.

Pure: keys and places to bytes. Values of arrays are wherever a process wrote them, and this only points there: nothing
is merged, copied or deleted, and the files with the data are written and digested like any other of ours.
Source: TensorStore, `kvstore/ocdbt/index.rst`, "Storage format".
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from safepoint.formats.orbax.crc32c import crc32c

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["MANIFEST_FILE", "Location", "build_database"]

MANIFEST_FILE = "manifest.ocdbt"

NODE_BYTES = 1 << 20
"""About how large a node becomes before the next one begins: a reader takes a node whole."""

_MANIFEST_MAGIC, _NODE_MAGIC = 0x0CDB3A2A, 0x0CDB20DE
_VERSION, _UNCOMPRESSED, _SINGLE_MANIFEST = 0, 0, 0
_MAX_INLINE_BYTES, _MAX_NODE_BYTES = 1024, 100_000_000  # for writers that add to the database; Orbax's own values
_VERSION_ARITY_LOG2 = 4
_FIRST_GENERATION = 1
_INLINE, _ELSEWHERE = 0, 1
_ENTRY_BYTES = 16  # about what an entry takes beside its key and value

_ItemT = TypeVar("_ItemT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """Where a value lies.

    Attributes:
        file: path of the file, relative to the database.
        offset: first byte.
        num_bytes: of the value; not 0.
    """

    file: str
    offset: int
    num_bytes: int


_Entry = tuple[bytes, "bytes | Location"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Node:
    """An encoded node, as its parent knows it; the numbers are of all that is below it."""

    first_key: bytes
    place: Location
    num_keys: int
    tree_bytes: int
    value_bytes: int


def build_database(
    entries: Mapping[str, bytes | Location], *, node_file: str, identity: bytes, time_nsecs: int
) -> tuple[bytes, bytes]:
    """Return the content of the manifest, and that of the file with the nodes of the tree.

    Args:
        entries: value by key, here if it is small, or where it lies; at least one.
        node_file: path of that file, relative to the database.
        identity: 16 bytes that no other database has.
        time_nsecs: of the commit, in nanoseconds since 1970.
    """
    written = bytearray()
    level = [_leaf(group, node_file, written) for group in _cut(_sorted(entries), _entry_bytes)]
    height = 0
    while len(level) > 1:
        height += 1
        level = [_parent(group, height, node_file, written) for group in _cut(level, _child_bytes)]
    return _manifest(level[0], height, identity, time_nsecs), bytes(written)


def _sorted(entries: Mapping[str, bytes | Location]) -> list[_Entry]:
    return sorted(((key.encode(), value) for key, value in entries.items()), key=lambda entry: entry[0])


def _entry_bytes(entry: _Entry) -> int:
    key, value = entry
    return len(key) + _ENTRY_BYTES + (len(value) if isinstance(value, bytes) else 0)


def _child_bytes(node: _Node) -> int:
    return len(node.first_key) + _ENTRY_BYTES


def _cut(items: Sequence[_ItemT], size_of: Callable[[_ItemT], int]) -> Iterator[Sequence[_ItemT]]:
    """Cut into groups of about a node's size, of two at least: each level has fewer nodes than the one below."""
    start, total = 0, 0
    for index, item in enumerate(items):
        total += size_of(item)
        if total >= NODE_BYTES and index > start:
            yield items[start : index + 1]
            start, total = index + 1, 0
    if start < len(items):
        yield items[start:]


def _leaf(entries: Sequence[_Entry], node_file: str, written: bytearray) -> _Node:
    keys = [key for key, _ in entries]
    inline = [value for _, value in entries if isinstance(value, bytes)]
    places = [value for _, value in entries if isinstance(value, Location)]
    files = _file_numbers(places)
    body = [
        _keys(keys, between=b""),
        _numbers(len(value) if isinstance(value, bytes) else value.num_bytes for _, value in entries),
        bytes(_INLINE if isinstance(value, bytes) else _ELSEWHERE for _, value in entries),
        _numbers(files[place.file] for place in places),
        _numbers(place.offset for place in places),
        *inline,
    ]
    place = _append_node(0, files, len(entries), body, node_file, written)
    return _Node(
        first_key=keys[0],
        place=place,
        num_keys=len(entries),
        tree_bytes=place.num_bytes,
        value_bytes=sum(value.num_bytes for value in places),
    )


def _parent(children: Sequence[_Node], height: int, node_file: str, written: bytearray) -> _Node:
    keys = [child.first_key for child in children]
    files = _file_numbers([child.place for child in children])
    # Children spell out their keys whole: no part of them is common to a subtree by what its parent says.
    body = [_keys(keys, between=bytes(len(keys))), *_references(children, files)]
    place = _append_node(height, files, len(children), body, node_file, written)
    return _Node(
        first_key=keys[0],
        place=place,
        num_keys=sum(child.num_keys for child in children),
        tree_bytes=place.num_bytes + sum(child.tree_bytes for child in children),
        value_bytes=sum(child.value_bytes for child in children),
    )


def _references(nodes: Sequence[_Node], files: Mapping[str, int]) -> list[bytes]:
    return [
        _numbers(files[node.place.file] for node in nodes),
        _numbers(node.place.offset for node in nodes),
        _numbers(node.place.num_bytes for node in nodes),
        _numbers(node.num_keys for node in nodes),
        _numbers(node.tree_bytes for node in nodes),
        _numbers(node.value_bytes for node in nodes),
    ]


def _append_node(
    height: int, files: Mapping[str, int], count: int, body: Iterable[bytes], node_file: str, written: bytearray
) -> Location:
    node = _framed(_NODE_MAGIC, b"".join([bytes([height]), _file_table(files), _number(count), *body]))
    place = Location(file=node_file, offset=len(written), num_bytes=len(node))
    written += node
    return place


def _manifest(root: _Node, height: int, identity: bytes, time_nsecs: int) -> bytes:
    files = _file_numbers([root.place])
    config = [
        identity,
        _numbers([_SINGLE_MANIFEST, _MAX_INLINE_BYTES, _MAX_NODE_BYTES]),
        bytes([_VERSION_ARITY_LOG2]),
        _number(_UNCOMPRESSED),
    ]
    version = [
        _numbers([1, _FIRST_GENERATION]),
        bytes([height]),
        *_references([root], files),
        struct.pack("<Q", time_nsecs),
    ]
    no_older_versions = _number(0)
    return _framed(_MANIFEST_MAGIC, b"".join([*config, _file_table(files), *version, no_older_versions]))


def _framed(magic: int, body: bytes) -> bytes:
    """Return a node or manifest: a header that says its length, the body, and the checksum of both."""
    head = _numbers([_VERSION, _UNCOMPRESSED])
    num_bytes = 4 + 8 + len(head) + len(body) + 4
    data = struct.pack(">I", magic) + struct.pack("<Q", num_bytes) + head + body
    return data + struct.pack("<I", crc32c(data))


def _file_numbers(places: Iterable[Location]) -> dict[str, int]:
    """Return the number of each file in the order in which the table lists them."""
    return {file: number for number, file in enumerate(sorted({place.file for place in places}, key=str.encode))}


def _file_table(files: Mapping[str, int]) -> bytes:
    paths = [file.encode() for file in files]
    shared = _shared_prefixes(paths)
    suffixes = [path[count:] for path, count in zip(paths, shared, strict=True)]
    no_base_paths = bytes(len(paths))
    return b"".join([_number(len(paths)), _numbers(shared[1:]), _numbers(map(len, suffixes)), no_base_paths, *suffixes])


def _keys(keys: Sequence[bytes], *, between: bytes) -> bytes:
    """Return the columns of the keys; `between` stands before their text."""
    shared = _shared_prefixes(keys)
    suffixes = [key[count:] for key, count in zip(keys, shared, strict=True)]
    return b"".join([_numbers(shared[1:]), _numbers(map(len, suffixes)), between, *suffixes])


def _shared_prefixes(texts: Sequence[bytes]) -> list[int]:
    """Return how many bytes each has in common with the one before, 0 for the first."""
    return [0, *itertools.starmap(_shared_prefix, itertools.pairwise(texts))][: len(texts)]


def _shared_prefix(one: bytes, other: bytes) -> int:
    pairs = zip(one, other, strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _numbers(values: Iterable[int]) -> bytes:
    return b"".join(map(_number, values))


def _number(value: int) -> bytes:
    """Return a whole number as LEB128."""
    encoded = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - seven bits a byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
