"""Damage, loss and power cuts where steps share files: rot does not spread, and every step stays whole."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.checksum import digest
from safepoint.formats.entries import FileEntry, ShardEntry
from safepoint.formats.errors import StorageError
from safepoint.formats.region import Region
from safepoint.formats.storage import LocalStorage, MemoryStorage, Storage
from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.commit import Committer
from safepoint.manager.rechecking import Recheck
from safepoint.manager.unchanged import LinkBase
from safepoint.manager.verifying import verify_steps

from support.fault_runner import run_forked
from support.faulty_storage import FaultyStorage, Stall
from support.power_cut import Recorder

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 2048


def make_state(version: int) -> dict[str, Any]:
    model = {f"w{i}": torch.arange(SIZE, dtype=torch.float32) + i for i in range(4)}
    model["w0"] += version
    return {"model": model, "other": {"o": torch.ones(SIZE)}, "version": version}


def check(manager: CheckpointManager, step: int) -> None:
    restored = manager.restore(step).state
    assert restored is not None
    wanted = make_state(step)
    assert restored["version"] == step
    for item in ("model", "other"):
        assert all(torch.equal(restored[item][name], wanted[item][name]) for name in wanted[item])


def damage(path: Path) -> None:
    """Flip a bit where the file lies, for all of its names."""
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 4]))


def settle(manager: CheckpointManager) -> None:
    links = manager._session.links
    assert links is not None
    assert links.settle(30.0)


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def blocking(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def warnings_about(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_a_file_that_rotted_since_it_was_restored_is_written_anew_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, blocking: bool
) -> None:
    with CheckpointManager(tmp_path, unchanged="link") as manager:
        manager.save(1, make_state(1))
        manager.restore(1)
        damage(tmp_path / "1/model/model.safetensors")
        manager.save(2, make_state(2), blocking=blocking)
        manager.wait()
        check(manager, 2)
        assert [error.step for error in manager.verify()] == [1]
    (told,) = warnings_about(caplog, "written anew")
    assert "1/model/model.safetensors" in told
    # The other file is sound, and shared.
    assert (tmp_path / "1/other/other.safetensors").stat().st_nlink == 2


def test_rot_spreads_no_further_than_the_step_that_linked_before_it_was_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, blocking: bool
) -> None:
    with CheckpointManager(tmp_path, unchanged="link") as manager:
        manager.save(1, make_state(1))
        settle(manager)
        damage(tmp_path / "1/model/model.safetensors")  # after it was read again, before it is linked
        manager.save(2, make_state(2), blocking=blocking)
        manager.wait()
        settle(manager)
        assert warnings_about(caplog, "digest differs")  # found while nobody waited
        manager.save(3, make_state(3), blocking=blocking)
        manager.wait()
        check(manager, 3)
        assert [error.step for error in manager.verify()] == [1, 2]
        latest = manager.restore_latest()
        assert latest is not None
        assert latest.step == 3


def written(storage: Storage, name: str, num_bytes: int, block_bytes: int, *, wrong: int | None = None) -> LinkBase:
    """Write a file of three regions, one of which may have the digest of other bytes."""
    data = bytes(7 * number % 251 for number in range(num_bytes - len(name), 2 * num_bytes - len(name)))
    with storage.open_writer(name, num_bytes=num_bytes, block_bytes=block_bytes) as writer:
        writer.append(data)
        digests = writer.finish().digests
    attempt = "a" * 16
    entry = FileEntry(
        path=name, num_bytes=num_bytes, block_bytes=block_bytes, digests=digests, process_index=0, attempt=attempt
    )
    bounds = [8, num_bytes // 3, num_bytes // 2, num_bytes]
    shards = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        found = digest(data[start:end] if number != wrong else data)
        region = Region.whole((end - start,))
        shards.append(
            ShardEntry(region=region, file=0, offset=start, num_bytes=end - start, key=f"{name}{number}", digest=found)
        )
    return LinkBase.of(1, attempt, [entry], [((shard.key,), "uint8", shard) for shard in shards])


def joined(*bases: LinkBase) -> LinkBase:
    files = [base.files[0] for base in bases]
    held = [
        (path, dtype, shard._replace(file=number))
        for number, base in enumerate(bases)
        for (path, _), (dtype, shard) in base.shards.items()
    ]
    return LinkBase.of(1, "a" * 16, files, held)


def test_what_is_found_behind_counts_and_what_could_not_be_read_is_tried_again(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    base = joined(*(written(storage, f"f{number}", 100, 40) for number in range(3)))
    damage(tmp_path / "f1")
    faulty = FaultyStorage(storage, at=1, only=["reader.read_into"])
    recheck = Recheck(faulty, base)
    recheck.start(lambda: "", [0, 1])
    assert recheck.wait(30.0)
    assert faulty.fired == 1
    reads = faulty.counts["reader.read_into"]
    assert recheck.sound("", [0, 1, 2], patience_bytes=None) == [0, 2]
    assert faulty.counts["reader.read_into"] == reads + 6
    (tmp_path / "f2").unlink()
    assert recheck.sound("", [0, 1, 2], patience_bytes=None) == [0, 2]  # once is enough between two steps
    assert Recheck(storage, base).sound("", [0, 1, 2], patience_bytes=None) == [0]


@pytest.mark.parametrize("block_bytes", [7, 64, 1 << 20])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_region_whose_bytes_are_not_those_of_its_digest_is_never_taken_for_unchanged(
    wrong: int, block_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()
    storage.make_dir("")
    base = joined(written(storage, "good", 300, block_bytes), written(storage, "bad", 300, block_bytes, wrong=wrong))
    assert Recheck(storage, base).sound("", [0, 1], patience_bytes=None) == [0]
    (told,) = warnings_about(caplog, "written anew")
    assert f"'bad{wrong}'" in told


def test_a_recheck_that_is_stopped_ends_at_once_and_leaves_the_rest_to_the_save() -> None:
    storage = MemoryStorage()
    storage.make_dir("")
    recheck = Recheck(storage, written(storage, "f", 1 << 20, 64))
    recheck.start(lambda: "", [0])
    recheck.stop()
    assert recheck.wait(0.0)
    assert recheck.sound("", [0], patience_bytes=1 << 20) == [0]


def test_who_has_no_patience_gets_what_is_read_and_nothing_is_read_for_him() -> None:
    storage = FaultyStorage(MemoryStorage())
    storage.make_dir("")
    base = joined(*(written(storage, f"f{number}", 1000, 100) for number in range(3)))
    recheck = Recheck(storage, base)
    assert recheck.is_behind([0])
    assert recheck.sound("", [1], patience_bytes=1000) == [1]
    reads = storage.counts["reader.read_into"]
    assert recheck.sound("", [0, 1, 2], patience_bytes=1999) == [1]
    assert storage.counts["reader.read_into"] == reads
    assert recheck.is_behind([0, 1])
    assert not recheck.is_behind([1])
    assert recheck.sound("", [0, 1, 2], patience_bytes=2000) == [0, 1, 2]


def test_a_save_waits_for_the_file_that_is_being_read_and_not_for_files_that_it_does_not_want() -> None:
    stall = Stall()
    inner = MemoryStorage()
    inner.make_dir("")
    base = joined(*(written(inner, f"f{number}", 1000, 100) for number in range(3)))
    storage = FaultyStorage(inner, at=9, fault=stall, only=["reader.read_into"])  # in the first file
    recheck = Recheck(storage, base)
    recheck.start(lambda: "", [0, 1, 2])
    assert stall.reached.wait(30.0)
    waker = threading.Timer(0.1, stall.resume.set)
    waker.start()
    assert recheck.sound("", [0, 2], patience_bytes=1300) == [0, 2]  # 200 of the first, all of the last
    waker.join()
    opened = [call.path for call in storage.log if call.name == "open_reader"]
    assert opened.count("f0") == opened.count("f2") == 1
    assert storage.counts["reader.read_into"] <= 21


def test_a_blocking_save_that_comes_too_soon_writes_rather_than_reads_and_one_behind_the_loop_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safepoint.manager.linking.PATIENCE_BYTES", 0)
    monkeypatch.setattr(Recheck, "start", lambda *_: None)
    with CheckpointManager(tmp_path, unchanged="link") as manager:
        manager.save(1, make_state(1))
        assert "too soon" in manager.save(2, make_state(2)).full_reason
        manager.save(3, make_state(3), blocking=False)
        manager.wait()
        for step in (1, 2, 3):
            check(manager, step)
    assert '"links":1' not in (tmp_path / "2/manifest.json").read_text()
    assert '"links":1' in (tmp_path / "3/manifest.json").read_text()


@pytest.mark.parametrize("loss", ["step", "file", "swapped for a link"])
def test_what_is_gone_by_the_time_of_the_save_is_written(tmp_path: Path, loss: str, *, blocking: bool) -> None:
    root, old = tmp_path / "root", tmp_path / "root/1"
    with CheckpointManager(root, unchanged="link") as manager:
        manager.save(1, make_state(1))
        settle(manager)
        if loss == "step":
            shutil.rmtree(old)
        else:
            (old / "model/model.safetensors").rename(tmp_path / "elsewhere")
        if loss == "swapped for a link":
            (old / "model/model.safetensors").symlink_to(tmp_path / "elsewhere")
        result = manager.save(2, make_state(2), blocking=blocking)
        manager.wait()
        check(manager, 2)
        assert manager.verify(2) == []
    if blocking and loss == "step":
        assert result.full_reason == "the step to link from is gone"
    if loss != "step":
        assert (root / "2").joinpath("manifest.json").read_text().count('"links":1') == 1  # the other file
    assert not any(path.is_symlink() for path in (root / "2").rglob("*"))


def test_a_base_of_which_no_file_is_left_is_told(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, unchanged="link") as manager:
        manager.save(1, make_state(1))
        settle(manager)
        for path in (tmp_path / "1").rglob("*.safetensors"):
            path.unlink()
        assert "no file of the step before" in manager.save(2, make_state(2)).full_reason
        check(manager, 2)


def test_a_base_that_cannot_be_read_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreadable(FaultyStorage):
        def call(self, name: str, path: str, action: Any, *, undo: Any = None) -> Any:
            if name == "open_reader" and path.startswith("1/"):
                raise StorageError("injected", path=path, errno=errno.EIO)
            return super().call(name, path, action, undo=undo)

    def make(root: str) -> Storage:
        return Unreadable(LocalStorage(root))

    monkeypatch.setattr("safepoint.manager.session.LocalStorage", make)
    with CheckpointManager(tmp_path, unchanged="link") as manager:
        manager.save(1, make_state(1))
        with caplog.at_level(logging.WARNING):
            assert manager.save(2, make_state(2)).full_reason
    assert warnings_about(caplog, "written anew")
    assert verify_steps(LocalStorage(tmp_path)) == []


def test_a_link_that_fails_fails_the_save_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(root: str) -> Storage:
        return FaultyStorage(LocalStorage(root), at=1, only=["link_file"])

    monkeypatch.setattr("safepoint.manager.session.LocalStorage", make)
    with CheckpointManager(tmp_path, unchanged="link") as manager:
        manager.save(1, make_state(1))
        with pytest.raises(Exception, match="link_file") as caught:
            manager.save(2, make_state(2))
        assert getattr(caught.value, "outcome", None) == "not_committed"
        assert [info.step for info in manager.steps()] == [1]
        manager.save(3, make_state(3))
        check(manager, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".safepoint", "1", "3"]
    assert (tmp_path / "1/model/model.safetensors").stat().st_nlink == 2


def test_readers_beside_a_writer_that_links_and_keeps_two_never_see_half_a_step(tmp_path: Path) -> None:
    root, last = tmp_path / "root", 30

    def write() -> None:
        with CheckpointManager(root, keep=KeepLast(2), unchanged="link", deadline_secs=10.0) as manager:
            for step in range(last + 1):
                manager.save(step, make_state(step), blocking=step % 3 == 0)

    def read() -> None:
        os.environ.pop("RANK")
        os.environ.pop("WORLD_SIZE")
        manager = CheckpointManager(root, deadline_secs=10.0)
        seen = [-1]
        while seen[-1] < last:
            restored = manager.restore_latest()
            if restored is not None:
                assert restored.state is not None
                assert torch.equal(restored.state["model"]["w0"], make_state(restored.step)["model"]["w0"])
                assert torch.equal(restored.state["model"]["w3"], make_state(0)["model"]["w3"])
                seen.append(restored.step)
        assert seen == sorted(seen)

    assert run_forked(lambda rank: read() if rank else write(), range(2), tmp_path) == []
    assert verify_steps(LocalStorage(root)) == []


def version_of(storage: Storage) -> int:
    """Return the version of the newest step; every listed step is read through."""
    assert verify_steps(storage) == []
    steps = Committer(storage).list_steps()
    if not steps:
        return 0
    manifest = Committer(storage).load_manifest(steps[-1])
    (version,) = [node.data for path, node in manifest.structure.items() if path == ("version",)]
    assert isinstance(version, int)
    return version


def test_a_power_cut_after_any_call_leaves_whole_steps_that_need_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorders: list[Recorder] = []

    def make(root: str) -> Recorder:
        recorders.append(Recorder(LocalStorage(root)))
        return recorders[-1]

    monkeypatch.setattr("safepoint.manager.session.LocalStorage", make)
    promised = []
    with CheckpointManager(tmp_path, keep=KeepLast(1), unchanged="link") as manager:
        for version, step in enumerate([1, 2, 2, 3], start=1):
            manager.save(step, make_state(version), on_exists="replace")
            promised.append((len(recorders[0].events), version))
    recorder = recorders[0]
    assert sum(name.startswith("link_file") for name in recorder.names) == 6
    for number in range(len(recorder.events) + 1):
        least = max((version for after, version in promised if after <= number), default=0)
        for disk in recorder.disks_after(number, samples=4):
            version = version_of(disk)
            assert version >= least, recorder.names[:number]
            committer = Committer(disk)
            committer.recover()
            committer.delete_hidden()
            assert version_of(disk) == version


def test_a_save_that_never_commits_costs_the_shared_files_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty: list[FaultyStorage] = []

    def make(root: str) -> Storage:
        faulty.append(FaultyStorage(LocalStorage(root), at=4, only=["put"]))  # the second step's record
        return faulty[-1]

    monkeypatch.setattr("safepoint.manager.session.LocalStorage", make)
    with CheckpointManager(tmp_path, unchanged="link") as manager:
        manager.save(1, make_state(1))
        with pytest.raises(Exception, match="injected into put"):
            manager.save(2, make_state(2))
        manager.save(3, make_state(3))  # the base is still step 1
        check(manager, 3)
    assert faulty[0].counts["link_file"] == 4
    assert verify_steps(LocalStorage(tmp_path)) == []
