"""Which files a save takes over: as a pure function of what the step before has and what is wanted now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from safepoint.formats.checksum import digest
from safepoint.formats.entries import FileEntry, ShardEntry
from safepoint.formats.region import Region
from safepoint.manager.unchanged import MAX_LINKS, LinkBase, Wanted, linked_path, take_over

from support.manifests import file_entry

SIZE = 1000
WHOLE = Region.whole((250,))


def entry(number: int, file: int, **changes: object) -> ShardEntry:
    shard = ShardEntry(region=WHOLE, file=file, offset=96 + number * SIZE, num_bytes=SIZE, key=f"k{number}")
    return shard._replace(digest=digest(b"%d" % number), **changes)  # type: ignore[arg-type]


def base_of(files: list[FileEntry], placed: dict[int, ShardEntry]) -> LinkBase:
    held = (((f"leaf{number}",), "float32", shard) for number, shard in placed.items())
    return LinkBase.of(1, "a" * 16, files, held)


def wanted(number: int, *, text: bytes | None = None, dtype: str = "float32", region: Region = WHOLE) -> Wanted:
    return Wanted((f"leaf{number}",), region, dtype, digest(b"%d" % number if text is None else text))


TWO = [file_entry("a/a.safetensors", 96 + 4 * SIZE), file_entry("b/b.safetensors", 96 + 2 * SIZE)]
PLACED = {**{i: entry(i, 0) for i in range(4)}, 4: entry(4, 1), 5: entry(5, 1)}


def test_a_file_that_is_wanted_as_a_whole_is_taken_over_with_all_that_it_holds() -> None:
    found = take_over(base_of(TWO, PLACED), [wanted(i) for i in range(6)])
    assert [takeover.file for takeover in found] == [0, 1]
    assert [index for takeover in found for index, _ in takeover.held] == list(range(6))


@pytest.mark.parametrize(("unchanged", "taken"), [(4, True), (3, True), (2, False), (1, False), (0, False)])
def test_a_file_of_which_less_than_half_is_wanted_is_left(unchanged: int, *, taken: bool) -> None:
    now = [wanted(i, text=None if i < unchanged else b"new") for i in range(4)]
    assert bool(take_over(base_of(TWO[:1], {i: entry(i, 0) for i in range(4)}), now)) == taken


@pytest.mark.parametrize("changed", ["bytes", "dtype", "region", "leaf", "no digest", "padded"])
def test_only_the_same_bytes_of_the_same_region_leaf_and_dtype_are_unchanged(changed: str) -> None:
    shard = entry(0, 0)
    if changed == "no digest":
        shard = shard._replace(digest=None)
    if changed == "padded":
        shard = shard._replace(stored_shape=(260,))
    now = {
        "bytes": wanted(0, text=b"other"),
        "dtype": wanted(0, dtype="int32"),
        "region": wanted(0, region=Region((1,), (250,))),
        "leaf": Wanted(("leaf9",), WHOLE, "float32", digest(b"0")),
    }.get(changed, wanted(0))
    small = [file_entry("a", SIZE + 96)]
    assert take_over(base_of(small, {0: entry(0, 0)}), [wanted(0)])
    assert not take_over(base_of(small, {0: shard}), [now])


def test_a_file_is_linked_ten_times_and_no_more() -> None:
    files = [replace(TWO[0], links=MAX_LINKS - 1), replace(TWO[1], links=MAX_LINKS)]
    base = base_of(files, PLACED)
    assert base.linkable == [0]
    assert [takeover.file for takeover in take_over(base, [wanted(i) for i in range(6)])] == [0]
    assert MAX_LINKS == 10


def test_a_linked_file_has_one_name_for_ever_and_no_other_has_it() -> None:
    first = file_entry("model/model.safetensors", 10)
    path = linked_path(first)
    assert path.startswith("shard-a1-")
    assert path.endswith(".safetensors")
    assert linked_path(replace(first, path=path, links=1, process_index=3)) == path
    for odd in ("model/" + "x" * 300, "model/a.b/c", "model/x.safe tensors", "model/x." + "y" * 200):
        assert linked_path(replace(first, path=odd)).count(".") == 0
    assert linked_path(replace(first, path="model/model.blob")).endswith(".blob")
    others = [
        replace(first, path="other/other.safetensors"),
        replace(first, attempt="a2"),
        replace(first, path="shard-00000-of-00002.safetensors"),
    ]
    assert len({path, *map(linked_path, others)}) == 4
