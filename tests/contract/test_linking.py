"""What every storage promises of second names of files, and what the local one makes of refusals."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, StorageError
from safepoint.formats.storage import LocalStorage, MemoryStorage, Storage
from safepoint.formats.storage.system import SystemCalls

from support.faulty_storage import FaultyStorage
from support.power_cut import Recorder

if TYPE_CHECKING:
    from pathlib import Path


class LinkContract:
    """Inherit, and give a fixture `rootless`: a storage that has links, without a root."""

    @pytest.fixture
    def storage(self, rootless: Storage) -> Storage:
        rootless.make_dir("")
        rootless.make_dir("a")
        rootless.make_dir("b")
        rootless.put("a/f", b"content")
        return rootless

    def test_both_names_are_the_file_and_either_may_go(self, storage: Storage) -> None:
        assert storage.link_file("a/f", "b/g")
        assert storage.get("b/g", max_bytes=9) == b"content"
        assert storage.size("b/g") == 7
        (one,), (other,) = storage.list("a"), storage.list("b")
        assert one.identity == other.identity
        storage.delete_tree("a")
        assert storage.get("b/g", max_bytes=9) == b"content"

    def test_a_source_that_is_gone_is_told_and_leaves_nothing(self, storage: Storage) -> None:
        assert not storage.link_file("a/none", "b/g")
        assert not storage.link_file("none/f", "b/g")
        assert storage.list("b") == []

    def test_a_taken_name_stays_what_it_is(self, storage: Storage) -> None:
        storage.put("b/g", b"other")
        storage.make_dir("b/d")
        for target in ("b/g", "b/d", "a/f"):
            with pytest.raises(StorageError) as caught:
                storage.link_file("a/f", target)
            assert caught.value.errno == errno.EEXIST
        assert storage.get("b/g", max_bytes=9) == b"other"

    def test_a_missing_place_is_an_error_and_not_made(self, storage: Storage) -> None:
        with pytest.raises(StorageError) as caught:
            storage.link_file("a/f", "c/g")
        assert caught.value.errno == errno.ENOENT
        assert {entry.name for entry in storage.list("")} == {"a", "b"}

    def test_only_files_are_linked(self, storage: Storage) -> None:
        with pytest.raises(CorruptDataError):
            storage.link_file("a", "b/g")
        assert storage.list("b") == []

    @pytest.mark.parametrize("path", ["", "..", "../x", "/x", "a//f", "nul\0"])
    def test_paths_that_could_leave_the_root_are_refused(self, storage: Storage, path: str) -> None:
        for source, target in ((path, "b/g"), ("a/f", path)):
            with pytest.raises(InvalidArgumentError):
                storage.link_file(source, target)


class TestLocalLinks(LinkContract):
    @pytest.fixture
    def rootless(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "root")


class TestMemoryLinks(LinkContract):
    @pytest.fixture
    def rootless(self) -> Storage:
        return MemoryStorage()


class TestFaultyLinksAtPeace(LinkContract):
    @pytest.fixture
    def rootless(self, tmp_path: Path) -> Storage:
        return FaultyStorage(LocalStorage(tmp_path / "root"))


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_refusal_of_the_file_system_is_an_answer_and_no_error(tmp_path: Path, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    storage = LocalStorage(tmp_path, calls=SystemCalls(link_into=refuse))
    storage.put("f", b"x")
    assert not storage.link_file("f", "g")
    assert {entry.name for entry in storage.list("")} == {"f"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_failure_is_an_error_that_names_the_new_file(tmp_path: Path, number: int) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    storage = LocalStorage(tmp_path, calls=SystemCalls(link_into=fail))
    storage.put("f", b"x")
    with pytest.raises(StorageError) as caught:
        storage.link_file("f", "g")
    assert caught.value.errno == number
    assert caught.value.path == f"{tmp_path}/g"


def test_a_link_count_that_is_not_durable_is_no_link(tmp_path: Path) -> None:
    synced = []

    def sync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_nlink)
        raise OSError(errno.EIO, "")

    LocalStorage(tmp_path).put("f", b"x")
    with pytest.raises(StorageError):
        LocalStorage(tmp_path, calls=SystemCalls(fsync=sync)).link_file("f", "g")
    assert synced == [2]
    assert {entry.name for entry in LocalStorage(tmp_path).list("")} == {"f"}


@pytest.mark.parametrize("kind", ["link", "dangling", "directory link", "fifo"])
def test_what_is_no_regular_file_inside_the_root_is_never_linked(tmp_path: Path, kind: str) -> None:
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    (outside / "f").write_bytes(b"secret")
    storage = LocalStorage(root)
    storage.make_dir("")
    storage.make_dir("b")
    if kind == "directory link":
        (root / "a").symlink_to(outside)
    else:
        (root / "a").mkdir()
        if kind == "fifo":
            os.mkfifo(root / "a/f")
        else:
            (root / "a/f").symlink_to(outside / ("f" if kind == "link" else "none"))
    with pytest.raises(CorruptDataError):
        storage.link_file("a/f", "b/g")
    assert storage.list("b") == []


def test_a_file_that_is_swapped_for_a_link_meanwhile_is_not_linked(tmp_path: Path) -> None:
    def swap(source_dir: int, source: str, target_dir: int, target: str) -> None:
        os.unlink(source, dir_fd=source_dir)
        os.symlink("/etc/passwd", source, dir_fd=source_dir)
        os.link(source, target, src_dir_fd=source_dir, dst_dir_fd=target_dir, follow_symlinks=False)

    storage = LocalStorage(tmp_path, calls=SystemCalls(link_into=swap))
    storage.put("f", b"x")
    with pytest.raises(CorruptDataError):
        storage.link_file("f", "g")
    assert not (tmp_path / "g").is_symlink()


def test_a_link_lasts_from_the_sync_of_its_directory_on(tmp_path: Path) -> None:
    recorder = Recorder(LocalStorage(tmp_path))
    recorder.make_dir("")
    for name in ("a", "b"):
        recorder.make_dir(name)
    recorder.sync_dir("")
    recorder.put("a/f", b"x")
    recorder.sync_dir("a")
    recorder.link_file("a/f", "b/g")
    linked = len(recorder.events)
    recorder.sync_dir("b")
    recorder.delete_tree("a")
    before = {tuple(entry.name for entry in disk.list("b")) for disk in recorder.disks_after(linked, samples=0)}
    assert before == {(), ("g",)}
    for disk in recorder.disks_after(len(recorder.events), samples=4):
        assert disk.get("b/g", max_bytes=1) == b"x"
