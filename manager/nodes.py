"""The vocabulary of the state's tree: which kinds of nodes there are, and what their data says.

    dict         {"type": "OrderedDict" | "defaultdict" | "Counter", "factory", "metadata", "class"}, all optional;
                 children by encoded key, in order
    list, tuple  {"length"}; children 0, 1, …        deque  {"length", "maxlen"}
    namedtuple, dataclass   {"class", "fields"}; children by field
    array        None, or {"kind": "numpy", "dtype"}; its data is in the files. "dtype" is there where the leaf's does
                 not say all: of arrays kept as bytes, and of those in another byte order. Besides, where it shows a
                 memory that others show too and is stored by itself all the same:
                 "memory": {"first": keys of the first of them, "num_bytes", "window"}
    alias        {"path": keys}, and what an array has: the same memory as the array at that path
    view         {"path": keys, "window": a `Window`, "base": data of that array's node}, and what an array has: a part
                 of its memory. Where no array of the state holds what several views show, a child of the first does
    value        a plain value in the form of `values`
    stateful     {"form", "class", "metadata", "wrapped"}; children: those of its state, or the one child "state"
                 where the state is no mapping (wrapped)
    per_process  {"process_count"}; children by process index

Owns what a container's node looks like. Class names are for people: nothing is made from them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from safepoint.formats.errors import CorruptDataError, UnsupportedValueError
from safepoint.formats.manifest import JSON, Node, PathKey, TreePath
from safepoint.manager.tree_keys import encode_key, key_from_json, key_to_json
from safepoint.manager.values import encode_value, type_name

if TYPE_CHECKING:
    from safepoint.manager.windows import Window

__all__ = [
    "ARRAYS",
    "FACTORIES",
    "MAPPINGS",
    "MAX_SPREAD",
    "SEQUENCES",
    "alias_node",
    "alias_path",
    "base_data",
    "children_of",
    "container_node",
    "encode_metadata",
    "is_namedtuple",
    "mapping_node",
    "memory_node",
    "memory_of",
    "node_data",
    "view_node",
]

ARRAYS = frozenset({"array", "alias", "view"})
"""Kinds of nodes that are an array in the state."""

MAX_SPREAD = 1024
"""How many times larger than the arrays that show it a memory may be, where each of them is stored by itself."""

MAPPINGS: Mapping[str | None, type[dict[Any, Any]]] = {
    None: dict,
    "OrderedDict": collections.OrderedDict,
    "defaultdict": collections.defaultdict,
    "Counter": collections.Counter,
}
"""Mappings of the standard library, by the `type` of their node."""

SEQUENCES = frozenset({"list", "tuple", "deque"})
"""Kinds whose children are numbered."""

FACTORIES: Mapping[str, type] = {
    kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, dict, set, tuple)
}
"""Factories of a defaultdict that are remembered by name; any other comes from the target."""

_MAPPING_NAMES: dict[Any, str | None] = {kind: name for name, kind in MAPPINGS.items()}
_SEQUENCE_TYPES: dict[Any, str] = {list: "list", tuple: "tuple", collections.deque: "deque"}


def node_data(node: Node) -> Mapping[str, JSON]:
    """Return a node's data where it is a mapping, else an empty one: a file may say anything."""
    return node.data if isinstance(node.data, dict) else {}


def is_namedtuple(value: object) -> bool:
    """Say whether it is an instance of a class made by `namedtuple` or `NamedTuple`."""
    fields = getattr(type(value), "_fields", None)
    return isinstance(value, tuple) and isinstance(fields, tuple) and len(fields) == len(value)


def container_node(value: Any) -> Node | None:
    """Return the node of a container, or None where `value` is none.

    Raises:
        UnsupportedValueError: a mapping or sequence that holds more than its items, so that it would come back less.
    """
    if isinstance(value, dict):
        return mapping_node(value)
    kind = _SEQUENCE_TYPES.get(type(value))
    if kind == "deque":
        return Node(kind=kind, data={"length": len(value), "maxlen": value.maxlen})
    if kind is not None:
        return Node(kind=kind, data={"length": len(value)})
    if is_namedtuple(value):
        return Node(kind="namedtuple", data={"class": type_name(type(value)), "fields": list(type(value)._fields)})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        return Node(kind="dataclass", data={"class": type_name(type(value)), "fields": fields})
    return None


def mapping_node(value: dict[Any, Any]) -> Node:
    """Return the node of a dict of the standard library, or of a class of the user's that adds no attributes."""
    if type(value) is dict:
        return Node(kind="dict")
    data: dict[str, JSON] = {}
    attributes = dict(getattr(value, "__dict__", {}))
    metadata = attributes.pop("_metadata", None)  # torch's versions, beside a module's state dict
    if isinstance(metadata, Mapping):
        data["metadata"] = encode_metadata(metadata)
    if attributes:
        raise UnsupportedValueError(
            f"a {type_name(type(value))} with attributes of its own ({', '.join(map(repr, attributes))}) would come "
            "back without them",
            hint="Pass `dict(value)`, and the attributes beside it.",
        )
    if type(value) in _MAPPING_NAMES:
        data["type"] = _MAPPING_NAMES[type(value)]
    else:
        data["class"] = type_name(type(value))
    factory = getattr(value, "default_factory", None)
    if FACTORIES.get(getattr(factory, "__name__", "")) is factory and factory is not None:
        data["factory"] = factory.__name__
    return Node(kind="dict", data=data)


def encode_metadata(metadata: Mapping[Any, Any]) -> JSON:
    """Return torch's module versions as JSON; what is not plain in it is left out, as torch's loading allows."""
    encoded: dict[str, JSON] = {}
    for prefix, entries in metadata.items():
        if not isinstance(prefix, str) or not isinstance(entries, Mapping):
            continue
        try:
            encoded[prefix] = {str(name): encode_value(entry) for name, entry in entries.items()}
        except UnsupportedValueError:
            continue
    return encoded


def children_of(value: Any, node: Node) -> Iterator[tuple[PathKey, Any]]:
    """Yield the children of a container with their keys, in order.

    Raises:
        UnsupportedValueError: a key cannot be kept, or two keys cannot be told apart.
    """
    if node.kind == "dict":
        return _entries(value)
    if node.kind in SEQUENCES:
        return iter(enumerate(value))
    return ((name, getattr(value, name)) for name in node.data["fields"])


def _entries(value: Mapping[Any, Any]) -> Iterator[tuple[PathKey, Any]]:
    seen: set[PathKey] = set()
    for key, child in value.items():
        encoded = encode_key(key)
        if encoded in seen:
            raise UnsupportedValueError(f"two keys of one mapping look the same when kept: {key!r}")
        seen.add(encoded)
        yield encoded, child


def alias_node(path: TreePath, node: Node) -> Node:
    """Return the node that says: the same memory as the array at `path`, whose node this is."""
    return Node(kind="alias", data={**node_data(node), "path": [key_to_json(key) for key in path]})


def view_node(path: TreePath, base: Node, window: Window, node: Node) -> Node:
    """Return the node that says: this window on the array at `path`; it takes the place of an array's node."""
    data = {**node_data(node), "path": [key_to_json(key) for key in path], "window": window.to_json()}
    return Node(kind="view", data={**data, "base": base.data} if base.data else data)


def memory_node(first: TreePath, window: Window, *, num_bytes: int, node: Node) -> Node:
    """Return the node of an array that is stored by itself, and shows part of a memory with others.

    Args:
        first: the first of them.
        window: where in the memory it lies.
        num_bytes: of the memory.
        node: of the array.
    """
    memory = {"first": [key_to_json(key) for key in first], "num_bytes": num_bytes, "window": window.to_json()}
    return Node(kind=node.kind, data={**node_data(node), "memory": memory})


class SharedMemory(NamedTuple):
    """What the node of an array says of a memory that others show too.

    Attributes:
        first: path of the first array that shows it, by which it is known.
        num_bytes: of the memory.
        window: where in it the array lies, as the file has it.
    """

    first: TreePath
    num_bytes: int
    window: JSON


def memory_of(node: Node) -> SharedMemory | None:
    """Return which memory an array or alias shows with others that are stored by themselves; None for most.

    Raises:
        CorruptDataError: it says so in no way that a save could have written.
    """
    memory = node_data(node).get("memory")
    if memory is None or node.kind == "view":
        return None
    keys, num_bytes = (memory.get("first"), memory.get("num_bytes")) if isinstance(memory, dict) else (None, None)
    if not isinstance(keys, list) or type(num_bytes) is not int or num_bytes < 1:
        raise CorruptDataError("an array does not say which memory it shows")
    return SharedMemory(tuple(key_from_json(key) for key in keys), num_bytes, memory.get("window"))


def base_data(node: Node) -> Mapping[str, JSON]:
    """Return the data of the node of the array that an array, alias or view shows."""
    if node.kind != "view":
        return node_data(node)
    base = node_data(node).get("base")
    return base if isinstance(base, dict) else {}


def alias_path(node: Node) -> TreePath:
    """Return where the array is that an alias or view shows.

    Raises:
        CorruptDataError: the node says nothing of the kind.
    """
    keys = node_data(node).get("path")
    if not isinstance(keys, list):
        raise CorruptDataError(f"an {node.kind} without the path of its array")
    return tuple(key_from_json(key) for key in keys)
