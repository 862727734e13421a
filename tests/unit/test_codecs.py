"""What shards are encoded with."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.codecs import CODECS, ZSTD
from safepoint.manager.errors import CorruptDataError


@given(data=st.binary(min_size=1, max_size=3000))
def test_what_was_encoded_is_decoded(data: bytes) -> None:
    for codec in CODECS.values():
        out = bytearray(len(data))
        codec.decode(memoryview(codec.encode(memoryview(data))()), memoryview(out))()
        assert out == data


def test_nothing_is_encoded_to_less_than_the_ratio_says() -> None:
    """A manifest cannot claim more memory than that; so the ratio must hold for what shrinks the most."""
    for codec in CODECS.values():
        num_bytes = 256 << 20
        encoded = codec.encode(np.zeros(num_bytes, np.uint8).data)()
        assert num_bytes <= len(encoded) * codec.max_ratio


@pytest.mark.parametrize("other", ["longer", "shorter", "cut", "nonsense", "nothing"])
def test_what_stands_for_something_else_is_an_error(other: str) -> None:
    encoded = ZSTD.encode(memoryview(b"abc" * 100))()
    data, size = {
        "longer": (encoded, 299),
        "shorter": (encoded, 301),
        "cut": (encoded[:-3], 300),
        "nonsense": (b"nonsense", 300),
        "nothing": (b"", 300),
    }[other]
    wait = ZSTD.decode(memoryview(data), memoryview(bytearray(size)))
    with pytest.raises(CorruptDataError, match="cannot be decoded as zstd"):
        wait()
