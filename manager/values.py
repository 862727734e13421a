"""Plain values to tagged JSON and back, exactly.

Owns which values count as plain, and their form in a manifest: what JSON has by nature stands as itself (None, bool,
str, finite floats, ints up to 2**53); everything else is an object with one entry, `{tag: payload}`. Decoding makes
only the types listed here: nothing is imported, called or evaluated by a name that a file gives. A member of an `Enum`
comes back only through a member of the same class (`like`), and as its underlying value without one.

Must not know containers, paths or tensors (those are `state`'s).
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
import enum
import fractions
import functools
import pathlib
import re
import reprlib
import struct
import uuid
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.errors import CorruptDataError, UnsupportedValueError
from safepoint.manager.numpy_values import decode_numpy
from safepoint.manager.value_encoding import PATH_TYPES, encode_value, is_plain_type, same_value, type_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.manifest import JSON

__all__ = ["decode_value", "encode_value", "enum_of", "is_plain_type", "same_value", "type_name"]

_BY_NATURE = (str, int, float, bool, type(None))


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
    except (ValueError, TypeError, ArithmeticError, LookupError, RuntimeError, struct.error) as error:
        if isinstance(error, CorruptDataError):
            raise
        raise CorruptDataError(f"{reprlib.repr(data)} is no value: {error}") from error


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
        member = _combination(cls, underlying[0])  # it has no name of its own
    if member is None:
        raise LookupError(f"{type_name(cls)} has no member {name}")
    if underlying and not _is_its_value(member, underlying[0]):
        raise LookupError(f"{member} is {member.value!r} now, and was another value when it was saved")
    return member


def _combination(cls: type[enum.Flag], value: int) -> enum.Flag | None:
    try:
        return cls(value)
    except ValueError:
        return None


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
    cls = PATH_TYPES[name]
    if issubclass(cls, pathlib.Path) and not isinstance(pathlib.Path(), cls):
        cls = PATH_TYPES[f"Pure{name}"]  # a path of another system can be looked at, not opened
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
