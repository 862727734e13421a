"""Plain values to tagged JSON and back, exactly.

Owns which values count as plain, and their form in a manifest: what JSON has by nature stands as itself (None, bool,
str, finite floats, ints up to 2**53); everything else is an object with one entry, `{tag: payload}`. Decoding makes
only the types listed here: nothing is imported, called or evaluated by a name that a file gives. A member of an `Enum`
comes back only through a member of the same class (`like`), and as its underlying value without one.

Must not know containers, paths or tensors (those are `state`'s).
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import decimal
import enum
import fractions
import functools
import math
import pathlib
import re
import reprlib
import struct
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from safepoint.formats.errors import CorruptDataError, UnsupportedValueError
from safepoint.formats.fields import canonical_json
from safepoint.formats.manifest import JSON
from safepoint.manager.numpy_values import decode_numpy, encode_numpy

__all__ = ["decode_value", "encode_value", "enum_of", "is_plain_type", "same_value", "type_name"]

_MAX_JSON_INT = 2**53
_MAX_NESTING = 16  # tuples in sets in tuples …; each level is two of the 64 that JSON may have in a manifest
_SURROGATE = re.compile("[\ud800-\udfff]")
_BY_NATURE = (str, int, float, bool, type(None))


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


def enum_of(data: JSON) -> str | None:
    """Return the name of the class whose member this form is, or None where it is not a member of an Enum."""
    if type(data) is dict and list(data) == ["enum"] and isinstance(data["enum"], list) and data["enum"]:
        return str(data["enum"][0])
    return None


def decode_value(data: JSON, *, like: object = None) -> Any:
    """Return the value of a form that anybody may have written.

    Args:
        data: what `encode_value` returned, once.
        like: for a member of an Enum: any member of the class, or the class. Without it the underlying value.

    Raises:
        CorruptDataError: it is no form of a value.
        LookupError: `like`'s class has no such member.
    """
    if enum_of(data) is not None:
        return _decode_enum(data["enum"], like)
    try:
        return _decode(data)
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, binascii.Error) as error:
        if isinstance(error, CorruptDataError):
            raise
        raise CorruptDataError(f"{reprlib.repr(data)} is no value: {error}") from error


# ---------------------------------------------------------------------------------------------------------- encoding


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
    if isinstance(value, pathlib.PurePath) and type(value) in _PATH_TYPES.values():
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

_PATH_TYPES: dict[str, type[pathlib.PurePath]] = {
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "PosixPath": pathlib.PosixPath,
    "WindowsPath": pathlib.WindowsPath,
}


# ---------------------------------------------------------------------------------------------------------- decoding


def _decode(data: JSON) -> Any:
    if type(data) in _BY_NATURE:
        return data
    if type(data) is not dict or len(data) != 1:
        raise ValueError("a tagged value is an object with one entry")
    ((tag, payload),) = data.items()
    decoder = _DECODERS.get(tag)
    if decoder is None:
        raise ValueError(f"the tag {tag!r} is unknown")
    return decoder(payload)


def _decode_enum(payload: list[Any], like: object) -> Any:
    if len(payload) not in (2, 3):  # class, name, and the value where it is plain
        raise CorruptDataError(f"{reprlib.repr(payload)} is no member of an Enum")
    _, name, *underlying = payload
    if like is None:
        return decode_value(underlying[0]) if underlying else name
    cls = like if isinstance(like, type) else type(like)
    if not issubclass(cls, enum.Enum):
        raise LookupError(f"{type_name(cls)} is no Enum")  # documented
    member = cls.__members__.get(name) if isinstance(name, str) else None
    if member is None and issubclass(cls, enum.Flag) and underlying and type(underlying[0]) is int:
        member = cls(underlying[0])  # a combination of flags has no name of its own
    if member is None:
        raise LookupError(f"{type_name(cls)} has no member {name}")
    if underlying and not _is_its_value(member, underlying[0]):
        raise LookupError(f"{member} is {member.value!r} now, and was another value when it was saved")
    return member


def _is_its_value(member: enum.Enum, data: JSON) -> bool:
    try:
        return same_value(encode_value(member.value), data)
    except UnsupportedValueError:
        return False


def _hex_int(text: str) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", text):
        raise ValueError("not a hexadecimal integer")
    return int(text, 16)


def _decode_int(data: JSON) -> int:
    value = _decode(data)
    if type(value) is not int:
        raise ValueError("not an integer")
    return value


def _decode_str(data: JSON) -> str:
    value = _decode(data)
    if type(value) is not str:
        raise ValueError("not a text")
    return value


def _decode_float(text: str) -> float:
    (value,) = struct.unpack(">d", bytes.fromhex(text))
    return float(value)


def _float_part(data: JSON) -> float:
    value = _decode(data)
    if type(value) is not float:
        raise ValueError("not a float")
    return value


def _decode_complex(payload: list[JSON]) -> complex:
    real, imag = payload
    return complex(_float_part(real), _float_part(imag))


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _timedelta(payload: list[int]) -> dt.timedelta:
    days, seconds, microseconds = payload
    return dt.timedelta(days=days, seconds=seconds, microseconds=microseconds)


def _zone(payload: list[Any] | None) -> dt.timezone | None:
    if payload is None:
        return None
    offset, *name = payload
    if not name and not any(offset):
        return dt.UTC
    return dt.timezone(_timedelta(offset), *map(_decode_str, name))


def _datetime(payload: list[Any]) -> dt.datetime:
    naive, fold, zone = payload
    return dt.datetime.fromisoformat(naive).replace(fold=fold, tzinfo=_zone(zone))


def _time(payload: list[Any]) -> dt.time:
    naive, fold, zone = payload
    return dt.time.fromisoformat(naive).replace(fold=fold, tzinfo=_zone(zone))


def _path(payload: list[Any]) -> pathlib.PurePath:
    name, text = payload
    cls = _PATH_TYPES[name]
    if issubclass(cls, pathlib.Path) and not isinstance(pathlib.Path(), cls):
        cls = _PATH_TYPES[f"Pure{name}"]  # a path of another system can be looked at, not opened
    return cls(_decode_str(text))


@functools.cache
def _torch_constants(kind: type) -> dict[str, Any]:
    return {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, kind)}


def _torch_constant(kind: type) -> Callable[[str], Any]:
    return lambda name: _torch_constants(kind)[name]


def _decode_range(payload: list[JSON]) -> range:
    start, stop, step = map(_decode_int, payload)
    return range(start, stop, step)


def _decode_slice(payload: list[JSON]) -> slice:
    start, stop, step = map(_decode, payload)
    return slice(start, stop, step)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": _hex_int,
    "float": _decode_float,
    "str": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "complex": _decode_complex,
    "bytes": _bytes,
    "bytearray": lambda text: bytearray(_bytes(text)),
    "datetime": _datetime,
    "date": dt.date.fromisoformat,
    "time": _time,
    "timedelta": _timedelta,
    "timezone": _zone,
    "decimal": decimal.Decimal,
    "fraction": lambda payload: fractions.Fraction(*map(_hex_int, payload)),
    "uuid": lambda text: uuid.UUID(hex=text),
    "range": _decode_range,
    "ellipsis": lambda _: ...,
    "torch.dtype": _torch_constant(torch.dtype),
    "torch.device": torch.device,
    "torch.Size": lambda payload: torch.Size([_decode_int(n) for n in payload]),
    "torch.layout": _torch_constant(torch.layout),
    "torch.memory_format": _torch_constant(torch.memory_format),
    "set": lambda payload: {_decode(item) for item in payload},
    "frozenset": lambda payload: frozenset(_decode(item) for item in payload),
    "tuple": lambda payload: tuple(_decode(item) for item in payload),
    "slice": _decode_slice,
    "path": _path,
    **{tag: functools.partial(decode_numpy, tag) for tag in ("numpy", "numpy.str", "numpy.bytes")},
}
