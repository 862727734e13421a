"""What only a real file system shows: links, permissions, direct I/O, and what becomes of its errors."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from safepoint.formats.checksum import digest
from safepoint.formats.errors import CorruptDataError, StorageError
from safepoint.formats.storage import LocalStorage
from safepoint.formats.storage.system import SystemCalls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Buffer

MIB = 1 << 20


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "root")
    storage.make_dir("")
    return storage


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o22)
    yield os.umask
    os.umask(before)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def write_file(storage: LocalStorage, path: str, data: bytes, *, block_bytes: int = MIB) -> tuple[str, ...]:
    with storage.open_writer(path, num_bytes=len(data), block_bytes=block_bytes) as writer:
        writer.append(data[:100])
        writer.append(data[100:])
        return writer.finish().digests


@dataclass
class FailingCalls:
    """Counts one system call and answers chosen ones (from 1) with an errno, or cuts them short."""

    errors: dict[int, int] = field(default_factory=dict)
    short: bool = False
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def _meet(self) -> None:
        with self.lock:
            self.count += 1
            number = self.errors.get(self.count)
        if number is not None:
            raise OSError(number, os.strerror(number))

    def pwrite(self, descriptor: int, data: Buffer, offset: int) -> int:
        self._meet()
        view = memoryview(data)
        return os.pwrite(descriptor, view[: max(1, len(view) // 3)] if self.short else view, offset)

    def preadv(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._meet()
        view = memoryview(buffers[0])
        return os.preadv(descriptor, [view[: max(1, len(view) // 3)] if self.short else view], offset)

    def fsync(self, descriptor: int) -> None:
        self._meet()
        os.fsync(descriptor)

    def refuse(self, *_: object) -> None:
        self._meet()
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


# Permissions


@pytest.mark.parametrize("mask", [0o022, 0o002, 0o077])
def test_files_and_directories_appear_under_the_users_umask(
    tmp_path: Path, umask: Callable[[int], int], mask: int
) -> None:
    umask(mask)
    storage = LocalStorage(tmp_path / "new" / "root")
    storage.make_dir("")
    storage.make_dir("d")
    storage.put("put", b"")
    storage.put_if_absent("absent", b"")
    storage.replace("replaced", b"")
    write_file(storage, "written", bytes(300))
    for name in ("put", "absent", "replaced", "written"):
        assert (storage.root / name).stat().st_mode & 0o777 == 0o666 & ~mask
    for name in ("", "d", ".."):
        assert (storage.root / name).stat().st_mode & 0o777 == 0o777 & ~mask


def test_a_relative_root_does_not_move_with_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("runs")
    monkeypatch.chdir("elsewhere")
    storage.make_dir("")
    assert (tmp_path / "runs").is_dir()


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError) as caught:
        LocalStorage(tmp_path / "file").make_dir("")
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(StorageError) as caught:
        LocalStorage(tmp_path / "file" / "below").make_dir("")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    LocalStorage(tmp_path / "link").put("f", b"1")
    assert (tmp_path / "real" / "f").read_bytes() == b"1"


# Links and other things that do not belong in a step


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    outside = tmp_path / "outside"
    (outside / "deeper").mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    return outside


@pytest.mark.parametrize("as_link", ["file", "directory", "dangling"])
def test_no_link_below_the_root_is_read_through(storage: LocalStorage, outside: Path, as_link: str) -> None:
    storage.make_dir("step")
    if as_link == "directory":
        (storage.root / "step" / "item").symlink_to(outside)
    else:
        storage.make_dir("step/item")
        target = outside / "secret" if as_link == "file" else outside / "nothing"
        (storage.root / "step" / "item" / "secret").symlink_to(target)
    for call in (
        lambda: storage.get("step/item/secret", max_bytes=99),
        lambda: storage.size("step/item/secret"),
        lambda: storage.open_reader("step/item/secret"),
    ):
        with pytest.raises(CorruptDataError) as caught:
            call()
        assert caught.value.path == str(storage.root / "step/item/secret")
        assert caught.value.hint


def test_no_link_below_the_root_is_written_or_listed_through(storage: LocalStorage, outside: Path) -> None:
    (storage.root / "d").symlink_to(outside)
    (storage.root / "f").symlink_to(outside / "secret")
    (storage.root / "dangling").symlink_to(outside / "made")
    storage.make_dir("real")
    calls: list[Callable[[], object]] = [
        lambda: storage.list("d"),
        lambda: storage.make_dir("d"),
        lambda: storage.make_dir("d/x"),
        lambda: storage.put("d/x", b""),
        lambda: storage.put("f", b""),
        lambda: storage.put("dangling", b""),
        lambda: storage.replace("d/x", b""),
        lambda: storage.put_if_absent("d/x", b""),
        lambda: storage.open_writer("d/x", num_bytes=1),
        lambda: storage.open_writer("dangling", num_bytes=1),
        lambda: storage.rename_dir("d", "new"),
        lambda: storage.rename_dir("d/deeper", "new"),
        lambda: storage.rename_dir("real", "d/new"),
        lambda: storage.sync_dir("d"),
        lambda: storage.delete("d/secret"),
        lambda: storage.delete_tree("d/deeper"),
    ]
    for call in calls:
        with pytest.raises(StorageError) as caught:
            call()
        assert caught.value.hint
    assert not storage.put_if_absent("f", b"")
    storage.replace("f", b"ours")
    assert storage.get("f", max_bytes=4) == b"ours"
    assert sorted(os.listdir(outside)) == ["deeper", "secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_delete_tree_removes_links_and_not_what_they_point_to(storage: LocalStorage, outside: Path) -> None:
    storage.make_dir("step")
    (storage.root / "step" / "d").symlink_to(outside)
    (storage.root / "step" / "f").symlink_to(outside / "secret")
    (storage.root / "step" / "self").symlink_to(".")
    os.mkfifo(storage.root / "step" / "fifo")
    (storage.root / "link").symlink_to(outside)
    storage.delete_tree("step")
    storage.delete_tree("link")
    assert storage.list("") == []
    assert (outside / "secret").read_bytes() == b"secret"


def test_delete_tree_stops_at_a_depth_that_no_step_has(storage: LocalStorage) -> None:
    deep = storage.root
    for _ in range(100):
        deep /= "d"
        deep.mkdir()
    with pytest.raises(StorageError) as caught:
        storage.delete_tree("d")
    assert caught.value.errno == errno.ELOOP


def test_a_pipe_in_place_of_a_file_neither_blocks_nor_is_read(storage: LocalStorage) -> None:
    os.mkfifo(storage.root / "f")
    for call in (lambda: storage.get("f", max_bytes=9), lambda: storage.size("f"), lambda: storage.open_reader("f")):
        with pytest.raises(CorruptDataError):
            call()


def test_names_that_are_no_text_are_listed_and_removed(storage: LocalStorage) -> None:
    os.mkdir(os.fsencode(storage.root) + b"/\xff\xfe")
    (entry,) = storage.list("")
    storage.delete_tree(entry.name)
    assert storage.list("") == []


# What file systems lack


def test_without_renameat2_a_rename_still_replaces_nothing(tmp_path: Path) -> None:
    calls = FailingCalls()
    storage = LocalStorage(tmp_path, calls=SystemCalls(rename_noreplace=calls.refuse))
    for name in ("a", "empty", "full"):
        storage.make_dir(name)
    storage.put("full/f", b"")
    storage.put("file", b"")
    for target in ("empty", "full", "file"):
        with pytest.raises(StorageError) as caught:
            storage.rename_dir("a", target)
        assert caught.value.errno == errno.EEXIST
    assert storage.rename_dir("a", "b")
    assert not storage.rename_dir("a", "c")
    assert {entry.name for entry in storage.list("")} == {"b", "empty", "full", "file"}


@pytest.mark.parametrize("without_rename", [False, True])
def test_without_hard_links_a_file_is_still_created_once(tmp_path: Path, *, without_rename: bool) -> None:
    refuse = FailingCalls().refuse
    calls = SystemCalls(link=refuse, rename_noreplace=refuse) if without_rename else SystemCalls(link=refuse)
    storage = LocalStorage(tmp_path, calls=calls)
    assert storage.put_if_absent("f", b"1")
    assert not storage.put_if_absent("f", b"2")
    assert storage.get("f", max_bytes=1) == b"1"
    assert [entry.name for entry in storage.list("")] == ["f"]


def test_direct_io_that_is_refused_falls_back_in_the_middle_of_a_file(tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(5 * MIB + 123)
    for refused in range(1, 7):
        calls = FailingCalls({refused: errno.EINVAL})
        storage = LocalStorage(tmp_path / str(refused), calls=SystemCalls(pwrite=calls.pwrite))
        storage.make_dir("")
        digests = write_file(storage, "f", data)
        assert (storage.root / "f").read_bytes() == data
        assert digests == tuple(digest(data[start : start + MIB]) for start in range(0, len(data), MIB))


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")  # noqa: S108
def test_a_file_system_in_memory_takes_the_same_files(tmp_path: Path) -> None:
    storage = LocalStorage(f"/dev/shm/safepoint-test-{os.getpid()}-{tmp_path.name}")  # noqa: S108
    storage.make_dir("")
    try:
        data = np.random.default_rng(0).bytes(3 * MIB + 5)
        write_file(storage, "f", data)
        assert storage.get("f", max_bytes=len(data)) == data
    finally:
        storage.delete_tree("f")
        storage.root.rmdir()


# Failing system calls


def test_short_reads_and_writes_are_continued(tmp_path: Path) -> None:
    calls = FailingCalls(short=True)
    storage = LocalStorage(tmp_path, calls=SystemCalls(pwrite=calls.pwrite, preadv=calls.preadv))
    data = np.random.default_rng(0).bytes(2 * MIB + 77)
    write_file(storage, "f", data)
    storage.put("g", data)
    assert storage.get("f", max_bytes=len(data)) == data
    assert storage.get("g", max_bytes=len(data)) == data


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_io_error_that_passes_is_not_noticed(tmp_path: Path, at: int) -> None:
    data = np.random.default_rng(0).bytes(3 * MIB)
    writes, reads = FailingCalls({at: errno.EIO}), FailingCalls({at: errno.EIO})
    storage = LocalStorage(tmp_path, calls=SystemCalls(pwrite=writes.pwrite, preadv=reads.preadv))
    write_file(storage, "f", data)
    assert writes.count > 3
    storage.put("g", b"x")
    for _ in range(3):
        assert storage.get("f", max_bytes=len(data)) == data


def test_an_io_error_that_stays_is_raised_and_leaves_no_file(tmp_path: Path) -> None:
    calls = FailingCalls(dict.fromkeys(range(1, 100), errno.EIO))
    storage = LocalStorage(tmp_path, calls=SystemCalls(pwrite=calls.pwrite))
    for attempt in (
        lambda: write_file(storage, "f", bytes(3 * MIB)),
        lambda: storage.put("f", b"1"),
        lambda: storage.replace("f", b"1"),
        lambda: storage.put_if_absent("f", b"1"),
    ):
        with pytest.raises(StorageError) as caught:
            attempt()
        assert caught.value.errno == errno.EIO
        assert caught.value.path == str(tmp_path / "f")
        assert storage.list("") == []


def test_a_sync_that_fails_is_never_tried_again(tmp_path: Path) -> None:
    """After a failed fsync the kernel may have dropped the pages: a second one would succeed with the data lost."""
    for attempt in ("write", "put"):
        calls = FailingCalls({1: errno.EIO})
        storage = LocalStorage(tmp_path, calls=SystemCalls(fsync=calls.fsync))
        with pytest.raises(StorageError) as caught:
            write_file(storage, "f", bytes(2 * MIB)) if attempt == "write" else storage.put("f", b"")
        assert caught.value.errno == errno.EIO
        assert calls.count == 1
        assert storage.list("") == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_full_disk_says_needed_and_free_bytes_and_leaves_no_file(tmp_path: Path, at: int, number: int) -> None:
    calls = FailingCalls({at: number})
    storage = LocalStorage(tmp_path, calls=SystemCalls(pwrite=calls.pwrite))
    with pytest.raises(StorageError) as caught:
        write_file(storage, "f", bytes(4 * MIB))
    assert caught.value.errno == number
    assert caught.value.hint is not None
    assert f"{4 * MIB:,} bytes" in caught.value.hint
    assert "are free" in caught.value.hint
    assert storage.list("") == []


def test_a_read_only_file_system_is_named(tmp_path: Path) -> None:
    calls = FailingCalls({1: errno.EROFS})
    storage = LocalStorage(tmp_path, calls=SystemCalls(pwrite=calls.pwrite))
    with pytest.raises(StorageError, match="read-only"):
        storage.put("f", b"1")


def test_a_directory_that_cannot_be_synced_on_this_mount_is_no_error(tmp_path: Path) -> None:
    calls = FailingCalls({1: errno.EINVAL})
    LocalStorage(tmp_path, calls=SystemCalls(fsync=calls.fsync)).sync_dir("")
    assert calls.count == 1


# Long runs


def test_a_thousand_files_leave_no_descriptor_and_no_thread(storage: LocalStorage) -> None:
    data = bytes(10_000)
    descriptors, threads = open_descriptors(), threading.active_count()
    for number in range(1000):
        with storage.open_writer(f"{number}", num_bytes=len(data), block_bytes=4096) as writer:
            writer.append(data)
            if number % 2:
                writer.finish()
    with pytest.raises(StorageError):
        storage.open_reader("0")
    for number in range(1, 1000, 2):
        storage.get(f"{number}", max_bytes=len(data))
    assert len(storage.list("")) == 500
    assert open_descriptors() == descriptors
    assert threading.active_count() == threads


def test_list_tolerates_entries_that_vanish(storage: LocalStorage) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            storage.make_dir("d")
            storage.put("d/f", b"")
            storage.delete_tree("d")

    churner = threading.Thread(target=churn)
    churner.start()
    try:
        for _ in range(300):
            assert {entry.name for entry in storage.list("")} <= {"d"}
            assert {entry.name for entry in storage.list("d")} <= {"f"}
    finally:
        stop.set()
        churner.join()
