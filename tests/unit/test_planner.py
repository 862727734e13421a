"""Who writes and reads what: promises of safepoint.manager.planner."""

from __future__ import annotations

import time
from collections import Counter

import pytest

from safepoint.formats.errors import IncompleteCoverageError, InvalidArgumentError
from safepoint.formats.manifest import LeafEntry, ShardEntry
from safepoint.formats.region import Region
from safepoint.manager import planner
from safepoint.manager.adapters.base import ArraySpec
from safepoint.manager.planner import SavePlan, choose_mode, plan_restore, plan_save


def spec(shape: tuple[int, ...], *regions: Region, dtype: str = "float32") -> ArraySpec:
    return ArraySpec(dtype=dtype, shape=shape, regions=regions, kind="tensor")


def whole(*shape: int, dtype: str = "float32") -> ArraySpec:
    return spec(shape, Region.whole(shape), dtype=dtype)


def rows(start: int, count: int, width: int) -> Region:
    return Region((start, 0), (count, width))


def by_writer(plan: SavePlan) -> dict[int, list[tuple[object, Region]]]:
    writers = sorted({item.writer for item in plan.assignments})
    return {writer: [(item.path[-1], item.region) for item in plan.written_by(writer)] for writer in writers}


def test_a_replicated_state_is_spread_evenly() -> None:
    table = {("model", f"w{i}"): whole(size) for i, size in enumerate([100, 70, 50, 40, 30, 20, 10])}
    plan = plan_save([table, dict(table)], "sharded", "shared")
    bytes_of = Counter[int]()
    for item in plan.assignments:
        assert item.source == item.writer
        bytes_of[item.writer] += item.region.num_elements * 4
    assert bytes_of == {0: 640, 1: 640}


def test_sharded_leaves_stay_where_they_are() -> None:
    tables = [{("w",): spec((8, 4), rows(2 * p, 2, 4))} for p in range(4)]
    plan = plan_save(tables, "sharded", "shared")
    assert by_writer(plan) == {p: [("w", rows(2 * p, 2, 4))] for p in range(4)}


def test_widely_held_leaves_fill_the_gaps_that_narrowly_held_ones_leave() -> None:
    everywhere = {("a",): whole(10), ("b",): whole(20)}
    plan = plan_save([{("own",): whole(30)} | everywhere, dict(everywhere)], "sharded", "shared")
    assert by_writer(plan) == {
        0: [("own", Region.whole((30,)))],
        1: [("a", Region.whole((10,))), ("b", Region.whole((20,)))],
    }


def test_overlapping_regions_are_cut_so_that_each_element_is_written_once() -> None:
    tables = [{("w",): spec((6,), Region((0,), (4,)))}, {("w",): spec((6,), Region((2,), (4,)))}]
    regions = sorted(item.region for item in plan_save(tables, "sharded", "shared").assignments)
    assert regions == [Region((0,), (2,)), Region((2,), (2,)), Region((4,), (2,))]


def test_a_part_that_is_also_held_whole_elsewhere_may_be_written_by_either() -> None:
    tables = [{("w",): whole(8)}, {("w",): spec((8,), Region((4,), (4,)))}]
    assert by_writer(plan_save(tables, "sharded", "shared")) == {
        0: [("w", Region((0,), (4,)))],
        1: [("w", Region((4,), (4,)))],
    }


def test_elements_that_nobody_holds_are_an_error_that_names_the_leaf() -> None:
    tables = [{("model", "w"): spec((6,), Region((0,), (2,)))}, {("model", "w"): spec((6,), Region((4,), (2,)))}]
    for mode in ("sharded", "consolidated"):
        with pytest.raises(IncompleteCoverageError) as caught:
            plan_save(tables, mode, "shared")  # type: ignore[arg-type]
        assert caught.value.leaf == "model.w"
    overlapping = [{("w",): spec((9,), Region((0,), (5,)), Region((1,), (5,)))}]
    with pytest.raises(IncompleteCoverageError):
        plan_save(overlapping, "sharded", "shared")


def test_the_primary_writes_everything_in_consolidated_mode_and_reads_its_own_copy_first() -> None:
    tables = [{("w",): spec((4,), Region((0,), (2,))), ("r",): whole(3)}, {("w",): spec((4,), Region((2,), (2,)))}]
    tables[1] |= {("r",): whole(3), ("only here",): whole(1)}
    plan = plan_save(tables, "consolidated", "shared")
    assert {item.writer for item in plan.assignments} == {0}
    assert [(item.path[0], item.source) for item in plan.assignments] == [
        ("w", 0),
        ("w", 1),
        ("r", 0),
        ("only here", 1),
    ]
    assert plan.involving(1).assignments == tuple(item for item in plan.assignments if item.source == 1)


def test_scalars_and_empty_leaves_are_written_once() -> None:
    table = {("scalar",): whole(), ("empty",): whole(0, 3), ("unheld empty",): spec((0,))}
    plan = plan_save([table, dict(table)], "sharded", "shared")
    assert sorted(item.path[0] for item in plan.assignments) == ["empty", "scalar", "unheld empty"]
    assert all(item.region == Region.whole(table[item.path].shape) for item in plan.assignments)


def test_with_private_roots_each_process_writes_all_that_it_holds_without_repeats() -> None:
    tables = [
        {("w",): whole(4)},
        {("w",): spec((4,), Region((0,), (3,)), Region((1,), (3,)))},
    ]
    plan = plan_save(tables, "sharded", "per_process")
    assert by_writer(plan)[0] == [("w", Region((0,), (4,)))]
    assert sum(item.region.num_elements for item in plan.written_by(1)) == 4
    assert all(item.source == item.writer for item in plan.assignments)


def test_equal_tables_give_the_same_plan_whether_they_are_one_object_or_several() -> None:
    table = {("m", i): whole(i % 7 + 1, 3) for i in range(200)}
    assert plan_save([table] * 3, "sharded", "shared") == plan_save(
        [dict(table) for _ in range(3)], "sharded", "shared"
    )


def test_a_hundred_thousand_leaves_on_many_processes_are_planned_in_seconds() -> None:
    table = {("model", f"layer{i}"): whole(i % 100 + 1) for i in range(100_000)}
    started = time.process_time()
    plan = plan_save([table] * 64, "sharded", "shared")
    assert time.process_time() - started < 10
    loads = Counter[int]()
    for item in plan.assignments:
        loads[item.writer] += item.region.num_elements * 4
    assert max(loads.values()) - min(loads.values()) <= 400


@pytest.mark.parametrize(
    ("requested", "tables", "scope", "mode", "reason"),
    [
        ("auto", [{("w",): whole(4)}], "shared", "consolidated", "one process"),
        ("auto", [{("w",): whole(4)}] * 2, "shared", "consolidated", "process 0 holds the whole state"),
        ("auto", [{("w",): spec((4,), Region((0,), (2,)))}] * 2, "shared", "sharded", "does not hold the whole of w"),
        ("auto", [{}, {("w",): whole(4)}], "shared", "sharded", "does not hold the whole of w"),
        ("auto", [{("w",): whole(1 << 29)}] * 2, "shared", "sharded", "larger than 1024 MiB"),
        ("auto", [{("w",): whole(1 << 28)}] * 2, "shared", "consolidated", "small"),
        ("auto", [{("w",): whole(4)}], "per_process", "sharded", "root of its own"),
        ("sharded", [{("w",): whole(4)}], "shared", "sharded", "as requested"),
        ("consolidated", [{("w",): spec((4,))}] * 2, "shared", "consolidated", "as requested"),
    ],
)
def test_auto_consolidates_what_one_process_holds_and_is_small(
    requested: str, tables: list[dict[tuple[str], ArraySpec]], scope: str, mode: str, reason: str
) -> None:
    assert planner.AUTO_CONSOLIDATED_BYTES == 1 << 30
    chosen, why = choose_mode(
        requested,
        process_count=len(tables),
        table_by_process=tables,  # type: ignore[arg-type]
        scope=scope,  # type: ignore[arg-type]
    )
    assert (chosen, reason in why) == (mode, True), why


def test_a_primary_that_holds_a_leaf_in_parts_holds_it_whole() -> None:
    halves = {("w",): spec((4,), Region((0,), (2,)), Region((2,), (2,)))}
    assert choose_mode("auto", process_count=2, table_by_process=[halves, {}], scope="shared")[0] == "consolidated"


def test_modes_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="mode"):
        choose_mode("fast", process_count=1, table_by_process=[{}], scope="shared")
    with pytest.raises(InvalidArgumentError, match="one root"):
        choose_mode("consolidated", process_count=2, table_by_process=[{}, {}], scope="per_process")


def leaf(shape: tuple[int, ...], *regions: Region) -> LeafEntry:
    shards = tuple(
        ShardEntry(region=region, file=len(regions) - i, offset=64, num_bytes=4 * region.num_elements, key=f"k{i}")
        for i, region in enumerate(regions)
    )
    return LeafEntry(path=("m", "w"), dtype="float32", shape=shape, shards=shards)


def test_a_restore_reads_the_parts_that_it_needs_in_file_order() -> None:
    stored = leaf((8, 2), rows(0, 4, 2), rows(4, 2, 2), rows(6, 2, 2))
    parts = plan_restore(stored, Region((3, 0), (3, 1)))
    assert [(shard.file, common) for shard, common in parts] == [
        (2, Region((4, 0), (2, 1))),
        (3, Region((3, 0), (1, 1))),
    ]
    assert plan_restore(stored, Region((3, 0), (0, 2))) == []


def test_a_restore_of_scalars_and_whole_leaves_reads_one_part() -> None:
    assert len(plan_restore(leaf((), Region((), ())), Region((), ()))) == 1
    assert len(plan_restore(leaf((4,), Region((0,), (4,))), Region((0,), (4,)))) == 1


def test_a_restore_reads_elements_that_are_stored_twice_once() -> None:
    stored = leaf((6,), Region((0,), (4,)), Region((2,), (4,)))
    parts = plan_restore(stored, Region((1,), (5,)))
    assert sum(common.num_elements for _, common in parts) == 5


def test_a_restore_of_a_region_that_is_not_stored_names_the_leaf() -> None:
    stored = leaf((6,), Region((0,), (2,)), Region((4,), (2,)))
    assert len(plan_restore(stored, Region((4,), (2,)))) == 1
    with pytest.raises(IncompleteCoverageError) as caught:
        plan_restore(stored, Region((1,), (4,)))
    assert caught.value.leaf == "m.w"
    # as many elements as wanted, yet not those
    with pytest.raises(IncompleteCoverageError):
        plan_restore(leaf((4,), Region((0,), (2,)), Region((1,), (2,))), Region((0,), (4,)))
