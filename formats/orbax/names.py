"""What Orbax calls the parts of an item, and the names with which it would lose or mix up something.

Owns the walk over an item's value. An array is a parameter, called by its keys joined by dots, which is its directory
too; numbers are arrays without dimensions, and texts, None and empty containers stand in Orbax's own metadata. What
Orbax has no type for comes as None there; our manifest keeps it. Knows no files.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from safepoint.formats.base import LeafRef
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.naming import item_name

__all__ = ["Entry", "check_item", "item_entries", "item_json"]

Kind = Literal["array", "scalar", "string", "None", "Dict", "List", "Tuple"]

METRICS_ITEM = "metrics"
_RESERVED_ITEMS = {METRICS_ITEM, "descriptor", "commit_success.txt", "_checkpoint_metadata", "orbax.checkpoint"}
_RESERVED_NAMES = {
    "_METADATA",
    "_sharding",
    "_strings.json",
    "array_metadatas",
    "checkpoint",
    "commit_success.txt",
    "manifest.ocdbt",
    "zarr.json",
}
_MAX_NAME_BYTES = 255  # of a directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A leaf of an item, as Orbax sees it.

    Attributes:
        keys: each with whether it is the index of a sequence.
        kind: what Orbax makes of it.
        value: a LeafRef, a number, a text, or None.
    """

    keys: tuple[tuple[str, bool], ...]
    kind: Kind
    value: Any = None

    @property
    def name(self) -> str:
        """Return the name of the parameter: "" where the item is one array itself."""
        return ".".join(key for key, _ in self.keys)


def check_item(item: str) -> str:
    """Return the directory of an item, which is Orbax's name for it.

    Raises:
        UnsupportedValueError: Orbax keeps that name for itself.
    """
    name = item_name(item)
    if name.casefold() in _RESERVED_ITEMS:
        raise UnsupportedValueError(
            f"an item called {item!r} cannot be written in the format orbax, which has a file of that name",
            leaf=item,
            hint="Rename the item.",
        )
    return name


def item_entries(item: str, value: Any) -> list[Entry]:
    """Return the leaves of an item in order.

    Raises:
        UnsupportedValueError: two leaves have one name in Orbax, or a name cannot be a directory; names them.
    """
    entries = list(_walk((), value))
    seen: dict[str, Entry] = {}
    for entry in entries:
        name = entry.name
        other = seen.setdefault(name, entry)
        where = f"{item}.{name}" if name else item
        if other is not entry:
            raise UnsupportedValueError(
                f"Orbax has one name, {name!r}, for {_spell(entry)} and {_spell(other)}, and would mix them up",
                leaf=where,
                hint='Rename one of the keys, or use the format "safetensors".',
            )
        problem = _problem(entry)
        if problem is not None:
            raise UnsupportedValueError(
                f"the key {_spell(entry)} cannot be written in the format orbax: {problem}",
                leaf=where,
                hint='Rename the key, or use the format "safetensors".',
            )
    return entries


def item_json(value: Any) -> Any:
    """Return an item without arrays as JSON; what JSON has no type for as its text."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): item_json(child) for key, child in value.items()}
    if isinstance(value, list | tuple | deque):
        return [item_json(child) for child in value]
    return str(value)


def _walk(keys: tuple[tuple[str, bool], ...], value: Any) -> Iterator[Entry]:
    if isinstance(value, LeafRef):
        yield Entry(keys=keys, kind="array", value=value)
    elif isinstance(value, Mapping):
        if not value and keys:
            yield Entry(keys=keys, kind="Dict")
        for key, child in value.items():
            yield from _walk((*keys, (str(key), False)), child)
    elif isinstance(value, list | tuple | deque):
        if not value and keys:
            yield Entry(keys=keys, kind="Tuple" if isinstance(value, tuple) else "List")
        for index, child in enumerate(value):
            yield from _walk((*keys, (str(index), True)), child)
    elif isinstance(value, str):
        yield Entry(keys=keys, kind="string", value=value)
    elif type(value) in (bool, float) or (type(value) is int and -(1 << 63) <= value < 1 << 63):
        yield Entry(keys=keys, kind="scalar", value=value)
    else:
        yield Entry(keys=keys, kind="None")


def _problem(entry: Entry) -> str | None:
    for key, _ in entry.keys:
        if not key:
            return "it is empty"
        if "/" in key or "\0" in key:
            return "it has a slash or a NUL in it"
        if not key.isascii() and any("\ud800" <= char <= "\udfff" for char in key):
            return "it is no Unicode text"
    name = entry.name
    if name in (".", "..") or name in _RESERVED_NAMES or name.startswith("ocdbt.process_"):
        return "Orbax keeps that name for itself"
    if len(name.encode()) > _MAX_NAME_BYTES:
        return f"a file system takes at most {_MAX_NAME_BYTES} bytes, and Orbax joins the keys to one name"
    return None


def _spell(entry: Entry) -> str:
    return "".join(f"[{key}]" if is_index else f"[{key!r}]" for key, is_index in entry.keys) or "the item"
