"""What a foreign checkpoint is to whoever restores it: a tree of standard containers, and arrays that give regions.

Knows no kind of checkpoint.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import CorruptDataError, UnsupportedValueError
from safepoint.formats.region import Region

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from io import FileIO

    from safepoint.formats.tree import TreePath

__all__ = [
    "ForeignArray",
    "ForeignCheckpoint",
    "Keys",
    "Refused",
    "array_bytes",
    "build_nested",
    "checked_region",
    "read_exactly",
    "read_parts",
    "tree_key",
]

PART_BYTES = 32 << 20
"""How much of an array is in memory at once where it goes through in order."""


class ForeignArray(ABC):
    """An array in a file of others.

    Attributes:
        dtype: our name of its dtype.
        shape: its global shape.
    """

    dtype: str
    shape: tuple[int, ...]

    @abstractmethod
    def read_into(self, region: Region, out: memoryview) -> None:
        """Read a region.

        Args:
            region: inside the shape.
            out: writable bytes, as many as the region has; filled in C order, little-endian.

        Raises:
            CorruptDataError: the file is not what its metadata say.
            StorageError: it cannot be read.
        """


@dataclass(frozen=True, slots=True)
class Refused:
    """Stands for an object that was not made, or an array that cannot be read, by the name that the file has for it."""

    name: str


@dataclass(frozen=True, kw_only=True)
class ForeignCheckpoint:
    """An opened checkpoint.

    Attributes:
        kind: "orbax", "safetensors", "torch", "xlafsdp" or "dcp".
        location: its path.
        tree: containers and plain values, with a `LeafRef` for each array.
        arrays: by the path of their reference.
        metadata: what else it says of itself, for people.
        lost: dotted names of what it says it holds, and does not.
        refused: names of objects in it that were not made, or why an array cannot be read, by their dotted names;
            `Refused` stands for each.
    """

    kind: str
    location: str
    tree: Any
    arrays: Mapping[TreePath, ForeignArray]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    refused: Mapping[str, str | UnsupportedValueError] = field(default_factory=dict)

    def check_nothing_lost(self) -> None:
        """Check that all is here that it says it holds.

        Called by: whoever takes all of it; who knows what is wanted misses it anyway.

        Raises:
            CorruptDataError: something has no data.
            UnsupportedValueError: something is an object, or an array that cannot be read.
        """
        for leaf in self.refused:
            raise self.refusal(leaf)
        if self.lost:
            raise CorruptDataError(
                f"the checkpoint names {', '.join(self.lost[:10])} and has no data of it",
                path=self.location,
                leaf=self.lost[0],
                hint="Its writer left it out: torch_xla's experimental manager does so with tensors that are "
                "replicated over a part of the mesh. The rest can be restored into a target.",
            )

    def refusal(self, leaf: str) -> UnsupportedValueError:
        """Return the error of what was refused."""
        why = self.refused[leaf]
        if isinstance(why, UnsupportedValueError):
            why.hint = "Restore the rest into a target, and leave it out by `adapt=[Partial(...)]`."
            return why
        more = f", and {len(self.refused) - 1} more objects" if len(self.refused) > 1 else ""
        return UnsupportedValueError(
            f"the file holds more than tensors and plain values: {why}{more}",
            path=self.location,
            leaf=leaf,
            hint="It was not made, since that would run code of the file. Restore the rest into a target, and leave it "
            "out by `adapt=[Partial(...)]`; or save it again as plain values.",
        )


def checked_region(array: ForeignArray, region: Region, out: memoryview, item_bytes: int) -> int:
    """Return the bytes of the region; only a bug of ours can ask for one that does not fit."""
    num_bytes = region.num_elements * item_bytes
    assert len(out) == num_bytes
    assert all(end <= size for end, size in zip(region.end, array.shape, strict=True))
    return num_bytes


def array_bytes(array: ForeignArray) -> int:
    """Return its size in bytes."""
    return Region.whole(array.shape).num_elements * ITEM_BYTES[array.dtype]


def read_parts(array: ForeignArray, max_bytes: int = PART_BYTES) -> Iterator[memoryview]:
    """Yield the bytes of an array in C order; each part is there until the next one is asked for."""
    item_bytes = ITEM_BYTES[array.dtype]
    memory = memoryview(bytearray(min(max(max_bytes, item_bytes), array_bytes(array))))
    for region in Region.whole(array.shape).cut(max_bytes // item_bytes):
        part = memory[: region.num_elements * item_bytes]
        if part:
            array.read_into(region, part)
            yield part


def read_exactly(file: FileIO, offset: int, out: memoryview) -> None:
    """Fill memory from a place in a file.

    Raises:
        EOFError: the file ends before.
        OSError: it cannot be read.
    """
    while len(out):
        count = os.preadv(file.fileno(), [out[: 1 << 30]], offset)
        if not count:
            raise EOFError
        offset += count
        out = out[count:]


Keys = tuple[tuple[str, bool], ...]
"""From the root down; each with whether it is the index of a sequence."""


class _Branch(dict[Any, Any]):
    """A container while it is being built."""

    is_sequence = False


def build_nested(leaves: Iterable[tuple[Keys, Any]], *, path: str) -> Any:
    """Return a tree from its leaves.

    Args:
        leaves: with their keys, in order.
        path: of the checkpoint, for errors.

    Raises:
        CorruptDataError: a leaf is there twice, or where others are below it.
    """
    root = _Branch()
    for keys, value in leaves:
        if not keys:
            return value
        node = root
        for key, is_index in keys[:-1]:
            node.is_sequence = is_index
            child = node.setdefault(tree_key(key, is_index=is_index), _Branch())
            if not isinstance(child, _Branch):
                raise CorruptDataError("a leaf has others below it", path=path, leaf=".".join(key for key, _ in keys))
            node = child
        key, node.is_sequence = keys[-1]
        if tree_key(*keys[-1]) in node:
            raise CorruptDataError("a leaf is there twice", path=path, leaf=".".join(key for key, _ in keys))
        node[tree_key(*keys[-1])] = value
    return _finished(root)


def tree_key(key: str, is_index: bool) -> str | int:  # noqa: FBT001 - a pair of `Keys`
    """Return a key as it is in a tree."""
    return int(key) if is_index and key.isdigit() else key


def _finished(node: Any) -> Any:
    if not isinstance(node, _Branch):
        return node
    children = {key: _finished(child) for key, child in node.items()}
    if node.is_sequence and sorted(children) == list(range(len(children))):
        return [children[index] for index in range(len(children))]
    return children
