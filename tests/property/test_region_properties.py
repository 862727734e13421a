"""The box algebra against numpy: a region is the set of elements that its slices pick."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.errors import IncompleteCoverageError
from safepoint.formats.region import Region, check_tiling, subtract

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def regions_in(draw: st.DrawFn, outer: Region) -> Region:
    """Draw a region, perhaps an empty one, inside `outer`."""
    offsets, shape = [], []
    for start, size in zip(outer.offsets, outer.shape, strict=True):
        a, b = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
        offsets.append(start + a)
        shape.append(b - a)
    return Region(tuple(offsets), tuple(shape))


@st.composite
def scenes(draw: st.DrawFn) -> tuple[Region, list[Region]]:
    """Draw a whole and a few regions in it."""
    whole = Region.whole(draw(SHAPES))
    return whole, draw(st.lists(regions_in(whole), max_size=5))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Region, list[Region]]:
    """Draw a whole, and what is left of it after cuts in random places."""
    whole = Region.whole(draw(SHAPES))
    parts = [whole]
    for _ in range(draw(st.integers(0, 6))):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        if not part.shape:
            parts.append(part)
            continue
        d = draw(st.integers(0, len(part.shape) - 1))
        cut = draw(st.integers(0, part.shape[d]))
        for start, size in ((0, cut), (cut, part.shape[d] - cut)):
            offsets, shape = list(part.offsets), list(part.shape)
            offsets[d] += start
            shape[d] = size
            parts.append(Region(tuple(offsets), tuple(shape)))
    return whole, draw(st.permutations(parts))


def mask(region: Region, whole: Region) -> np.ndarray:
    """Return how often `region` holds each element of `whole`: 0 or 1."""
    held = np.zeros(whole.shape, dtype=np.int64)
    held[region.slices_in(whole)] = 1
    return held


@given(scenes())
def test_intersect_is_the_intersection_of_sets(scene: tuple[Region, list[Region]]) -> None:
    whole, regions = scene
    for a, b in product(regions, repeat=2):
        common = a.intersect(b)
        expected = mask(a, whole) & mask(b, whole)
        assert (common is None) == (not expected.any())
        if common is not None:
            assert np.array_equal(mask(common, whole), expected)


@given(scenes())
def test_contains_is_the_subset_relation(scene: tuple[Region, list[Region]]) -> None:
    whole, regions = scene
    for a, b in product(regions, repeat=2):
        assert a.contains(b) == bool((mask(b, whole) <= mask(a, whole)).all())


@given(st.data(), SHAPES, st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_runs_concatenate_to_the_region(data: st.DataObject, shape: tuple[int, ...], origin: list[int]) -> None:
    outer = Region(tuple(origin[: len(shape)]), shape)
    inner = data.draw(regions_in(outer))
    array = np.arange(outer.num_elements).reshape(shape)
    flat = array.reshape(-1)
    runs = list(inner.runs_in(outer))
    parts = [flat[first : first + count] for first, count in runs]
    picked = np.concatenate(parts) if parts else flat[:0]
    assert np.array_equal(picked, array[inner.slices_in(outer)].reshape(-1))
    assert all(count > 0 for _, count in runs)


@given(st.data(), SHAPES)
def test_runs_are_as_long_as_the_cut_allows(data: st.DataObject, shape: tuple[int, ...]) -> None:
    outer = Region.whole(shape)
    inner = data.draw(regions_in(outer))
    runs = list(inner.runs_in(outer))
    assert len({count for _, count in runs}) <= 1
    if inner.shape[1:] == outer.shape[1:]:
        assert len(runs) <= 1


@given(scenes())
def test_subtract_is_the_difference_of_sets(scene: tuple[Region, list[Region]]) -> None:
    whole, regions = scene
    for region in regions:
        rest = subtract(region, regions[:3])
        expected = mask(region, whole)
        for other in regions[:3]:
            expected = expected & ~mask(other, whole) & 1
        held = sum((mask(piece, whole) for piece in rest), np.zeros(whole.shape, dtype=np.int64))
        assert np.array_equal(held, expected)  # disjoint as well: no element is held twice
        assert not any(piece.is_empty for piece in rest)


@given(tilings())
def test_every_cutting_is_a_tiling(tiling: tuple[Region, list[Region]]) -> None:
    whole, parts = tiling
    check_tiling(whole.shape, parts, leaf="x")


@given(scenes())
def test_check_tiling_agrees_with_counting_elements(scene: tuple[Region, list[Region]]) -> None:
    whole, regions = scene
    held = sum((mask(region, whole) for region in regions), np.zeros(whole.shape, dtype=np.int64))
    if (held == 1).all():
        check_tiling(whole.shape, regions, leaf="x")
    else:
        with pytest.raises(IncompleteCoverageError):
            check_tiling(whole.shape, regions, leaf="x")


@given(st.data(), tilings())
def test_a_tiling_with_one_part_moved_is_refused(data: st.DataObject, tiling: tuple[Region, list[Region]]) -> None:
    whole, parts = tiling
    filled = [part for part in parts if not part.is_empty]
    if not filled:
        return
    index = data.draw(st.integers(0, len(filled) - 1))
    part = filled[index]
    offsets = tuple(data.draw(st.integers(0, n - size)) for n, size in zip(whole.shape, part.shape, strict=True))
    if offsets == part.offsets:
        return
    moved = [*filled[:index], Region(offsets, part.shape), *filled[index + 1 :]]
    with pytest.raises(IncompleteCoverageError):
        check_tiling(whole.shape, moved, leaf="x")
