"""Who reads what, of the blocks that processes of one host want alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.entries import FileEntry
from safepoint.formats.run_reading import BlockRun, run_bytes
from safepoint.manager.host_plan import Group, groups_of, rounds_of

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB = 1 << 20


def file_of(num_bytes: int, block_bytes: int = 8 * MIB) -> FileEntry:
    count = -(-num_bytes // block_bytes)
    return FileEntry(
        path="f", num_bytes=num_bytes, block_bytes=block_bytes, digests=("",) * count, process_index=0, attempt="a"
    )


FILES = [file_of(64 * MIB), file_of(60 * MIB), file_of(5 * MIB)]
WHOLE = BlockRun(0, 0, 7)
SECOND = BlockRun(1, 0, 7)


def test_what_two_want_makes_a_group_and_what_one_wants_does_not() -> None:
    wants = {3: [WHOLE, SECOND], 5: [WHOLE], 8: [BlockRun(2, 0, 0)]}
    assert groups_of(wants, FILES) == [Group((3, 5), (WHOLE,))]


def test_each_set_of_processes_is_a_group_in_one_order_for_all() -> None:
    wants = {0: [SECOND, WHOLE], 1: [WHOLE], 2: [WHOLE, SECOND]}
    found = groups_of(wants, FILES)
    assert found == [Group((0, 1, 2), (WHOLE,)), Group((0, 2), (SECOND,))]
    assert groups_of(dict(reversed(wants.items())), FILES) == found


def test_a_member_that_is_busy_with_others_may_be_late() -> None:
    earlier = [Group((0, 1), (WHOLE,)), Group((0, 1, 2), (SECOND,))]
    assert not earlier[0].may_be_late(0, [])
    assert not Group((1, 2), ()).may_be_late(1, earlier)  # it went through both with whoever is in this
    assert Group((1, 2), ()).may_be_late(2, earlier)
    assert not Group((5, 6), ()).may_be_late(5, earlier)


def test_little_is_read_by_each_for_itself() -> None:
    few = BlockRun(2, 0, 0)
    assert groups_of({0: [few], 1: [few]}, FILES) == []


def test_the_order_of_a_group_is_that_of_its_first_member() -> None:
    wants = {1: [WHOLE, SECOND], 0: [SECOND, WHOLE]}
    assert groups_of(wants, FILES) == [Group((0, 1), (SECOND, WHOLE))]


def test_shares_are_runs_as_long_as_a_request() -> None:
    (one, two) = rounds_of([WHOLE, SECOND], 2, FILES, request_bytes=16 * MIB)
    assert one.shares == ((BlockRun(0, 0, 1), BlockRun(0, 2, 3)), (BlockRun(0, 4, 5), BlockRun(0, 6, 7)))
    assert sum(run_bytes(FILES, run) for share in two.shares for run in share) == 60 * MIB


@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=4),
    st.integers(1, 60),
    st.integers(1, 5),
    st.integers(1, 300),
    st.integers(1, 200),
    st.data(),
)
def test_every_block_has_one_reader_and_all_read_alike(
    sizes: list[int], block_bytes: int, num_members: int, round_bytes: int, request_bytes: int, data: st.DataObject
) -> None:
    files = [file_of(size, block_bytes) for size in sizes]
    runs: list[BlockRun] = []
    for _ in range(data.draw(st.integers(1, 5))):
        file = data.draw(st.integers(0, len(files) - 1))
        first = data.draw(st.integers(0, len(files[file].digests) - 1))
        runs.append(BlockRun(file, first, data.draw(st.integers(first, len(files[file].digests) - 1))))
    rounds = rounds_of(runs, num_members, files, request_bytes=request_bytes, round_bytes=round_bytes)

    blocks = [block for one in rounds for block in one.blocks()]
    assert sorted(blocks) == sorted({(run.file, number) for run in runs for number in range(run.first, run.last + 1)})
    read = [0] * num_members
    for one in rounds:
        assert len(one.shares) == num_members
        total = 0
        for member, share in enumerate(one.shares):
            for run in share:
                assert run.first == run.last or run_bytes(files, run) <= request_bytes
                read[member] += run_bytes(files, run)
                total += run_bytes(files, run)
        assert total <= round_bytes or len(one.blocks()) == 1
    assert spread(read) <= 2 * block_bytes


def spread(values: Sequence[int]) -> int:
    return max(values) - min(values)
