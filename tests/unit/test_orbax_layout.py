"""Pieces of the format `orbax`: checksums, grids, names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorstore as ts
import torch
from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.orbax.crc32c import crc32c
from safepoint.formats.orbax.grid import chunk_grid, chunks_of
from safepoint.formats.orbax.names import item_entries
from safepoint.formats.region import Region, check_tiling


@pytest.mark.parametrize("size", [0, 1, 9, 255, 256, 257, 70_000, (256 << 10) * 16, (256 << 10) * 16 + 5, 9_000_001])
def test_checksums_are_those_of_the_codec(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "create": True,
        "store_data_equal_to_fill_value": True,
        "metadata": {"shape": [size], "data_type": "uint8", "codecs": [{"name": "bytes"}, {"name": "crc32c"}]}
        | {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(size, 1)]}}},
    }
    if size:
        array = ts.open(spec, context=ts.Context()).result()
        array.write(data).result()
        stored = array.kvstore.read("c/0").result().value
        assert crc32c(data.data) == int.from_bytes(stored[-4:], "little")
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"") == 0


def torch_shards(size: int, parts: int) -> list[tuple[int, int]]:
    """Return offset and size of what torch gives each of some processes of a dimension."""
    return [(chunk[0].item(), len(chunk)) for chunk in torch.arange(size).chunk(parts)]


@given(
    shape=st.lists(st.integers(1, 12), max_size=3),
    parts=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    max_bytes=st.sampled_from([1, 64, 1 << 20]),
)
def test_each_region_is_whole_chunks_and_the_chunks_tile_the_array(
    shape: list[int], parts: list[int], max_bytes: int
) -> None:
    regions = [Region((), ())]
    for size, count in zip(shape, parts, strict=False):
        shards = torch_shards(size, count)
        regions = [Region((*r.offsets, o), (*r.shape, n)) for r in regions for o, n in shards]
    grid = chunk_grid(shape, regions, item_bytes=4, max_bytes=max_bytes)
    if max_bytes == 1 << 20:  # torch's shards are a chunk each
        assert math.prod(-(-size // chunk) for size, chunk in zip(shape, grid, strict=True)) == len(regions)
    chunks = [chunk for region in regions for chunk in chunks_of(region, grid, shape)]
    assert len({index for index, _ in chunks}) == len(chunks)
    check_tiling(tuple(shape), [region for _, region in chunks], leaf="x")
    for index, region in chunks:
        assert region.offsets == tuple(i * size for i, size in zip(index, grid, strict=True))


def test_shards_of_any_sizes_share_the_finest_common_grid() -> None:
    regions = [Region((0,), (4,)), Region((4,), (6,)), Region((10,), (5,))]
    assert chunk_grid((15,), regions, item_bytes=4) == (2,)
    assert chunk_grid((15, 7), [Region((0, 0), (15, 7))], item_bytes=4) == (15, 7)
    assert chunk_grid((0, 3), [Region((0, 0), (0, 3))], item_bytes=4) == (1, 3)


def test_large_chunks_are_cut() -> None:
    whole = [Region((0, 0), (1000, 10))]
    assert chunk_grid((1000, 10), whole, item_bytes=4, max_bytes=10_000) == (250, 10)
    halves = [Region((0, 0), (500, 10)), Region((500, 0), (500, 10))]
    assert chunk_grid((1000, 10), halves, item_bytes=4, max_bytes=10_000) == (250, 10)
    assert chunk_grid((3, 10_000), [Region((0, 0), (3, 10_000))], item_bytes=4, max_bytes=10_000) == (1, 2500)


def test_parameters_are_called_by_their_keys_joined_by_dots() -> None:
    entries = item_entries("x", {"a": {"b.c": 1}, "l": [2.0, {"t": "text"}], "n": None, "e": {}, "big": 2**80})
    assert [(entry.name, entry.kind) for entry in entries] == [
        ("a.b.c", "scalar"),
        ("l.0", "scalar"),
        ("l.1.t", "string"),
        ("n", "None"),
        ("e", "Dict"),
        ("big", "None"),
    ]
