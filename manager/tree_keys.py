"""Keys of mappings to steps of a tree path and back, injectively.

A str or a small int stands as itself; every other plain hashable becomes a `TaggedKey` of its tag and its payload as
canonical JSON, so that 1, True, 1.0 and "1" stay four keys. Must not know containers or nodes.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from safepoint.formats.errors import CorruptDataError, UnsupportedValueError
from safepoint.formats.fields import canonical_json, parse_json
from safepoint.formats.manifest import JSON, PathKey, TaggedKey
from safepoint.manager.values import decode_value, encode_value, type_name

if TYPE_CHECKING:
    import enum

__all__ = ["decode_key", "encode_key", "key_from_json", "key_to_json"]

_MAX_PLAIN_INT = 2**53
_SURROGATE = re.compile("[\ud800-\udfff]")
_BY_NATURE = {bool: "bool", float: "float", type(None): "none"}


def encode_key(key: object) -> PathKey:
    """Return the step of a tree path that stands for a key of a mapping.

    Raises:
        UnsupportedValueError: the key is not plain, so it could not be made again.
    """
    if type(key) is str:
        return key if key.isascii() or not _SURROGATE.search(key) else _tagged(encode_value(key))
    if type(key) is int and -_MAX_PLAIN_INT <= key <= _MAX_PLAIN_INT:
        return key
    try:
        data = encode_value(key)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(
            f"a key of type {type_name(type(key))} cannot be kept exactly: {error.message}",
            hint=error.hint or "Use str, int or other plain values as keys.",
        ) from error
    natural = _BY_NATURE.get(type(key))
    return _tagged(data) if natural is None or isinstance(data, dict) else TaggedKey(natural, json.dumps(data))


def _tagged(data: JSON) -> TaggedKey:
    ((tag, payload),) = data.items()
    return TaggedKey(tag, canonical_json(payload).decode())


def decode_key(key: PathKey, *, like: enum.Enum | None = None) -> object:
    """Return the key of a mapping that a step of a path stands for.

    A member of an Enum comes as the text "Color.RED", since its class is not known here: its value might be another
    key of the same mapping. Where the target has the key, take the target's.

    Raises:
        CorruptDataError: it stands for no key.
    """
    if not isinstance(key, TaggedKey):
        return key
    payload = parse_json(key.text.encode("utf-8", "surrogatepass"), what="a key", path="manifest.json")
    if key.kind == "enum" and like is None:
        return _enum_text(payload)
    natural = key.kind in _BY_NATURE.values() and not isinstance(payload, str)  # a NaN's bits are text
    value = decode_value(payload if natural else {key.kind: payload}, like=like)
    try:
        hash(value)
    except TypeError as error:
        raise CorruptDataError(f"{key} stands for a key that cannot be hashed") from error
    return value


def _enum_text(payload: JSON) -> str:
    if not isinstance(payload, list) or len(payload) < 2 or not all(isinstance(part, str) for part in payload[:2]):  # noqa: PLR2004
        raise CorruptDataError(f"{payload!r} is no member of an Enum")
    cls, name = payload[:2]
    return f"{cls.rpartition('.')[2]}.{name}"


def key_to_json(key: PathKey) -> JSON:
    """Return the key as JSON."""
    return {key.kind: key.text} if isinstance(key, TaggedKey) else key


def key_from_json(data: JSON) -> PathKey:
    """Return the key that `key_to_json` described.

    Raises:
        CorruptDataError: it is none.
    """
    if type(data) is str or type(data) is int:
        return data
    if type(data) is dict and len(data) == 1:
        ((kind, text),) = data.items()
        if type(text) is str:
            return TaggedKey(kind, text)
    raise CorruptDataError(f"{data!r} is no key of a tree")
