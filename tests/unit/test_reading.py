"""The read engine against files in memory, and a storage that counts what is read."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from safepoint.formats.checksum import digest
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, StorageError
from safepoint.formats.reading import read_segments, verify_file
from safepoint.formats.segments import ReadSegment
from safepoint.formats.storage import LocalStorage, MemoryStorage
from safepoint.formats.storage.buffers import BUFFERS
from safepoint.formats.storage.memory import MemoryReader

from support.faulty_storage import Fail, FaultyStorage
from support.stored_files import STEP, add_file, content

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.storage.base import FileReader

BLOCK = 100


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "safepoint-reader"]
    assert BUFFERS.lent_bytes == 0


def make_storage(sizes: list[int], block_bytes: int = BLOCK) -> tuple[FaultyStorage, list[FileEntry], list[bytes]]:
    inner = MemoryStorage()
    inner.make_dir("")
    inner.make_dir(STEP)
    contents = [content(index, size) for index, size in enumerate(sizes)]
    files = [add_file(inner, f"f{index}", data, block_bytes) for index, data in enumerate(contents)]
    return FaultyStorage(inner), files, contents


def segment(file: int, offset: int, num_bytes: int, leaf: str = "model.w") -> ReadSegment:
    return ReadSegment(file=file, offset=offset, target=memoryview(bytearray(num_bytes)), leaf=leaf)


def test_ranges_of_several_files_arrive_whole() -> None:
    storage, files, contents = make_storage([1000, 0, 57, 350])
    wanted = [(3, 0, 350), (0, 5, 990), (2, 56, 1), (0, 100, 100), (0, 0, 1), (1, 0, 0), (0, 999, 1)]
    segments = [segment(*one) for one in wanted]
    read_segments(storage, STEP, files, segments)
    for (file, offset, num_bytes), one in zip(wanted, segments, strict=True):
        assert one.target == contents[file][offset : offset + num_bytes]


def test_a_block_is_read_once_however_many_want_of_it() -> None:
    storage, files, contents = make_storage([1000])
    segments = [segment(0, offset, 30) for offset in (100, 110, 130, 170)]
    segments += [segment(0, 100, 100), segment(0, 50, 200), segment(0, 100, 100)]
    assert read_segments(storage, STEP, files, segments) == 300
    assert storage.counts["reader.read_into"] == 3
    assert all(one.target == contents[0][one.offset : one.offset + len(one.target)] for one in segments)


def test_only_blocks_that_are_wanted_are_read_and_only_their_files_opened() -> None:
    storage, files, _ = make_storage([10_000, 500, 500])
    progress: list[int] = []
    segments = [segment(0, 150, 10), segment(0, 9_950, 50), segment(2, 0, 0)]
    assert read_segments(storage, STEP, files, segments, progress=progress.append) == 200
    assert progress == [100, 100]
    assert storage.counts == {"open_reader": 1, "reader.read_into": 2, "reader.close": 1}


class Requests(MemoryStorage):
    """A storage that notes what it is asked for, as one that takes a whole run of blocks in one request."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    @override
    def open_reader(self, path: str, *, num_bytes: int | None = None) -> FileReader:
        storage = self

        class Reader(MemoryReader):
            @override
            def read_parts_into(self, offset: int, parts: list[memoryview]) -> None:
                storage.asked.append((offset, sum(map(len, parts))))
                super().read_parts_into(offset, parts)

        return Reader(self.get(path, max_bytes=1 << 20), path)


@pytest.mark.parametrize(
    ("read_bytes", "expected"),
    [
        (0, [(0, 100), (100, 100), (200, 100), (300, 100), (600, 100), (900, 50)]),
        (100, [(0, 100), (100, 100), (200, 100), (300, 100), (600, 100), (900, 50)]),
        (250, [(0, 200), (200, 200), (600, 100), (900, 50)]),
        (4000, [(0, 400), (600, 100), (900, 50)]),
    ],
)
def test_blocks_that_follow_each_other_are_asked_for_at_once(read_bytes: int, expected: list[tuple[int, int]]) -> None:
    storage = Requests()
    storage.read_bytes = read_bytes
    storage.make_dir("")
    storage.make_dir(STEP)
    data = content(0, 950)
    entry = add_file(storage, "f", data, BLOCK)
    segments = [segment(0, 50, 300), segment(0, 0, 10), segment(0, 350, 1), segment(0, 699, 1), segment(0, 949, 1)]
    assert read_segments(storage, STEP, [entry], segments) == 650 - 100
    assert all(one.target == data[one.offset : one.offset + len(one.target)] for one in segments)
    assert sorted(storage.asked) == expected
    storage.asked.clear()
    verify_file(storage, STEP, entry)


def test_nothing_wanted_reads_nothing() -> None:
    storage, files, _ = make_storage([100])
    assert read_segments(storage, STEP, files, []) == 0
    assert storage.log == []


@given(st.data())
def test_any_segments_equal_slices_of_the_files(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 400), min_size=1, max_size=3))
    storage, files, contents = make_storage(sizes, data.draw(st.integers(1, 130)))
    storage.read_bytes = data.draw(st.sampled_from([0, 1, 200, 1000]))
    segments = []
    for _ in range(data.draw(st.integers(0, 12))):
        file = data.draw(st.integers(0, len(sizes) - 1))
        offset = data.draw(st.integers(0, sizes[file]))
        segments.append(segment(file, offset, data.draw(st.integers(0, sizes[file] - offset))))
    num_bytes = read_segments(storage, STEP, files, segments)
    assert all(one.target == contents[one.file][one.offset : one.offset + len(one.target)] for one in segments)
    touched = {
        (one.file, position // files[one.file].block_bytes)
        for one in segments
        for position in range(one.offset, one.offset + len(one.target))
    }
    assert storage.counts["reader.read_into"] == len(touched)  # parts of a request
    assert num_bytes == sum(
        min(files[file].block_bytes, sizes[file] - number * files[file].block_bytes) for file, number in touched
    )


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_large_files_on_disk_are_read_by_several_threads(tmp_path: Path, num_threads: int) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_dir(STEP)
    contents = [content(1, 20 << 20), content(2, 3 << 20)]
    files = [add_file(storage, f"é {index}", data, 1 << 20) for index, data in enumerate(contents)]
    targets = [np.zeros(len(data), dtype=np.uint8) for data in contents]
    segments = [
        ReadSegment(file=file, offset=start, target=target[start : start + 1_500_000].data, leaf="w")
        for file, target in enumerate(targets)
        for start in range(0, len(target), 1_500_000)
    ]
    progress: list[int] = []
    total = sum(map(len, contents))
    assert read_segments(storage, STEP, files, segments, num_threads=num_threads, progress=progress.append) == total
    assert sum(progress) == total
    assert [target.tobytes() for target in targets] == contents


# Damage


@pytest.mark.parametrize("position", [0, 99, 100, 250, 319])
def test_a_flipped_bit_in_any_block_is_found_and_names_file_and_leaf(position: int) -> None:
    storage, files, contents = make_storage([320, 320])
    damaged = bytearray(contents[1])
    damaged[position] ^= 4
    storage.replace(f"{STEP}/f1", bytes(damaged))
    segments = [segment(0, 0, 320, "fine"), segment(1, 0, 320, "model.damaged")]
    with pytest.raises(CorruptDataError) as caught:
        read_segments(storage, STEP, files, segments)
    error = caught.value
    assert error.path == storage.describe(f"{STEP}/f1")
    assert error.leaf == "model.damaged"
    assert error.target_modified is True
    assert error.hint
    assert storage.counts["reader.close"] == storage.counts["open_reader"]
    with pytest.raises(CorruptDataError) as caught:
        verify_file(storage, STEP, files[1])
    assert caught.value.path == storage.describe(f"{STEP}/f1")
    assert caught.value.target_modified is False
    verify_file(storage, STEP, files[0])


def test_damage_in_a_block_that_nobody_wants_does_not_matter() -> None:
    storage, files, contents = make_storage([320])
    storage.replace(f"{STEP}/f0", contents[0][:-1] + b"\0")
    one = segment(0, 10, 200)
    read_segments(storage, STEP, files, [one])
    assert one.target == contents[0][10:210]


@pytest.mark.parametrize("num_bytes", [0, 199, 319, 321])
def test_a_file_of_another_size_is_found_before_it_is_read(num_bytes: int) -> None:
    storage, files, contents = make_storage([320])
    storage.replace(f"{STEP}/f0", (contents[0] + b"x")[:num_bytes])
    with pytest.raises(CorruptDataError, match="320 when it was committed") as caught:
        read_segments(storage, STEP, files, [segment(0, 0, 10)])
    assert caught.value.leaf == "model.w"
    assert caught.value.target_modified is True
    assert storage.counts["reader.read_into"] == 0
    with pytest.raises(CorruptDataError):
        verify_file(storage, STEP, files[0])


def test_swapped_files_of_one_size_are_found() -> None:
    storage, files, contents = make_storage([320, 320])
    storage.replace(f"{STEP}/f0", contents[1])
    storage.replace(f"{STEP}/f1", contents[0])
    with pytest.raises(CorruptDataError):
        read_segments(storage, STEP, files, [segment(0, 0, 1)])


def test_a_file_that_is_gone_is_a_storage_error_with_the_leaf() -> None:
    storage, files, _ = make_storage([320])
    storage.delete(f"{STEP}/f0")
    with pytest.raises(StorageError) as caught:
        read_segments(storage, STEP, files, [segment(0, 0, 1)])
    assert caught.value.errno == errno.ENOENT
    assert caught.value.leaf == "model.w"


# Failing


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_of_any_call_surfaces_typed_and_closes_what_is_open(num_threads: int) -> None:
    storage, files, _ = make_storage([1 << 20, 12 << 20, 100], 1 << 20)
    segments = [segment(index, 0, files[index].num_bytes) for index in range(3)]
    read_segments(storage, STEP, files, segments)
    total = storage.num_calls
    for at in range(1, total + 1):
        faulty = FaultyStorage(storage.inner, at=at, fault=Fail(errno.EIO))
        try:
            read_segments(faulty, STEP, files, segments, num_threads=num_threads)
        except StorageError as error:
            assert error.errno == errno.EIO  # noqa: PT017
            assert error.leaf == "model.w"  # noqa: PT017
        else:
            assert not faulty.fired
        assert faulty.counts["reader.close"] >= faulty.counts["open_reader"] - 1


def test_what_progress_raises_stops_the_reading() -> None:
    storage, files, _ = make_storage([12 << 20], 1 << 20)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read_segments(storage, STEP, files, [segment(0, 0, 12 << 20)], progress=stop)
    assert storage.counts["reader.read_into"] <= 3


@pytest.mark.parametrize(
    "bad",
    [
        segment(1, 0, 1),
        segment(-1, 0, 1),
        segment(0, -1, 1),
        segment(0, 320, 1),
        segment(0, 319, 2),
        ReadSegment(file=0, offset=0, target=memoryview(b"123"), leaf="model.w"),
        ReadSegment(file=0, offset=0, target=memoryview(bytearray(8)).cast("I"), leaf="model.w"),
        ReadSegment(file=0, offset=0, target=memoryview(bytearray(8))[::2], leaf="model.w"),
    ],
)
def test_a_segment_that_cannot_be_filled_is_refused_before_anything_is_read(bad: ReadSegment) -> None:
    storage, files, _ = make_storage([320])
    with pytest.raises(InvalidArgumentError) as caught:
        read_segments(storage, STEP, files, [segment(0, 0, 1), bad])
    assert caught.value.leaf == "model.w"
    assert storage.log == []


def test_a_wrong_digest_keeps_what_shares_the_block_untouched_unless_it_was_read_straight() -> None:
    storage, files, contents = make_storage([100])
    storage.replace(f"{STEP}/f0", contents[0][:-1] + b"\0")
    one = segment(0, 0, 50)
    with pytest.raises(CorruptDataError):
        read_segments(storage, STEP, files, [one])
    assert one.target == bytes(50)
    assert digest(contents[0]) == files[0].digests[0]


def test_a_large_block_of_few_parts_is_read_straight_into_them(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_dir(STEP)
    data = content(3, 3 << 20)
    file = add_file(storage, "f", data, 1 << 20)
    places = [(4096, 300_000), (304_096, 500_000), (900_000, 1_500_000), (2_400_001, 700_000)]
    segments = [segment(0, *place) for place in places]
    assert read_segments(storage, STEP, [file], segments) == 3 << 20
    assert all(one.target == data[one.offset : one.offset + len(one.target)] for one in segments)
    (tmp_path / STEP / "f").write_bytes(data[:2_000_000] + bytes([data[2_000_000] ^ 1]) + data[2_000_001:])
    with pytest.raises(CorruptDataError, match="digest"):
        read_segments(storage, STEP, [file], segments)
