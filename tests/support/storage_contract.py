"""What every storage promises, object stores too; `directory_contract` adds what storages with directories do."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.errors import CorruptDataError, InvalidArgumentError

from support.file_contract import FileContract, failed_with

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


def names(storage: Storage, path: str = "") -> set[str]:
    return {entry.name for entry in storage.list(path)}


class StorageContract(FileContract):
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
