"""Hypothesis strategies for whole state trees: what a save accepts, in every shape that a person might give it.

    states()          dicts of items
    same_shape(state) a target with the same structure and other content

Users test their own state classes with these; nothing here knows how safepoint keeps anything.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import pathlib
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

__all__ = ["Color", "Pair", "Record", "arrays", "keys", "same_content", "same_shape", "states", "values"]

# Before 2.4 numpy's own deepcopy, by which the tests tell whether a state was changed, drops a NUL at the end.
_KEEPS_NUL = str.encode(copy.deepcopy(np.str_("a\x00"))) == b"a\x00"
_TEXT = np.str_("a\x00") if _KEEPS_NUL else np.str_("a")


class Color(enum.Enum):
    RED = 1
    GREEN = "green"
    BLUE = (1, 2)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    value: Any
    note: str = ""


TENSOR_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.uint64,
    torch.bool,
)
NUMPY_DTYPES = ("f4", "f8", "f2", "c8", "i1", "u1", "i2", "u4", "i8", "?")

_texts = st.text(max_size=6) | st.sampled_from(["", ".", "..", "a.b", "a/b", "\ud800", "\ud83d\ude00", "__metadata__"])
_bits = st.binary(min_size=8, max_size=8)

values: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**60, max_value=2**200),
    st.floats(allow_nan=True, allow_infinity=True),
    st.complex_numbers(),
    _texts,
    st.binary(max_size=6),
    st.datetimes(timezones=st.none() | st.just(dt.UTC)),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.sampled_from([*Color, torch.float32, torch.device("cpu"), torch.Size([2]), range(3), slice(1, None)]),
    st.sampled_from([pathlib.PurePosixPath("a/b"), pathlib.Path()]),
    st.sets(st.integers() | _texts | st.tuples(st.integers(), st.booleans()), max_size=3),
    st.frozensets(st.booleans() | st.none() | st.binary(max_size=2), max_size=3),
    _bits.map(lambda raw: np.frombuffer(raw, np.float64)[0]),
    st.integers(-(2**15), 2**15 - 1).map(np.int16),
    st.sampled_from([np.datetime64("2024-01-01", "s"), _TEXT, np.bool_(1)]),
)
"""Plain values of every kind."""

keys: st.SearchStrategy[Any] = st.one_of(
    _texts,
    st.integers(),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.binary(max_size=3),
    st.tuples(st.integers(), _texts),
    st.sampled_from(Color),
)
"""Keys of a mapping."""


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """Return a tensor or numpy array with random bits, sometimes a view."""
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    seed = draw(st.integers(0, 2**32 - 1))
    if draw(st.integers(0, 3)) == 0:
        dtype = np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
        raw = np.random.default_rng(seed).integers(0, 2, (*shape, dtype.itemsize), dtype=np.uint8)
        return raw[..., 0].astype(bool) if dtype.kind == "b" else raw.view(dtype).reshape(shape)
    dtype = draw(st.sampled_from(TENSOR_DTYPES))
    generator = torch.Generator().manual_seed(seed)
    limit = 2 if dtype is torch.bool else 256
    raw_bytes = torch.randint(0, limit, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    tensor = raw_bytes.view(dtype).reshape(shape)
    return draw(st.sampled_from([tensor, tensor.t() if tensor.ndim == 2 else tensor]))


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    small = st.lists(children, max_size=3)
    mappings = st.dictionaries(keys, children, max_size=3)
    return st.one_of(
        small,
        small.map(tuple),
        small.map(collections.deque),
        mappings,
        mappings.map(collections.OrderedDict),
        mappings.map(lambda items: collections.defaultdict(list, items)),
        st.builds(Pair, children, children),
        st.builds(Record, children, _texts),
    )


def states(max_leaves: int = 12) -> st.SearchStrategy[dict[str, Any]]:
    """Return states: dicts of named items."""
    trees = st.recursive(values | arrays(), _containers, max_leaves=max_leaves)
    names = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=6)
    return st.dictionaries(names, trees, max_size=3)


def same_shape(state: Any) -> Any:
    """Return a target of the same structure whose arrays hold zeros; plain values are those of the state."""
    blank = copy.deepcopy(state)
    _blank(blank)
    return blank


def _blank(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value.zero_()
    elif isinstance(value, np.ndarray):
        value[...] = 0
    elif isinstance(value, dict):
        for child in value.values():
            _blank(child)
    elif isinstance(value, (list, tuple, collections.deque)):
        for child in value:
            _blank(child)
    elif isinstance(value, Record):
        _blank(value.value)


def same_content(one: Any, other: Any) -> bool:
    """Say whether two states are equal in type, order, bits and structure; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and _raw(one) == _raw(other)
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return _same_items(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same_content, one, other))
    if isinstance(one, Record):
        return same_content([one.value, one.note], [other.value, other.note])
    return _same_plain(one, other)


def _raw(tensor: torch.Tensor) -> list[int]:
    plain = tensor.detach().resolve_conj().resolve_neg()
    own = torch.empty(plain.shape, dtype=plain.dtype).copy_(plain) if plain.element_size() > 1 else plain.clone()
    flat: list[int] = own.reshape(-1).view(torch.uint8).tolist()
    return flat


def _same_items(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        same_content(a, b) and same_content(x, y) for (a, x), (b, y) in zip(one, other, strict=True)
    )


def _same_plain(one: Any, other: Any) -> bool:
    if isinstance(one, (float, complex, decimal.Decimal, fractions.Fraction)):
        return repr(one) == repr(other)
    return bool(one == other)
