"""Plans over random holders: each element is written once, evenly, and any region can be read back."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.errors import IncompleteCoverageError
from safepoint.formats.manifest import LeafEntry, ShardEntry
from safepoint.formats.region import Region
from safepoint.manager.adapters.base import ArraySpec
from safepoint.manager.planner import plan_restore, plan_save

Tables = list[dict[tuple[str], ArraySpec]]


@st.composite
def regions_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return Region(offsets, tuple(draw(st.integers(1, size - o)) for size, o in zip(shape, offsets, strict=True)))


@st.composite
def held_states(draw: st.DrawFn) -> Tables:
    """Processes that hold random, overlapping parts of random leaves."""
    process_count = draw(st.integers(1, 4))
    tables: Tables = [{} for _ in range(process_count)]
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        for table in tables:
            regions = draw(
                st.lists(st.one_of(st.just(Region.whole(shape)), regions_in(shape)), max_size=3, unique=True)
            )
            table[f"leaf{index}",] = ArraySpec(dtype="int16", shape=shape, regions=tuple(regions), kind="tensor")
    return tables


def elements(region: Region) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(a, b) for a, b in zip(region.offsets, region.end, strict=True))))


@given(held_states())
def test_each_element_is_written_once_by_a_process_that_holds_it(tables: Tables) -> None:
    held = {
        path: {element for table in tables for region in table[path].regions for element in elements(region)}
        for path in tables[0]
    }
    missing = [path for path, spec in tables[0].items() if len(held[path]) < len(elements(Region.whole(spec.shape)))]
    try:
        plan = plan_save(tables, "sharded", "shared")
    except IncompleteCoverageError as error:
        assert error.leaf in [path[0] for path in missing]  # noqa: PT017
        return
    assert not missing
    written = Counter((item.path, element) for item in plan.assignments for element in elements(item.region))
    assert set(written.values()) <= {1}
    assert len(written) == sum(map(len, held.values()))
    for item in plan.assignments:
        assert item.writer == item.source
        assert any(region.contains(item.region) for region in tables[item.source][item.path].regions)


@given(held_states())
def test_no_piece_could_move_and_make_its_holders_more_even(tables: Tables) -> None:
    try:
        plan = plan_save(tables, "sharded", "shared")
    except IncompleteCoverageError:
        return
    loads = [2 * sum(item.region.num_elements for item in plan.written_by(p)) for p in range(len(tables))]
    for item in plan.assignments:
        for process, table in enumerate(tables):
            if any(region.contains(item.region) for region in table[item.path].regions):
                assert loads[item.writer] - loads[process] <= 2 * item.region.num_elements


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_a_replicated_state_is_even_within_one_leaf(sizes: list[int], process_count: int) -> None:
    table = {
        (f"{i}",): ArraySpec(dtype="uint8", shape=(n,), regions=(Region.whole((n,)),), kind="tensor")
        for i, n in enumerate(sizes)
    }
    plan = plan_save([table] * process_count, "sharded", "shared")
    loads = [sum(item.region.num_elements for item in plan.written_by(p)) for p in range(process_count)]
    assert max(loads) - min(loads) <= max(sizes)


@given(held_states())
def test_the_modes_write_the_same_elements(tables: Tables) -> None:
    try:
        sharded = plan_save(tables, "sharded", "shared")
    except IncompleteCoverageError:
        return
    consolidated = plan_save(tables, "consolidated", "shared")
    assert [(i.path, i.region) for i in sharded.assignments] == [(i.path, i.region) for i in consolidated.assignments]
    assert {item.writer for item in consolidated.assignments} == {0}


@given(held_states(), st.data())
def test_what_a_plan_wrote_can_be_read_in_any_region(tables: Tables, data: st.DataObject) -> None:
    try:
        plan = plan_save(tables, "sharded", "shared")
    except IncompleteCoverageError:
        return
    path = data.draw(st.sampled_from(sorted(tables[0])))
    shape = tables[0][path].shape
    wanted = data.draw(regions_in(shape))
    shards = tuple(
        ShardEntry(region=item.region, file=item.writer, offset=index, num_bytes=0, key=str(index))
        for index, item in enumerate(plan.assignments)
        if item.path == path
    )
    parts = plan_restore(LeafEntry(path=path, dtype="int16", shape=shape, shards=shards), wanted)
    read = Counter(element for _, common in parts for element in elements(common))
    assert read == Counter(elements(wanted))
    assert all(shard.region.contains(common) for shard, common in parts)
    places = [(shard.file, shard.offset) for shard, _ in parts]
    assert places == sorted(places)
