"""The box algebra, on examples worked by hand."""

from __future__ import annotations

import time

import pytest

from safepoint.formats.errors import IncompleteCoverageError, InvalidArgumentError
from safepoint.formats.region import Region, check_tiling, subtract


def test_whole_covers_the_shape_from_its_origin() -> None:
    region = Region.whole([2, 3])
    assert region == Region((0, 0), (2, 3))
    assert region.end == (2, 3)
    assert region.num_elements == 6
    assert not region.is_empty


def test_a_scalar_is_one_element() -> None:
    scalar = Region.whole(())
    assert scalar.num_elements == 1
    assert scalar.end == ()
    assert scalar.contains(scalar)
    assert scalar.intersect(scalar) == scalar
    assert scalar.slices_in(scalar) == ()
    assert list(scalar.runs_in(scalar)) == [(0, 1)]


@pytest.mark.parametrize(("offsets", "shape"), [((0,), ()), ((), (1,)), ((0, 0), (1,))])
def test_offsets_and_shape_have_one_rank(offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="as many offsets as sizes"):
        Region(offsets, shape)


@pytest.mark.parametrize(("offsets", "shape"), [((-1,), (2,)), ((0,), (-2,))])
def test_negative_numbers_are_refused(offsets: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="negative"):
        Region(offsets, shape)


def test_regions_are_ordered_by_offset() -> None:
    assert min([Region((2,), (1,)), Region((0,), (2,))]).offsets == (0,)


def test_contains_knows_the_border() -> None:
    outer = Region((2, 2), (4, 4))
    assert outer.contains(outer)
    assert outer.contains(Region((5, 5), (1, 1)))
    assert not outer.contains(Region((5, 5), (1, 2)))
    assert not outer.contains(Region((1, 2), (1, 1)))


def test_an_empty_region_is_inside_everything() -> None:
    assert Region((0,), (1,)).contains(Region((7,), (0,)))


def test_intersect_is_the_common_box_or_none() -> None:
    a, b = Region((0, 0), (3, 3)), Region((2, 1), (3, 1))
    assert a.intersect(b) == b.intersect(a) == Region((2, 1), (1, 1))
    assert a.intersect(Region((3, 0), (1, 3))) is None
    assert a.intersect(Region((1, 1), (0, 2))) is None


def test_ranks_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="zip"):
        Region((0,), (1,)).intersect(Region((0, 0), (1, 1)))


def test_slices_are_relative_to_the_outer_region() -> None:
    assert Region((3, 4), (1, 2)).slices_in(Region((2, 4), (5, 5))) == (slice(1, 2), slice(0, 2))


@pytest.mark.parametrize(
    ("inner", "outer", "runs"),
    [
        (Region((1,), (2,)), Region((0,), (5,)), [(1, 2)]),
        (Region.whole((2, 3)), Region.whole((2, 3)), [(0, 6)]),
        (Region((1, 0), (2, 3)), Region.whole((4, 3)), [(3, 6)]),  # rows that follow each other are one run
        (Region((0, 1), (2, 2)), Region.whole((2, 3)), [(1, 2), (4, 2)]),
        (Region((4, 7), (2, 1)), Region((3, 6), (4, 3)), [(4, 1), (7, 1)]),  # outer does not begin at the origin
        (Region((0, 1, 0), (2, 1, 2)), Region.whole((2, 2, 2)), [(2, 2), (6, 2)]),
        (Region((0, 0, 1), (2, 2, 1)), Region.whole((2, 2, 2)), [(1, 1), (3, 1), (5, 1), (7, 1)]),
        (Region((0, 0), (0, 3)), Region.whole((2, 3)), []),
        (Region((0, 1), (2, 0)), Region.whole((2, 3)), []),
    ],
)
def test_runs_are_contiguous_and_in_order(inner: Region, outer: Region, runs: list[tuple[int, int]]) -> None:
    assert list(inner.runs_in(outer)) == runs


def test_runs_of_an_enormous_region_come_one_by_one() -> None:
    outer = Region.whole((2**30, 2**30))
    runs = Region((0, 1), (2**30, 2)).runs_in(outer)
    assert [next(runs), next(runs)] == [(1, 2), (2**30 + 1, 2)]


def test_subtract_leaves_what_nobody_took() -> None:
    whole = Region.whole((4, 4))
    assert subtract(whole, []) == [whole]
    assert subtract(whole, [whole]) == []
    assert subtract(whole, [Region((4, 0), (4, 4))]) == [whole]
    assert subtract(Region((0,), (0,)), []) == []
    rest = subtract(whole, [Region((1, 1), (2, 2))])
    check_tiling((4, 4), [*rest, Region((1, 1), (2, 2))], leaf="x")


def test_subtract_a_scalar() -> None:
    assert subtract(Region((), ()), [Region((), ())]) == []


@pytest.mark.parametrize(
    ("shape", "regions"),
    [
        ((), [Region((), ())]),
        ((0,), []),
        ((0, 3), [Region((0, 0), (0, 3))]),
        ((4,), [Region((2,), (2,)), Region((0,), (2,))]),
        ((4,), [Region((0,), (4,)), Region((4,), (0,))]),
        ((2, 2), [Region((0, 0), (2, 1)), Region((0, 1), (1, 1)), Region((1, 1), (1, 1))]),
        # a pinwheel: no straight cut separates the parts
        (
            (3, 3),
            [
                Region((0, 0), (1, 2)),
                Region((0, 2), (2, 1)),
                Region((2, 1), (1, 2)),
                Region((1, 0), (2, 1)),
                Region((1, 1), (1, 1)),
            ],
        ),
    ],
)
def test_tilings_pass(shape: tuple[int, ...], regions: list[Region]) -> None:
    check_tiling(shape, regions, leaf="x")


@pytest.mark.parametrize(
    ("shape", "regions", "message"),
    [
        ((), [], "0 of 1"),
        ((), [Region((), ()), Region((), ())], "2 of 1"),
        ((4,), [], "0 of 4"),
        ((4,), [Region((0,), (3,))], "3 of 4"),
        ((4,), [Region((0,), (4,)), Region((0,), (4,))], "8 of 4"),
        ((4,), [Region((1,), (4,))], "outside"),
        ((4,), [Region((0, 0), (4, 1))], "outside"),
        ((0,), [Region((0,), (1,))], "outside"),
        # the count is right, the place is not
        ((4,), [Region((0,), (2,)), Region((1,), (2,))], "overlap"),
        ((2, 2), [Region((0, 0), (1, 2)), Region((0, 0), (2, 1))], "overlap"),
        ((2, 2, 2), [Region((0, 0, 0), (1, 2, 2))] * 2, "overlap"),
    ],
)
def test_what_is_no_tiling_is_refused_by_leaf(shape: tuple[int, ...], regions: list[Region], message: str) -> None:
    with pytest.raises(IncompleteCoverageError, match=message) as caught:
        check_tiling(shape, regions, leaf="model.weight")
    assert caught.value.leaf == "model.weight"


def test_tiling_by_many_regions_is_checked_in_linear_time() -> None:
    side = 180
    regions = [Region((i, j), (1, 1)) for i in range(side) for j in range(side)]
    start = time.thread_time()  # not that of a busy machine
    check_tiling((side, side), regions, leaf="x")
    assert time.thread_time() - start < 5
    with pytest.raises(IncompleteCoverageError, match="overlap"):
        check_tiling((side, side), [*regions[1:], regions[1]], leaf="x")


def test_tiling_of_an_enormous_shape_needs_no_memory_for_it() -> None:
    half = 2**61
    check_tiling((2 * half,), [Region((0,), (half,)), Region((half,), (half,))], leaf="x")


def test_a_shape_that_only_equals_another_leaves_no_trace_in_what_is_kept() -> None:
    Region.whole((True, 61, 1.0))  # type: ignore[arg-type]
    assert [type(size) for size in Region.whole((1, 61, 1)).shape] == [int, int, int]
