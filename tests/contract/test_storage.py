"""The storages of this process keep the contract, and so does the faulty wrapper, at peace."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.storage import LocalStorage, MemoryObjects, MemoryStorage, Storage, open_storage

from support.directory_contract import DirectoryContract
from support.faulty_storage import FaultyStorage
from support.storage_contract import StorageContract, failed_with, names

if TYPE_CHECKING:
    from pathlib import Path


class TestLocalStorage(DirectoryContract):
    @pytest.fixture
    def rootless(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "runs" / "é 1")


class TestMemoryStorage(DirectoryContract):
    @pytest.fixture
    def rootless(self) -> Storage:
        return MemoryStorage()

    def test_a_full_storage_says_what_is_needed_and_keeps_nothing(self) -> None:
        storage = MemoryStorage(capacity_bytes=100)
        storage.make_dir("")
        storage.put("f", bytes(90))
        error = failed_with(errno.ENOSPC, lambda: storage.put("g", bytes(11)))
        assert error.hint is not None
        assert "11 bytes" in error.hint
        assert "10 are free" in error.hint
        with storage.open_writer("h", num_bytes=11) as writer:
            writer.append(bytes(11))
            failed_with(errno.ENOSPC, writer.finish)
        assert names(storage) == {"f"}


class TestFaultyStorageAtPeace(DirectoryContract):
    @pytest.fixture
    def rootless(self) -> Storage:
        return FaultyStorage(MemoryStorage())


class TestMemoryObjects(StorageContract):
    @pytest.fixture
    def rootless(self) -> Storage:
        return MemoryObjects()

    def test_nothing_is_renamed_and_directories_are_only_what_keys_have_in_front(self, rootless: Storage) -> None:
        assert not rootless.renames
        rootless.make_dir("gone/item")
        assert rootless.list("") == []
        rootless.put("a/b/f", b"1")
        assert names(rootless, "a") == {"b"}
        failed_with(errno.EOPNOTSUPP, lambda: rootless.rename_dir("a", "z"))
        failed_with(errno.EEXIST, lambda: rootless.make_dir("a", exist_ok=False))
        assert names(rootless) == {"a"}


class TestFaultyObjectsAtPeace(StorageContract):
    @pytest.fixture
    def rootless(self) -> Storage:
        return FaultyStorage(MemoryObjects())


def test_a_root_is_opened_by_its_path_or_url(tmp_path: Path) -> None:
    local = open_storage(tmp_path)
    assert isinstance(local, LocalStorage)
    assert open_storage(f"file://{tmp_path}/a%20b").location == f"{tmp_path}/a b"
    objects = open_storage("memory://contract/run")
    assert open_storage("memory://contract/run/") is objects
    assert open_storage("memory://contract/other") is not objects
    assert objects.describe("1") == "memory://contract/run/1"
    assert not local.is_remote
    assert not objects.is_remote  # nothing is handed on: each process has a memory of its own


@pytest.mark.parametrize("root", ["ftp://host/x", "memory://", "file://host/x", "http://a/b"])
def test_a_url_of_no_known_storage_is_refused(root: str) -> None:
    with pytest.raises(InvalidArgumentError):
        open_storage(root)
