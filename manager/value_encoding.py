"""Plain values to tagged JSON; the half of `values` that encodes, whose module says what the form is.

Must not know containers, paths or tensors.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import enum
import fractions
import math
import pathlib
import re
import struct
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.fields import canonical_json
from safepoint.formats.manifest import JSON
from safepoint.manager.numpy_values import encode_numpy

__all__ = ["PATH_TYPES", "encode_value", "is_plain_type", "same_value", "type_name"]

_MAX_JSON_INT = 2**53
_MAX_NESTING = 16  # tuples in sets in tuples …; each level is two of the 64 that JSON may have in a manifest
_SURROGATE = re.compile("[\ud800-\udfff]")


def encode_value(value: object) -> JSON:
    """Return the JSON form of a plain value; equal forms mean equal values of one type.

    Raises:
        UnsupportedValueError: it is not plain.
    """
    return _encode(value, 0)


def is_plain_type(kind: type) -> bool:
    """Say whether values of exactly this type, or by being an Enum or numpy scalar, are plain."""
    return kind in _ENCODERS or issubclass(kind, (enum.Enum, np.generic, pathlib.PurePath))


def same_value(one: JSON, other: JSON) -> bool:
    """Say whether two forms are the same value; unlike `==` it tells 1 from True and 1.0, and -0.0 from 0.0."""
    if type(one) in (str, type(None)) or type(other) in (str, type(None)):
        return type(one) is type(other) and bool(one == other)
    return canonical_json(one) == canonical_json(other)


def type_name(kind: type) -> str:
    """Return a type's full name, for messages and for people; nothing is ever made from it."""
    module = getattr(kind, "__module__", "")
    name = getattr(kind, "__qualname__", repr(kind))
    return name if module in ("builtins", "") else f"{module}.{name}"


def _encode(value: Any, depth: int) -> JSON:
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    nested = _NESTED.get(type(value))
    if nested is not None:
        if depth >= _MAX_NESTING:
            raise UnsupportedValueError(f"a {type(value).__name__} is nested deeper than {_MAX_NESTING} levels")
        return nested(value, depth + 1)
    if isinstance(value, enum.Enum):
        return _encode_enum(value, depth)
    if isinstance(value, np.generic):
        return encode_numpy(value)
    if isinstance(value, pathlib.PurePath) and type(value) in PATH_TYPES.values():
        return {"path": [type(value).__name__, _encode_str(str(value))]}
    raise UnsupportedValueError(f"a value of type {type_name(type(value))} cannot be kept exactly")


def _encode_int(value: int) -> JSON:
    return value if -_MAX_JSON_INT <= value <= _MAX_JSON_INT else {"int": hex(value)}


def _encode_float(value: float) -> JSON:
    # A NaN has a sign and a payload; only its bits are exact.
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _encode_str(value: str) -> JSON:
    # Two lone surrogates side by side would come back from JSON as one character.
    return {"str": value.encode("utf-8", "surrogatepass").hex()} if _SURROGATE.search(value) else value


def _encode_timedelta(value: dt.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _encode_zone(zone: dt.tzinfo | None) -> JSON:
    if zone is None:
        return None
    if type(zone) is not dt.timezone:
        raise UnsupportedValueError(
            f"the time zone {zone} ({type_name(type(zone))}) cannot be kept exactly",
            hint="Convert it: `value.astimezone(datetime.UTC)`, and keep the zone's name beside it.",
        )
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]  # the only way to tell a given name
    return [_encode_timedelta(offset), *map(_encode_str, name)]


def _encode_datetime(value: dt.datetime) -> JSON:
    naive = value.replace(tzinfo=None, fold=0).isoformat()
    return {"datetime": [naive, value.fold, _encode_zone(value.tzinfo)]}


def _encode_time(value: dt.time) -> JSON:
    naive = value.replace(tzinfo=None, fold=0).isoformat()
    return {"time": [naive, value.fold, _encode_zone(value.tzinfo)]}


def _encode_set(tag: str) -> Callable[[Any, int], JSON]:
    def encode(value: Any, depth: int) -> JSON:
        items = [_encode_member(item, depth, tag) for item in value]
        return {tag: sorted(items, key=canonical_json)}  # a set has no order; the bytes of a manifest do

    return encode


def _encode_member(item: object, depth: int, owner: str) -> JSON:
    if isinstance(item, enum.Enum):
        raise UnsupportedValueError(
            f"a {owner} of members of {type_name(type(item))} could not be made again without that class",
            hint="Keep their names or values: `{member.name for member in …}`.",
        )
    return _encode(item, depth)


def _encode_slice(value: slice, depth: int) -> JSON:
    return {"slice": [_encode_member(part, depth, "slice") for part in (value.start, value.stop, value.step)]}


def _encode_tuple(value: tuple[Any, ...], depth: int) -> JSON:
    return {"tuple": [_encode_member(item, depth, "tuple") for item in value]}


def _encode_enum(value: enum.Enum, depth: int) -> JSON:
    try:
        underlying = [_encode(value.value, depth + 1)] if depth < _MAX_NESTING else []
    except UnsupportedValueError:
        underlying = []  # a function, an object: the name alone tells the member
    return {"enum": [type_name(type(value)), value.name, *underlying]}


_Encoder = Callable[[Any], JSON]

_ENCODERS: dict[type, _Encoder] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    complex: lambda value: {"complex": [_encode_float(value.real), _encode_float(value.imag)]},
    bytes: lambda value: {"bytes": base64.b64encode(value).decode()},
    bytearray: lambda value: {"bytearray": base64.b64encode(value).decode()},
    dt.datetime: _encode_datetime,
    dt.date: lambda value: {"date": value.isoformat()},
    dt.time: _encode_time,
    dt.timedelta: lambda value: {"timedelta": _encode_timedelta(value)},
    dt.timezone: lambda value: {"timezone": _encode_zone(value)},
    decimal.Decimal: lambda value: {"decimal": str(value)},
    fractions.Fraction: lambda value: {"fraction": [hex(value.numerator), hex(value.denominator)]},
    uuid.UUID: lambda value: {"uuid": value.hex},
    range: lambda value: {"range": [_encode_int(part) for part in (value.start, value.stop, value.step)]},
    type(Ellipsis): lambda _: {"ellipsis": None},
    torch.dtype: lambda value: {"torch.dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"torch.device": str(value)},
    torch.Size: lambda value: {"torch.Size": list(value)},
    torch.layout: lambda value: {"torch.layout": str(value).removeprefix("torch.")},
    torch.memory_format: lambda value: {"torch.memory_format": str(value).removeprefix("torch.")},
}

_NESTED: dict[type, Callable[[Any, int], JSON]] = {
    set: _encode_set("set"),
    frozenset: _encode_set("frozenset"),
    tuple: _encode_tuple,  # in sets and as keys; as a value of its own it is a container, which is `state`'s
    slice: _encode_slice,
}

PATH_TYPES: dict[str, type[pathlib.PurePath]] = {
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "PosixPath": pathlib.PosixPath,
    "WindowsPath": pathlib.WindowsPath,
}
