"""A saved subtree to a new value, with the types of a counterpart where there is one.

Owns the making of containers and plain values. What a file names is never looked up: classes of the user's come from
the counterpart (`like`), or, without one, as mappings and plain values. Arrays come from whoever asks (`array_of`).
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from safepoint.formats.errors import CorruptDataError
from safepoint.formats.manifest import PathKey, TaggedKey, TreePath, display_path
from safepoint.manager.nodes import FACTORIES, MAPPINGS, SEQUENCES, alias_path, is_namedtuple, node_data
from safepoint.manager.numpy_arrays import with_dtype
from safepoint.manager.per_process import PerProcess
from safepoint.manager.saved_tree import Saved
from safepoint.manager.statefuls import state_of, stateful_form
from safepoint.manager.tree_keys import decode_key, encode_key
from safepoint.manager.values import decode_value, enum_of
from safepoint.manager.windows import Window, open_window

__all__ = ["ABSENT", "Rebuilder", "keys_of", "replace_fields"]

ABSENT: Final[Any] = type("Absent", (), {"__repr__": lambda _: "ABSENT"})()
"""No counterpart; None is one."""

ArrayOf: TypeAlias = Callable[[TreePath, Saved, Any], Any]
"""(path of the stored leaf, node that wants it, counterpart) → the array."""

Report: TypeAlias = Callable[[Saved, str], None]


def keys_of(like: Any) -> dict[PathKey, Any]:
    """Return the keys of a live mapping by their encoded form."""
    return {encode_key(key): key for key in like} if isinstance(like, Mapping) else {}


class Rebuilder:
    """Makes values from saved subtrees. Aliases of one array become one object.

    Args:
        array_of: gives the array of a leaf.
        report: told where a class of the user's has no counterpart to come from; None makes mappings of those.
        own: which process's part of state per process is taken; None takes all, by process index.
    """

    def __init__(self, array_of: ArrayOf, *, report: Report | None, own: tuple[int, int]) -> None:
        self._array_of = array_of
        self._report = report
        self._own = own
        self._arrays: dict[TreePath, Any] = {}

    def build(self, saved: Saved, like: Any = ABSENT) -> Any:
        """Return the value of a subtree."""
        makers: Mapping[str, Callable[[Saved, Any], Any]] = {
            "value": self._value,
            "array": self._array,
            "alias": self._array,
            "view": self._view,
            "dict": self._dict,
            "namedtuple": self._namedtuple,
            "dataclass": self._dataclass,
            "stateful": self._stateful,
            "per_process": self._per_process,
        }
        kind = saved.node.kind
        if kind in SEQUENCES:
            return self._sequence(saved, like)
        maker = makers.get(kind)
        if maker is None:
            raise CorruptDataError(f"a node of kind {kind!r} is unknown", leaf=display_path(saved.path))
        return maker(saved, like)

    def _told(self, saved: Saved, message: str) -> None:
        if self._report is not None:
            self._report(saved, message)

    def _value(self, saved: Saved, like: Any) -> Any:
        data = saved.node.data
        name = enum_of(data)
        try:
            if name is None or self._report is None:
                return decode_value(data)
            return decode_value(data, like=object() if like is None else like)
        except LookupError as error:
            self._told(saved, f"the step has a member of {name}; {error}")
            return None
        except CorruptDataError as error:
            raise error.with_context(leaf=display_path(saved.path)) from None

    def _array(self, saved: Saved, like: Any) -> Any:
        source = saved.origin if saved.node.kind == "array" else alias_path(saved.node)
        if source not in self._arrays:
            self._arrays[source] = self._array_of(source, saved, like)
        return self._arrays[source]

    def _view(self, saved: Saved, like: Any) -> Any:
        base = self._array(saved, ABSENT if isinstance(like, np.ndarray) else like)
        try:
            num_bytes = base.nbytes
            window = Window.from_json(node_data(saved.node).get("window"), num_bytes=num_bytes)
            return with_dtype(open_window(base, window), node_data(saved.node))
        except CorruptDataError as error:
            raise error.with_context(leaf=display_path(saved.path)) from None

    def _children(self, saved: Saved, like: Any) -> list[tuple[Any, Any]]:
        live_keys = keys_of(like)
        pairs: dict[Any, Any] = {}
        for key, child in saved.children.items():
            name = live_keys[key] if key in live_keys else self.new_key(child, live_keys.values())
            if name in pairs:
                name = key  # a member of an Enum beside a text that looks like it; nothing is lost
            pairs[name] = self.build(child, like[name] if key in live_keys else ABSENT)
        return list(pairs.items())

    def new_key(self, saved: Saved, live_keys: Iterable[Any]) -> Any:
        """Return the key of a saved entry that the counterpart lacks; other members of an Enum tell their class."""
        key = saved.path[-1]
        if self._report is None or not isinstance(key, TaggedKey) or key.kind != "enum":
            return decode_key(key)
        text = str(decode_key(key))
        for like in live_keys:
            if isinstance(like, enum.Enum) and text.startswith(f"{type(like).__name__}."):
                try:
                    return decode_key(key, like=like)
                except LookupError:
                    continue
        self._told(saved, "its key is a member of an Enum, and the target has no key of that class to tell which")
        return key

    def _dict(self, saved: Saved, like: Any) -> Any:
        data = node_data(saved.node)
        items = self._children(saved, like)
        if "class" in data:
            return self._user_dict(saved, like, items)
        name = data.get("type")
        cls = MAPPINGS.get(name if isinstance(name, str) else None, dict)
        if cls is collections.defaultdict:
            factory = like.default_factory if isinstance(like, collections.defaultdict) else None
            factory = factory or FACTORIES.get(str(data.get("factory")))
            return collections.defaultdict(factory, items)
        made = cls(items) if cls is not collections.Counter else collections.Counter(dict(items))
        if "metadata" in data and isinstance(made, collections.OrderedDict):
            made._metadata = decode_metadata(data["metadata"])  # type: ignore[attr-defined]  # noqa: SLF001
        return made

    def _user_dict(self, saved: Saved, like: Any, items: list[tuple[Any, Any]]) -> Any:
        if isinstance(like, dict) and type(like) not in MAPPINGS.values():
            made = copy.copy(like)
            made.clear()
            made.update(items)
            return made
        self._told(saved, f"the step has a {node_data(saved.node)['class']}, for which the target has no counterpart")
        return dict(items)

    def _sequence(self, saved: Saved, like: Any) -> Any:
        is_like = isinstance(like, Sequence) and not isinstance(like, (str, bytes))
        length = len(like) if is_like else 0
        values = [
            self.build(child, like[key] if isinstance(key, int) and 0 <= key < length else ABSENT)
            for key, child in saved.children.items()
        ]
        data = node_data(saved.node)
        if len(values) != data.get("length"):
            return dict(zip(saved.children, values, strict=True))  # a part of it was selected
        if saved.node.kind == "deque":
            return collections.deque(values, maxlen=data.get("maxlen"))
        return tuple(values) if saved.node.kind == "tuple" else values

    def _fields(self, saved: Saved, like: Any) -> dict[str, Any]:
        return {str(key): self.build(child, getattr(like, str(key), ABSENT)) for key, child in saved.children.items()}

    def _namedtuple(self, saved: Saved, like: Any) -> Any:
        fields = self._fields(saved, like)
        if is_namedtuple(like) and list(type(like)._fields) == list(fields):
            return type(like)._make(fields.values())
        self._told(saved, f"the step has a {node_data(saved.node).get('class')}, and the target no such namedtuple")
        return fields

    def _dataclass(self, saved: Saved, like: Any) -> Any:
        fields = self._fields(saved, like)
        if dataclasses.is_dataclass(like) and {field.name for field in dataclasses.fields(like)} >= set(fields):
            return replace_fields(like, fields)
        self._told(saved, f"the step has a {node_data(saved.node).get('class')}, and the target no such dataclass")
        return fields

    def _stateful(self, saved: Saved, like: Any) -> Any:
        form = None if like is ABSENT else stateful_form(like)
        state = ABSENT if form is None else state_of(like, form, leaf=display_path(saved.path))
        return self.state(saved, state)

    def state(self, saved: Saved, like: Any) -> Any:
        """Return the state of a saved stateful object, as its `state_dict` had returned it."""
        data = node_data(saved.node)
        if data.get("wrapped") and "state" in saved.children:
            return self.build(saved.children["state"], like)
        items = self._children(saved, like)
        if "metadata" not in data:
            return dict(items)
        made = collections.OrderedDict(items)
        made._metadata = decode_metadata(data["metadata"])  # type: ignore[attr-defined]  # noqa: SLF001
        return made

    def _per_process(self, saved: Saved, like: Any) -> Any:
        index, count = self._own
        inner = like.value if isinstance(like, PerProcess) else ABSENT
        if node_data(saved.node).get("process_count") == count and index in saved.children:
            return self.build(saved.children[index], inner)
        return {key: self.build(child, inner) for key, child in saved.children.items()}


def replace_fields(like: Any, fields: Mapping[str, Any]) -> Any:
    """Return a copy of a dataclass instance with other fields; its `__init__` is not run again."""
    made = copy.copy(like)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def decode_metadata(data: Any) -> Any:
    """Return torch's module versions; what is malformed is left out, as they are only hints."""
    made: dict[str, Any] = collections.OrderedDict()
    for prefix, entries in data.items() if isinstance(data, dict) else ():
        if isinstance(entries, dict):
            made[prefix] = {name: decode_value(value) for name, value in entries.items()}
    return made
