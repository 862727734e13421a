"""Typed reading of untrusted JSON, and the one canonical way of writing it.

Whatever the bytes are, reading ends in a value of the type asked for or in `CorruptDataError`, within time and memory
linear in the input. Knows nothing of what the fields mean.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import sys
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from safepoint.formats.errors import CorruptDataError, UnsupportedValueError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "INT64_MAX",
    "MAX_DEPTH",
    "Fields",
    "canonical_json",
    "check_id",
    "check_json",
    "check_relative_path",
    "known_json",
    "parse_json",
]

MAX_DEPTH = 64
"""How deep arrays and objects may be nested, in what is written and in what is read."""

INT64_MAX = 2**63 - 1
_MAX_INT_DIGITS = 4300  # what Python itself converts by default; conversion takes quadratic time beyond
_MAX_PATH_CHARS = 4096

_CONTAINERS = (dict, list, tuple)

_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DRIVE = re.compile(r"[A-Za-z]:")
_STRING = re.compile(rb'"[^"]*"')
_NO_MARKS = bytes(code for code in range(256) if chr(code) not in '[]{}"')
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_ChoiceT = TypeVar("_ChoiceT", bound=str)


def canonical_json(value: Any) -> bytes:
    """Return the one JSON text of `value`: keys sorted, no blanks, ASCII only.

    Equal values give equal bytes. What is written here, `parse_json` reads back.

    Raises:
        UnsupportedValueError: NaN or infinity, keys that are not strings, nesting beyond `MAX_DEPTH`, cycles, and
            anything that is not JSON.
    """
    text = known_json(value)
    check_json(value)
    return text.encode("ascii")


def known_json(value: Any) -> str:
    """Return what `canonical_json` does, as text, for a large value made by ourselves.

    Whatever in it comes from elsewhere must have passed `check_json`.

    Raises:
        UnsupportedValueError: NaN or infinity, or anything that is not JSON.
    """
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsupportedValueError(f"this cannot be written as JSON: {error}") from error


def check_json(value: Any, *, max_depth: int = MAX_DEPTH) -> None:
    """Check what `json.dumps` lets pass.

    Raises:
        UnsupportedValueError: keys that are not strings, or nesting beyond `max_depth`.
    """
    for depth, level in enumerate(_levels(value), start=1):
        if depth > max_depth:
            raise UnsupportedValueError(f"this is nested deeper than {MAX_DEPTH} levels")
        for container in level:
            if isinstance(container, dict) and not all(isinstance(key, str) for key in container):
                raise UnsupportedValueError("a JSON object has only strings as keys")


def parse_json(data: bytes, *, what: str, path: str, max_depth: int = MAX_DEPTH) -> Any:
    """Return the value of a UTF-8 JSON text that anybody may have written.

    Args:
        data: the text.
        what: what it should be ("the manifest"), for the message.
        path: where it was read, for the error.
        max_depth: how deep arrays and objects may be nested.

    Raises:
        CorruptDataError: not UTF-8 or not JSON; an object with a key twice; NaN, infinity or a number too large for a
            double; an integer of more than 4300 digits; nested too deep.
    """
    try:
        decoder = _DECODER if sys.get_int_max_str_digits() == _MAX_INT_DIGITS else _CAREFUL_DECODER
        value = decoder.decode(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{what} is not valid JSON: {error}", path=path) from error
    if data.count(b"[") + data.count(b"{") > max_depth and _is_deeper(data, max_depth):
        raise CorruptDataError(f"{what} is nested deeper than {max_depth} levels", path=path)
    return value


def _is_deeper(text: bytes, max_depth: int) -> bool:
    """Say whether a valid JSON text is nested deeper than this, without a look at each of its values."""
    if b"\\" in text:
        # In this order: then every quote left begins or ends a string.
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = text.translate(_AS_LISTS, _NO_MARKS).replace(b'""', b"")
    if b'"' in marks:  # two that follow each other tell nothing of the rest, so what is left are strings with brackets
        marks = _STRING.sub(b"", marks)
    for _ in range(max_depth):
        if not marks:
            return False
        marks = marks.replace(b"[]", b"")  # the innermost level
    return bool(marks)


def _levels(value: Any) -> Iterable[list[Any]]:
    """Yield the containers of each nesting level, outermost first, without recursion."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    while level:
        yield level
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, _CONTAINERS)
        ]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("an object has a key twice")
    return values


def _parse_int(text: str) -> int:
    if len(text) > _MAX_INT_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text)


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_parse_float, parse_constant=_refuse_constant)
_CAREFUL_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_refuse_constant
)
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


class Fields:
    """The fields of one JSON object; each is returned with the type asked for, or refused.

    Fields that nobody asks for are let be: a later release may add some without a new layout version.

    Attributes:
        what: what the object is, for messages.
        path: where it was read.
    """

    __slots__ = ("_values", "path", "what")

    def __init__(self, value: object, *, what: str, path: str) -> None:
        self.what = what
        self.path = path
        if not isinstance(value, dict):
            raise self.error(f"should be an object, not {reprlib.repr(value)}")
        self._values: dict[str, Any] = value

    def error(self, message: str) -> CorruptDataError:
        """Return the error that says `message` about this object."""
        return CorruptDataError(f"{self.what} {message}", path=self.path)

    def value(self, name: str) -> Any:
        """Return a field of any type."""
        try:
            return self._values[name]
        except KeyError:
            raise self._missing(name) from None

    def text(self, name: str) -> str:
        """Return a string."""
        value = self._values.get(name)
        if type(value) is not str:
            raise self._wrong(name, "a string", value)
        return value

    def choice(self, name: str, options: Sequence[_ChoiceT]) -> _ChoiceT:
        """Return one of a few strings."""
        value = self._values.get(name)
        if type(value) is str:
            for option in options:
                if value == option:
                    return option
        raise self._wrong(name, f"one of {', '.join(options)}", value)

    def identifier(self, name: str) -> str:
        """Return a string that is safe inside a file name (see `check_id`)."""
        text = self.text(name)
        if _IDENTIFIER.fullmatch(text) is None:
            check_id(text, what=f"field {name!r} of {self.what}", path=self.path)  # refuses it
        return text

    def integer(self, name: str, *, minimum: int = 0, maximum: int = INT64_MAX) -> int:
        """Return an integer in `[minimum, maximum]`; true and false are none."""
        value = self._values.get(name)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._wrong(name, f"an integer from {minimum} to {maximum}", value)
        return value

    def integers(self, name: str, *, max_items: int) -> tuple[int, ...]:
        """Return a short list of integers from 0 to 2**63 - 1."""
        return self.checked_integers(self.value(name), name=name, max_items=max_items)

    def checked_integers(self, value: object, *, name: str, max_items: int) -> tuple[int, ...]:
        """Return `value`, a part of the field `name`, as a short list of integers."""
        if type(value) is not list or len(value) > max_items:
            raise self._wrong(name, f"a list of at most {max_items} integers", value)
        for item in value:
            if type(item) is not int or not 0 <= item <= INT64_MAX:
                raise self._wrong(name, f"integers from 0 to {INT64_MAX}", item)
        return tuple(value)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self.value(name)
        if type(value) is not bool:
            raise self._wrong(name, "true or false", value)
        return value

    def items(self, name: str) -> list[Any]:
        """Return a list of anything."""
        value = self.value(name)
        if type(value) is not list:
            raise self._wrong(name, "a list", value)
        return value

    def table(self, name: str) -> dict[str, Any]:
        """Return an object of anything."""
        value = self.value(name)
        if type(value) is not dict:
            raise self._wrong(name, "an object", value)
        return value

    def has(self, name: str) -> bool:
        """Say whether the field is there."""
        return name in self._values

    def is_null(self, name: str) -> bool:
        """Say whether the field is there and null."""
        return self.value(name) is None

    def _missing(self, name: str) -> CorruptDataError:
        return self.error(f"has no field {name!r}")

    def _wrong(self, name: str, expected: str, value: object) -> CorruptDataError:
        if name not in self._values:
            return self._missing(name)
        return self.error(f"has {name!r} = {reprlib.repr(value)} where {expected} should be")


def check_id(text: str, *, what: str, path: str | None = None) -> str:
    """Return `text` if it is an identifier: 1 to 128 of `A-Z a-z 0-9 . _ -`, the first a letter or digit.

    Raises:
        CorruptDataError: it is not.
    """
    if _IDENTIFIER.fullmatch(text) is None:
        raise CorruptDataError(f"{what} is {reprlib.repr(text)}, which is no identifier", path=path)
    return text


def check_relative_path(path: str, *, what: str) -> str:
    """Return `path` if it is a "/"-separated path that stays below the folder that it is relative to.

    Raises:
        CorruptDataError: absolute, with a drive, a backslash or a control character, with a part that is empty, "." or
            "..", too long, or no Unicode text.
    """
    problem = _path_problem(path)
    if problem is not None:
        raise CorruptDataError(f"{what} has a path that {problem}: {reprlib.repr(path)}")
    return path


def _path_problem(path: str) -> str | None:
    parts = path.split("/")
    checks = (
        (path.startswith("/"), "is absolute"),
        (_DRIVE.match(path) is not None, "names a drive"),
        ("\\" in path, "has a backslash"),
        (_CONTROL.search(path) is not None, "has a control character"),
        ("" in parts, "has an empty part"),
        ("." in parts or ".." in parts, "leaves its folder"),
        (len(path) > _MAX_PATH_CHARS, "is too long"),
        (not _is_unicode(path), "is no Unicode text"),
    )
    return next((problem for found, problem in checks if found), None)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
