from __future__ import annotations

import collections
import datetime as dt
import enum
import io
import math
import pathlib
import struct
import uuid
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from safepoint.formats.errors import CorruptDataError, UnsupportedValueError
from safepoint.formats.fields import canonical_json, parse_json
from safepoint.formats.manifest import TaggedKey
from safepoint.manager.tree_keys import decode_key, encode_key, key_from_json, key_to_json
from safepoint.manager.values import decode_value, encode_value, same_value


class Color(enum.Enum):
    RED = 1
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


class Options(enum.Flag):
    A = enum.auto()
    B = enum.auto()


class Strategy(enum.Enum):
    RUN = (len,)  # a value that is not plain


def there_and_back(value: object, like: object = None) -> object:
    data = parse_json(canonical_json(encode_value(value)), what="value", path="test")
    return decode_value(data, like=like)


VALUES = [
    None,
    True,
    False,
    0,
    -1,
    2**53,
    2**53 + 1,
    -(2**63),
    2**64,
    10**5000,
    -(10**5000),
    0.0,
    -0.0,
    0.1,
    5e-324,
    1.7976931348623157e308,
    math.inf,
    -math.inf,
    complex(-0.0, math.inf),
    1j,
    "",
    "text",
    "a.b/c\x00\n",
    "ünïcode 实验",
    "\ud800",
    "\ud83d\ude00",  # two surrogates, which JSON would join
    "😀",
    b"",
    b"\x00\xff",
    bytearray(b"ab"),
    dt.datetime(2024, 2, 29, 12, 30, 1, 5),  # noqa: DTZ001  # without a zone it stays without
    dt.datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=dt.UTC),
    dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, seconds=7), "name")),
    dt.date(9999, 12, 31),
    dt.time(23, 59, 59, 999999, fold=1),
    dt.time(1, tzinfo=dt.timezone(dt.timedelta(hours=1))),
    dt.timedelta.min,
    dt.timedelta(days=-1, microseconds=3),
    dt.UTC,
    pathlib.PurePosixPath("/a/../b"),
    pathlib.PureWindowsPath("c:\\x"),
    pathlib.Path("实验 β"),
    torch.float32,
    torch.bfloat16,
    torch.device("cpu"),
    torch.device("cuda", 3),
    torch.device("meta"),
    torch.Size([]),
    torch.Size([2, 3]),
    torch.strided,
    torch.channels_last,
    range(0),
    range(2**70, 0, -3),
    slice(None, -1, 2),
    ...,
    Decimal("-0.10"),
    Decimal("sNaN12"),
    Decimal("1E+999999"),
    Fraction(-1, 10**400),
    uuid.UUID(int=5),
    set(),
    {1, "1", 1.5, None, (1, (2, frozenset({b"x"})))},
    frozenset({2**80, -0.5}),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_plain_value_comes_back_exactly(value: object) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    if isinstance(value, Decimal):
        assert str(back) == str(value)
    elif isinstance(value, complex):
        assert struct.pack("dd", back.real, back.imag) == struct.pack("dd", value.real, value.imag)
    else:
        assert back == value
    if isinstance(value, float):
        assert math.copysign(1, back) == math.copysign(1, value)
    if isinstance(value, (dt.datetime, dt.time)):
        assert (back.fold, back.tzname()) == (value.fold, value.tzname())


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000000", "7ff8000000000123"])
def test_a_nan_keeps_its_sign_and_payload(bits: str) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert struct.pack(">d", there_and_back(value)).hex() == bits


SCALARS = [
    *(np.dtype(code).type(1) for code in "?bBhHiIlLqQefdgFDG"),
    np.float32("nan"),
    np.float64(-0.0),
    np.datetime64("2024-01-01T00:00:00.123", "ms"),
    np.datetime64("NaT"),
    np.datetime64("2024", "25s"),
    np.timedelta64(-3, "D"),
    np.timedelta64(7),
    np.str_(""),
    np.str_("a\x00"),
    np.bytes_(b""),
    np.bytes_(b"a\x00"),
    np.void(b"\x00\x01\x00"),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: str(value.dtype))
def test_a_numpy_scalar_comes_back_with_its_dtype_and_bits(value: np.generic) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back.dtype == value.dtype
    assert back.tobytes() == value.tobytes()
    if isinstance(value, (str, bytes)):
        assert back == value


def test_a_member_of_an_enum_comes_back_through_its_class_and_never_by_name() -> None:
    for member in (Color.RED, Color.BLUE, Level.LOW, Options.A, Options.A | Options.B, Options(0), Strategy.RUN):
        assert there_and_back(member, like=type(member)) is member
    assert there_and_back(Color.BLUE, like=Color.RED) is Color.BLUE
    assert there_and_back(Color.BLUE) == "blue"
    assert there_and_back(Level.LOW) == 1
    assert there_and_back(Strategy.RUN) == "RUN"


def test_a_member_that_has_another_value_now_is_refused() -> None:
    class Color(enum.Enum):
        RED = 2

    with pytest.raises(LookupError, match="another value"):
        there_and_back(globals()["Color"].RED, like=Color)
    with pytest.raises(LookupError, match="no member BLUE"):
        there_and_back(globals()["Color"].BLUE, like=Color)


@pytest.mark.parametrize(
    "value",
    [
        lambda: 0,
        object(),
        int,
        [1],
        {"a": 1},
        io.StringIO(),
        {Color.RED},
        np.array([(1, object())], dtype="i4,O")[0],
        np.rec.array([(1, 2.0)], dtype="i4,f8")[0],
        type("Sub", (int,), {})(3),
        type("Sub", (str,), {})("x"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(UnsupportedValueError):
        encode_value(value)


def test_a_time_zone_that_is_code_is_refused_with_a_way_out() -> None:
    class Zone(dt.tzinfo):
        pass

    with pytest.raises(UnsupportedValueError, match="astimezone"):
        encode_value(dt.datetime(2024, 1, 1, tzinfo=Zone()))


def test_nesting_is_bounded() -> None:
    value: object = frozenset()
    for _ in range(40):
        value = frozenset({value})
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        encode_value(value)


def test_forms_of_different_values_differ() -> None:
    pairs = [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1), (b"a", "a"), ((1,), frozenset({1})), (None, "None")]
    for one, other in pairs:
        assert not same_value(encode_value(one), encode_value(other))
        assert same_value(encode_value(one), encode_value(one))


@pytest.mark.parametrize(
    "data",
    [
        [],
        {},
        {"a": 1, "b": 2},
        {"builtins.eval": "1"},
        {"int": "1"},
        {"int": 5},
        {"float": "zz"},
        {"numpy": ["|O", "AAAAAAAAAAA="]},
        {"numpy": ["<f4,O", "AAAA"]},
        {"numpy": ["<f4", "AA=="]},
        {"torch.dtype": "load"},
        {"torch.dtype": ["float32"]},
        {"torch.device": "nonsense"},
        {"path": ["Popen", "x"]},
        {"enum": ["os.system"]},
        {"datetime": ["2024-01-01", 5, None]},
        {"set": [{"set": []}]},
        {"complex": ["1", "2"]},
        {"bytes": "***"},
        {"decimal": "x"},
    ],
    ids=str,
)
def test_a_form_that_is_none_raises_and_runs_nothing(data: object) -> None:
    with pytest.raises(CorruptDataError):
        decode_value(data)


KEYS = [
    "a",
    "",
    "a.b",
    "../x",
    "\ud800",
    "\ud83d\ude00",
    1,
    -1,
    2**53 + 1,
    True,
    None,
    1.0,
    1.5,
    -0.0,
    math.inf,
    b"a",
    (1, "1"),
    ("a", ("b",)),
    frozenset({1}),
    torch.float32,
    dt.date(2024, 1, 1),
    np.int64(1),
    np.str_("a"),
    1j,
]


def test_keys_are_told_apart_and_come_back_exactly() -> None:
    encoded = [encode_key(key) for key in KEYS]
    assert len(set(encoded)) == len(KEYS)
    for key, text in zip(KEYS, encoded, strict=True):
        assert key_from_json(parse_json(canonical_json(key_to_json(text)), what="key", path="test")) == text
        back = decode_key(text)
        assert type(back) is type(key)
        assert back == key
        assert str(back) == str(key)
    (nan,) = [decode_key(encode_key(math.nan))]
    assert math.isnan(nan)


def test_a_key_that_cannot_be_made_again_is_refused() -> None:
    Point = collections.namedtuple("Point", "x")  # noqa: PYI024
    for key in (object(), len, Point(1)):
        with pytest.raises(UnsupportedValueError, match="a key of type"):
            encode_key(key)


def test_a_key_from_a_file_that_is_none_is_corrupt() -> None:
    for key in (TaggedKey("nonsense", "1"), TaggedKey("float", "x"), TaggedKey("bytearray", '"YQ=="')):
        with pytest.raises(CorruptDataError):
            decode_key(key)
