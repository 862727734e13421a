"""The state's tree, flattened: paths, nodes, and their rows in a manifest.

A node's `kind` and `data` belong to whoever made them (`safepoint.manager`); here they are only carried.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from safepoint.formats.errors import CorruptDataError, InvalidArgumentError
from safepoint.formats.fields import MAX_DEPTH, check_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "JSON",
    "MAX_TREE_DEPTH",
    "Node",
    "PathKey",
    "TaggedKey",
    "TreePath",
    "check_data",
    "display_path",
    "structure_from_rows",
    "structure_to_rows",
]

MAX_TREE_DEPTH = 128
"""The longest path; it bounds the memory that a few bytes of a manifest can ask for."""

_ROW_FIELDS = 4  # parent, key, kind, data
_MAX_KIND_CHARS = 64
_LEVELS_ABOVE_DATA = 3  # the object of the manifest, the list of rows, the row

JSON: TypeAlias = Any
"""None, bool, int, finite float, str, and lists and str-keyed dicts of them."""


@dataclass(frozen=True, slots=True, order=True)
class TaggedKey:
    """A key of the state's tree that is neither str nor int: a bool, None, float, bytes, tuple, ….

    Attributes:
        kind: what it was.
        text: its value as text, in the way of its kind.
    """

    kind: str
    text: str


PathKey: TypeAlias = str | int | TaggedKey
"""One step down the tree. An int is a plain int, never a bool."""

TreePath: TypeAlias = tuple[PathKey, ...]
"""From the root, `()`, down to a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node of the state's tree.

    Attributes:
        kind: what it is, in the vocabulary of whoever made it.
        data: what else is needed to make it again.
    """

    kind: str
    data: JSON = None


def display_path(path: TreePath) -> str:
    """Return the dotted path, for people and for patterns; two paths may look the same."""
    text = ".".join(key.text if isinstance(key, TaggedKey) else str(key) for key in path)
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def structure_to_rows(structure: Mapping[TreePath, Node]) -> tuple[list[list[Any]], dict[TreePath, int]]:
    """Return `[parent row, key, kind, data]` for each node in order, and the row of each path.

    Raises:
        InvalidArgumentError: the root is not first, a node comes before its parent, a path is too long, or a key is of
            another type.
    """
    rows: list[list[Any]] = []
    index: dict[TreePath, int] = {}
    for path, node in structure.items():
        if path:
            parent = index.get(path[:-1])
            if parent is None:
                raise InvalidArgumentError(f"node {display_path(path)!r} comes before its parent")
            if len(path) > MAX_TREE_DEPTH:
                raise InvalidArgumentError(f"node {display_path(path)!r} is deeper than {MAX_TREE_DEPTH} levels")
            key = path[-1]
            rows.append([parent, key if type(key) is str else _key_to_json(key), node.kind, node.data])
        else:
            if rows:
                raise InvalidArgumentError("the root of a structure comes first")
            rows.append([None, None, node.kind, node.data])
        index[path] = len(index)
    if not rows:
        raise InvalidArgumentError("a structure has at least a root")
    return rows, index


def check_data(structure: Mapping[TreePath, Node]) -> None:
    """Check that the data of every node may stand in a row of a structure.

    Raises:
        UnsupportedValueError: keys that are not strings, or nested too deep.
    """
    for node in structure.values():
        if isinstance(node.data, (dict, list, tuple)):
            check_json(node.data, max_depth=MAX_DEPTH - _LEVELS_ABOVE_DATA)


def _key_to_json(key: PathKey) -> JSON:
    if isinstance(key, TaggedKey):
        return {key.kind: key.text}
    if type(key) is str or type(key) is int:
        return key
    raise InvalidArgumentError(f"a key of a tree is a str, an int or a TaggedKey, not {reprlib.repr(key)}")


def structure_from_rows(rows: Sequence[Any], *, path: str) -> tuple[dict[TreePath, Node], list[TreePath]]:
    """Return the nodes by path, in order, and the path of each row.

    Args:
        rows: parsed JSON that anybody may have written.
        path: the file, for errors.

    Raises:
        CorruptDataError: the rows are no tree with its parents first.
    """
    structure: dict[TreePath, Node] = {}
    paths: list[TreePath] = []
    for index, row in enumerate(rows):
        try:
            tree_path, node = _read_row(row, paths)
        except ValueError as error:
            raise CorruptDataError(f"node {index} of the structure {error}", path=path) from None
        if tree_path in structure:
            raise CorruptDataError("the structure has a node twice", path=path, leaf=display_path(tree_path))
        structure[tree_path] = node
        paths.append(tree_path)
    if not paths:
        raise CorruptDataError("the structure has no root", path=path)
    return structure, paths


def _read_row(row: object, paths: list[TreePath]) -> tuple[TreePath, Node]:
    if type(row) is not list or len(row) != _ROW_FIELDS:
        raise ValueError(f"should be [parent, key, kind, data], not {reprlib.repr(row)}")
    parent, key, kind, data = row
    if type(kind) is not str or not 0 < len(kind) <= _MAX_KIND_CHARS:
        raise ValueError(f"has the kind {reprlib.repr(kind)}")
    return _read_path(parent, key, paths), _bare_node(kind) if data is None else Node(kind=kind, data=data)


@lru_cache(maxsize=64)
def _bare_node(kind: str) -> Node:
    return Node(kind=kind)  # one for the many arrays of a state


def _read_path(parent: object, key: object, paths: list[TreePath]) -> TreePath:
    if not paths:
        if parent is not None or key is not None:
            raise ValueError("is the first and has a parent")
        return ()
    if type(parent) is not int or not 0 <= parent < len(paths):
        raise ValueError(f"has the parent {reprlib.repr(parent)}, which is no earlier node")
    if len(paths[parent]) >= MAX_TREE_DEPTH:
        raise ValueError(f"is deeper than {MAX_TREE_DEPTH} levels")
    return (*paths[parent], _read_key(key))


def _read_key(key: object) -> PathKey:
    if type(key) is str or type(key) is int:
        return key
    if type(key) is dict and len(key) == 1:
        ((kind, text),) = key.items()
        if type(kind) is str and kind and type(text) is str:
            return TaggedKey(kind, text)
    raise ValueError(f"has the key {reprlib.repr(key)}")
