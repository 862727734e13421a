"""What every storage promises, object stores too; `directory_contract` adds what storages with directories do."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pytest

from safepoint.formats.checksum import BLOCK_BYTES, digest
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.storage import Storage

__all__ = ["StorageContract", "failed_with", "names"]

NAMES = [
    "plain",
    "实验 é",
    "with space",
    "per%cent",
    "back\\slash",
    ".hidden",
    "-dash",
    "a" * 200,
    "ünï.bin",
]
HOSTILE = ["/etc/passwd", "..", "../x", "a/../../x", "a//b", "a/", "/", ".", "a/.", "nul\0"]


def failed_with(number: int, call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        call()
    assert caught.value.errno == number, caught.value
    assert caught.value.path
    return caught.value


def names(storage: Storage, path: str = "") -> set[str]:
    return {entry.name for entry in storage.list(path)}


class StorageContract:
    """Inherit, and give a fixture `rootless`: a storage without a root, into which make_dir("") puts one."""

    @pytest.fixture
    def storage(self, rootless: Storage) -> Storage:
        rootless.make_dir("")
        return rootless

    def test_list_tells_directories_from_files(self, storage: Storage) -> None:
        storage.make_dir("d")
        storage.put("d/below", b"1")
        storage.put("f", b"1")
        assert {entry.name: entry.is_dir for entry in storage.list("")} == {"d": True, "f": False}

    def test_list_of_a_missing_directory_is_empty(self, storage: Storage) -> None:
        assert storage.list("gone") == []
        assert storage.list("gone/deeper") == []

    def test_the_identity_of_a_file_changes_when_it_is_replaced_if_there_is_one(self, storage: Storage) -> None:
        storage.put("f", b"1")
        before = storage.list("")[0].identity
        assert storage.list("")[0].identity == before
        storage.replace("f", b"2")
        assert not before or storage.list("")[0].identity != before

    @pytest.mark.parametrize("name", NAMES)
    def test_any_name_of_a_file_system_goes_round(self, storage: Storage, name: str) -> None:
        storage.make_dir(name)
        storage.put(f"{name}/{name}", b"x")
        assert names(storage) == {name}
        assert names(storage, name) == {name}
        assert storage.get(f"{name}/{name}", max_bytes=1) == b"x"
        storage.delete_tree(name)
        assert storage.list("") == []

    @pytest.mark.parametrize("path", HOSTILE)
    def test_paths_that_could_leave_the_root_are_refused_by_every_call(self, storage: Storage, path: str) -> None:
        storage.make_dir("ok")
        storage.put("ok/f", b"")
        calls: list[Callable[[], object]] = [
            lambda: storage.make_dir(path),
            lambda: storage.list(path),
            lambda: storage.size(path),
            lambda: storage.get(path, max_bytes=1),
            lambda: storage.put(path, b""),
            lambda: storage.put_if_absent(path, b""),
            lambda: storage.replace(path, b""),
            lambda: storage.read_versioned(path, max_bytes=1),
            lambda: storage.put_if_unchanged(path, b"", 0),
            lambda: storage.delete_if_unchanged(path, 0),
            lambda: storage.delete_dir(path),
            lambda: storage.rename_dir(path, "new"),
            lambda: storage.rename_dir("ok", path),
            lambda: storage.sync_dir(path),
            lambda: storage.delete(path),
            lambda: storage.delete_tree(path),
            lambda: storage.open_writer(path, num_bytes=0),
            lambda: storage.open_reader(path),
        ]
        for call in calls:
            with pytest.raises(InvalidArgumentError):
                call()
        assert names(storage) == {"ok"}

    def test_the_root_is_no_file_and_cannot_be_removed(self, storage: Storage) -> None:
        for call in (storage.delete, storage.delete_tree, storage.delete_dir, storage.size, storage.open_reader):
            with pytest.raises(InvalidArgumentError):
                call("")

    # Small files

    def test_put_creates_and_never_overwrites(self, storage: Storage) -> None:
        storage.put("f", b"one")
        failed_with(errno.EEXIST, lambda: storage.put("f", b"two"))
        assert storage.get("f", max_bytes=3) == b"one"

    def test_put_if_absent_says_who_was_first(self, storage: Storage) -> None:
        assert storage.put_if_absent("f", b"one")
        assert not storage.put_if_absent("f", b"two")
        assert storage.get("f", max_bytes=3) == b"one"
        assert names(storage) == {"f"}

    def test_put_if_absent_has_one_winner_of_many(self, storage: Storage) -> None:
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda number: storage.put_if_absent("f", b"%d" % number), range(32)))
        assert sum(won) == 1
        assert storage.get("f", max_bytes=9) == b"%d" % won.index(True)
        assert names(storage) == {"f"}

    def test_replace_creates_and_replaces_and_leaves_nothing_else(self, storage: Storage) -> None:
        storage.replace("f", b"one")
        storage.replace("f", b"two!")
        assert storage.get("f", max_bytes=4) == b"two!"
        assert names(storage) == {"f"}

    def test_a_reader_of_a_replaced_file_sees_old_or_new_never_a_part(self, storage: Storage) -> None:
        contents = [bytes([number]) * 5000 for number in range(4)]
        storage.replace("f", contents[0])
        stop = threading.Event()
        seen = set()

        def read() -> None:
            while not stop.is_set():
                seen.add(storage.get("f", max_bytes=5000))

        reader = threading.Thread(target=read)
        reader.start()
        for turn in range(40):
            storage.replace("f", contents[turn % 4])
        stop.set()
        reader.join()
        assert seen <= set(contents)

    def test_get_refuses_more_than_expected(self, storage: Storage) -> None:
        storage.put("f", b"12345")
        assert storage.get("f", max_bytes=5) == b"12345"
        with pytest.raises(CorruptDataError) as caught:
            storage.get("f", max_bytes=4)
        assert caught.value.path == storage.describe("f")

    def test_size_of_files_and_missing_things(self, storage: Storage) -> None:
        storage.put("f", b"12345")
        assert storage.size("f") == 5
        assert storage.size("gone") is None
        assert storage.size("gone/too") is None

    def test_delete_removes_a_file_once(self, storage: Storage) -> None:
        storage.put("f", b"")
        storage.delete("f")
        storage.delete("f")
        assert storage.list("") == []

    # What is there still as it was read

    def test_a_version_is_of_what_was_read(self, storage: Storage) -> None:
        assert storage.read_versioned("f", max_bytes=9) is None
        assert storage.read_versioned("gone/f", max_bytes=9) is None
        storage.put("f", b"one")
        found = storage.read_versioned("f", max_bytes=9)
        assert found is not None
        assert found.data == b"one"
        assert storage.read_versioned("f", max_bytes=9) == found
        storage.replace("f", b"two")
        other = storage.read_versioned("f", max_bytes=9)
        assert other is not None
        assert other.version != found.version
        with pytest.raises(CorruptDataError):
            storage.read_versioned("f", max_bytes=2)

    def test_only_what_is_unchanged_is_replaced(self, storage: Storage) -> None:
        storage.put("f", b"one")
        found = storage.read_versioned("f", max_bytes=9)
        assert found is not None
        assert storage.put_if_unchanged("f", b"two", found.version)
        assert not storage.put_if_unchanged("f", b"three", found.version)
        assert storage.get("f", max_bytes=9) == b"two"
        found = storage.read_versioned("f", max_bytes=9)
        assert found is not None
        storage.delete("f")
        assert not storage.put_if_unchanged("f", b"four", found.version)
        assert storage.list("") == []

    def test_of_many_who_read_one_version_one_replaces_it(self, storage: Storage) -> None:
        storage.put("f", b"start")
        found = storage.read_versioned("f", max_bytes=9)
        assert found is not None
        version = found.version
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda number: storage.put_if_unchanged("f", b"%d" % number, version), range(16)))
        assert sum(won) == 1
        assert storage.get("f", max_bytes=9) == b"%d" % won.index(True)
        assert names(storage) == {"f"}

    def test_only_what_is_unchanged_is_deleted(self, storage: Storage) -> None:
        storage.put("f", b"one")
        found = storage.read_versioned("f", max_bytes=9)
        assert found is not None
        storage.replace("f", b"two")
        assert not storage.delete_if_unchanged("f", found.version)
        found = storage.read_versioned("f", max_bytes=9)
        assert found is not None
        assert found.data == b"two"
        assert storage.delete_if_unchanged("f", found.version)
        assert storage.delete_if_unchanged("f", found.version)
        assert storage.list("") == []

    def test_delete_dir_takes_an_empty_one_only(self, storage: Storage) -> None:
        storage.make_dir("d")
        storage.put("d/f", b"1")
        assert not storage.delete_dir("d")
        storage.delete("d/f")
        assert storage.delete_dir("d")
        assert storage.delete_dir("d")
        assert storage.delete_dir("gone/deeper")
        assert storage.list("") == []

    def test_delete_tree_removes_all_below_and_nothing_beside(self, storage: Storage) -> None:
        for path in ("a", "a/b", "a/b/c", "beside"):
            storage.make_dir(path)
            storage.put(f"{path}/f", b"1")
        storage.delete_tree("a")
        storage.delete_tree("a")
        storage.delete_tree("gone/deeper")
        assert names(storage) == {"beside"}
        storage.delete_tree("beside/f")
        assert storage.list("beside") == []

    def test_delete_tree_by_several_at_once_ends_with_nothing_and_no_error(self, storage: Storage) -> None:
        storage.make_dir("a")
        for outer in range(6):
            storage.make_dir(f"a/{outer}")
            for inner in range(6):
                storage.put(f"a/{outer}/{inner}", b"")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(storage.delete_tree, ["a"] * 8))
        assert storage.list("") == []

    def test_free_bytes_is_a_count_or_unknown(self, rootless: Storage) -> None:
        free = rootless.free_bytes()
        assert free is None or free >= 0

    # Large files

    @pytest.mark.parametrize("block_bytes", [1, 7, 4096, 1 << 16, BLOCK_BYTES])
    @pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 20_000])
    def test_a_written_file_reads_back_with_a_digest_a_block(
        self, storage: Storage, num_bytes: int, block_bytes: int
    ) -> None:
        data = np.random.default_rng(num_bytes).bytes(num_bytes)
        with storage.open_writer("f", num_bytes=num_bytes, block_bytes=block_bytes) as writer:
            for start in range(0, num_bytes, 999):
                writer.append(data[start : start + 999])
            written = writer.finish()
        assert written.num_bytes == num_bytes
        assert written.block_bytes == block_bytes
        expected = tuple(digest(data[start : start + block_bytes]) for start in range(0, num_bytes, block_bytes))
        assert written.digests == expected
        assert storage.size("f") == num_bytes
        assert storage.get("f", max_bytes=num_bytes) == data

    def test_a_file_of_several_blocks_of_the_default_size(self, storage: Storage) -> None:
        data = np.random.default_rng(0).integers(0, 256, 2 * BLOCK_BYTES + 12_345, dtype=np.uint8)
        with storage.open_writer("f", num_bytes=data.nbytes) as writer:
            writer.append(b"")
            writer.append(data[:1].data)
            writer.append(data[1:100_001].view(np.uint16).data)
            writer.append(data[100_001:].reshape(1, -1).data)
            written = writer.finish()
        starts = range(0, data.nbytes, BLOCK_BYTES)
        assert written.digests == tuple(digest(data[start : start + BLOCK_BYTES].data) for start in starts)
        assert storage.get("f", max_bytes=data.nbytes) == data.tobytes()

    def test_what_was_appended_may_be_changed_afterwards(self, storage: Storage) -> None:
        scratch = np.zeros(1 << 20, dtype=np.uint8)
        with storage.open_writer("f", num_bytes=8 << 20, block_bytes=1 << 18) as writer:
            for number in range(8):
                scratch[:] = number
                writer.append(scratch.data)
                scratch[:] = 255
            writer.finish()
        read = np.frombuffer(storage.get("f", max_bytes=8 << 20), dtype=np.uint8)
        assert (read.reshape(8, -1) == np.arange(8, dtype=np.uint8)[:, None]).all()

    def test_open_writer_is_exclusive(self, storage: Storage) -> None:
        storage.put("f", b"1")

        def write() -> None:
            with storage.open_writer("f", num_bytes=1) as writer:
                writer.append(b"2")
                writer.finish()

        failed_with(errno.EEXIST, write)
        assert storage.get("f", max_bytes=1) == b"1"

    def test_a_writer_that_is_left_before_its_end_leaves_no_file(self, storage: Storage) -> None:
        with storage.open_writer("f", num_bytes=10) as writer:
            writer.append(b"12345")
        assert storage.list("") == []

        def fail() -> None:
            with storage.open_writer("f", num_bytes=10, block_bytes=2) as writer:
                writer.append(b"12345")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert storage.list("") == []

    def test_abort_twice_and_after_finish_does_nothing(self, storage: Storage) -> None:
        writer = storage.open_writer("f", num_bytes=1)
        writer.abort()
        writer.abort()
        assert storage.list("") == []
        with storage.open_writer("f", num_bytes=1) as writer:
            writer.append(b"1")
            writer.finish()
            writer.abort()
        assert storage.get("f", max_bytes=1) == b"1"
        for call in (writer.finish, lambda: writer.append(b"")):
            with pytest.raises(InvalidArgumentError):
                call()

    def test_a_writer_holds_the_caller_to_the_announced_size(self, storage: Storage) -> None:
        with storage.open_writer("f", num_bytes=3) as writer, pytest.raises(InvalidArgumentError, match="announced"):
            writer.append(b"1234")
        with storage.open_writer("f", num_bytes=3) as writer:
            writer.append(b"12")
            with pytest.raises(InvalidArgumentError, match="announced"):
                writer.finish()
        assert storage.list("") == []
        with pytest.raises(InvalidArgumentError):
            storage.open_writer("f", num_bytes=-1)
        with pytest.raises(InvalidArgumentError):
            storage.open_writer("f", num_bytes=1, block_bytes=0)

    def test_a_writer_takes_contiguous_memory_only(self, storage: Storage) -> None:
        with storage.open_writer("f", num_bytes=4) as writer, pytest.raises(InvalidArgumentError):
            writer.append(np.zeros(8, dtype=np.uint8)[::2].data)

    def test_a_reader_fills_several_buffers_one_after_the_other(self, storage: Storage) -> None:
        storage.put("f", bytes(range(100)))
        buffers = [bytearray(length) for length in (3, 0, 60, 1)]
        with storage.open_reader("f", num_bytes=100) as reader:
            reader.read_parts_into(5, [memoryview(buffer) for buffer in buffers])
            reader.read_parts_into(5, [])
            assert b"".join(buffers) == bytes(range(5, 69))
            with pytest.raises(CorruptDataError):
                reader.read_parts_into(50, [memoryview(bytearray(50)), memoryview(bytearray(1))])

    @pytest.mark.parametrize("num_bytes", [0, 1, 5, 4096])
    @pytest.mark.parametrize("guess", [None, 0, 1, 5, 4096, 10_000])
    def test_a_size_is_right_whatever_was_expected(self, storage: Storage, num_bytes: int, guess: int | None) -> None:
        storage.put("f", bytes(num_bytes))
        assert storage.size("f", expected=guess) == num_bytes
        assert storage.size("gone", expected=guess) is None
        with storage.open_reader("f", num_bytes=guess) as reader:
            assert reader.num_bytes == num_bytes

    def test_a_reader_reads_any_range_and_refuses_what_is_beyond(self, storage: Storage) -> None:
        storage.put("f", bytes(range(100)))
        with storage.open_reader("f") as reader:
            assert reader.num_bytes == 100
            for offset, length in ((0, 100), (0, 0), (100, 0), (99, 1), (17, 40)):
                buffer = bytearray(length)
                reader.read_into(offset, memoryview(buffer))
                assert buffer == bytes(range(offset, offset + length))
            with pytest.raises(CorruptDataError) as caught:
                reader.read_into(90, memoryview(bytearray(11)))
            assert caught.value.path == storage.describe("f")
        reader.close()

    def test_open_reader_of_what_is_missing(self, storage: Storage) -> None:
        error = failed_with(errno.ENOENT, lambda: storage.open_reader("gone"))
        assert error.path == storage.describe("gone")
        assert error.hint
