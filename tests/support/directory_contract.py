"""What storages with directories promise beside `storage_contract`: directories are things, and can be renamed."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.errors import CorruptDataError

from support.storage_contract import StorageContract, failed_with, names

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage

__all__ = ["DirectoryContract"]


class DirectoryContract(StorageContract):
    """Inherit as `StorageContract`."""

    def test_without_a_root_nothing_is_listed_and_nothing_can_be_written(self, rootless: Storage) -> None:
        assert rootless.list("") == []
        assert rootless.list("a") == []
        assert rootless.size("a/b") is None
        failed_with(errno.ENOENT, lambda: rootless.get("a", max_bytes=1))
        failed_with(errno.ENOENT, lambda: rootless.put("a", b""))
        failed_with(errno.ENOENT, lambda: rootless.make_dir("a"))
        assert rootless.list("") == []

    def test_make_dir_accepts_a_directory_that_is_there_unless_told_otherwise(self, storage: Storage) -> None:
        storage.make_dir("")
        storage.make_dir("a")
        storage.make_dir("a")
        failed_with(errno.EEXIST, lambda: storage.make_dir("a", exist_ok=False))
        failed_with(errno.EEXIST, lambda: storage.make_dir("", exist_ok=False))

    def test_make_dir_never_brings_back_a_parent_that_is_gone(self, storage: Storage) -> None:
        failed_with(errno.ENOENT, lambda: storage.make_dir("gone/item"))
        assert storage.list("") == []

    def test_a_line_break_in_a_name_goes_round(self, storage: Storage) -> None:
        storage.make_dir("new\nline")
        storage.put("new\nline/a\nb", b"x")
        assert names(storage, "new\nline") == {"a\nb"}
        assert storage.get("new\nline/a\nb", max_bytes=1) == b"x"

    def test_make_dir_refuses_the_name_of_a_file(self, storage: Storage) -> None:
        storage.put("a", b"1")
        failed_with(errno.EEXIST, lambda: storage.make_dir("a"))
        failed_with(errno.ENOTDIR, lambda: storage.make_dir("a/b"))

    def test_a_directory_in_place_of_a_file_is_corrupt_data(self, storage: Storage) -> None:
        storage.make_dir("d")
        for call in (lambda: storage.get("d", max_bytes=1), lambda: storage.open_reader("d")):
            with pytest.raises(CorruptDataError):
                call()

    def test_rename_dir_moves_everything(self, storage: Storage) -> None:
        storage.make_dir("a")
        storage.make_dir("a/b")
        storage.put("a/b/f", b"1")
        assert storage.rename_dir("a", "z")
        assert names(storage) == {"z"}
        assert storage.get("z/b/f", max_bytes=1) == b"1"

    def test_rename_dir_tells_when_another_was_first(self, storage: Storage) -> None:
        assert not storage.rename_dir("gone", "new")
        assert not storage.rename_dir("gone/deeper", "new")
        storage.make_dir("there")
        assert not storage.rename_dir("gone", "there")
        assert names(storage) == {"there"}

    def test_rename_dir_has_one_winner_of_many(self, storage: Storage) -> None:
        storage.make_dir("a")
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda number: storage.rename_dir("a", f"to-{number}"), range(16)))
        assert sum(won) == 1
        assert names(storage) == {f"to-{won.index(True)}"}

    @pytest.mark.parametrize("target", ["empty", "full", "file"])
    def test_rename_dir_never_replaces_anything(self, storage: Storage, target: str) -> None:
        storage.make_dir("a")
        storage.put("a/f", b"1")
        storage.make_dir("empty")
        storage.make_dir("full")
        storage.put("full/f", b"2")
        storage.put("file", b"3")
        failed_with(errno.EEXIST, lambda: storage.rename_dir("a", target))
        assert names(storage) == {"a", "empty", "full", "file"}
        assert storage.get("full/f", max_bytes=1) == b"2"

    def test_rename_dir_wants_a_directory_and_a_place_for_it(self, storage: Storage) -> None:
        storage.put("f", b"")
        storage.make_dir("d")
        failed_with(errno.ENOTDIR, lambda: storage.rename_dir("f", "new"))
        failed_with(errno.ENOENT, lambda: storage.rename_dir("d", "gone/new"))

    def test_sync_dir_wants_a_directory(self, storage: Storage) -> None:
        storage.make_dir("d")
        storage.sync_dir("")
        storage.sync_dir("d")
        failed_with(errno.ENOENT, lambda: storage.sync_dir("gone"))

    def test_a_file_follows_its_directory_when_that_is_renamed_meanwhile(self, storage: Storage) -> None:
        storage.make_dir("attempt")
        with storage.open_writer("attempt/a", num_bytes=1) as kept:
            with storage.open_writer("attempt/b", num_bytes=1):
                storage.rename_dir("attempt", "trash")
                storage.make_dir("attempt")
                storage.put("attempt/b", b"another's")
            kept.append(b"1")
            kept.finish()
        assert names(storage, "trash") == {"a"}
        assert storage.get("attempt/b", max_bytes=9) == b"another's"

    def test_a_file_cannot_be_listed(self, storage: Storage) -> None:
        storage.put("f", b"1")
        failed_with(errno.ENOTDIR, lambda: storage.list("f"))

    def test_identity_changes_when_an_entry_is_replaced(self, storage: Storage) -> None:
        storage.put("f", b"1")
        storage.make_dir("d")
        before = {entry.name: entry.identity for entry in storage.list("")}
        assert before == {entry.name: entry.identity for entry in storage.list("")}
        storage.replace("f", b"2")
        storage.rename_dir("d", "aside")
        storage.make_dir("d")
        after = {entry.name: entry.identity for entry in storage.list("")}
        assert after["f"] != before["f"]
        assert after["d"] != before["d"]

    def test_a_directory_is_neither_created_nor_replaced_nor_deleted_as_a_file(self, storage: Storage) -> None:
        storage.make_dir("d")
        assert not storage.put_if_absent("d", b"")
        failed_with(errno.EISDIR, lambda: storage.replace("d", b""))
        failed_with(errno.EISDIR, lambda: storage.delete("d"))
        with pytest.raises(CorruptDataError):
            storage.size("d")
        assert names(storage) == {"d"}

    def test_below_a_file_there_is_no_file(self, storage: Storage) -> None:
        storage.put("f", b"1")
        with pytest.raises(CorruptDataError):
            storage.size("f/below")

    def test_an_open_writer_holds_its_name_and_needs_a_directory(self, storage: Storage) -> None:
        failed_with(errno.ENOENT, lambda: storage.open_writer("gone/f", num_bytes=1))
        with storage.open_writer("g", num_bytes=0):
            failed_with(errno.EEXIST, lambda: storage.put("g", b""))
