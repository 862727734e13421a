"""Looking at and changing roots whose steps share files: every byte is counted, read and copied once."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.consolidating import consolidate_step
from safepoint.manager.copying import copy_steps
from safepoint.manager.disk_usage import bytes_freed, bytes_of_each, num_bytes_below
from safepoint.manager.progress import Progress
from safepoint.manager.removing import plan_sweep, remove_step, sweep
from safepoint.manager.root_overview import overview
from safepoint.manager.step_paths import open_step
from safepoint.manager.verifying import verify_steps

from support.command import run
from support.faulty_storage import FaultyStorage

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 4096


def make_state(version: int) -> dict[str, Any]:
    model = {f"w{i}": torch.arange(SIZE, dtype=torch.float32) + i for i in range(8)}
    model["w0"] += version
    return {"model": model, "step": version}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "root", unchanged="link") as manager:
        for step in (1, 2, 3):
            manager.save(step, make_state(step))
    return tmp_path / "root"


def restores(root: Path, step: int) -> None:
    with CheckpointManager(root) as manager:
        restored = manager.restore(step).state
    assert restored is not None
    assert all(torch.equal(restored["model"][name], tensor) for name, tensor in make_state(step)["model"].items())


def on_disk(root: Path) -> int:
    """Return the size of all data files, each inode once."""
    paths = [path for path in root.rglob("*.safetensors") if path.is_file()]
    return sum({path.stat().st_ino: path.stat().st_size for path in paths}.values())


class Counted(Progress):
    def __init__(self) -> None:
        self.total = self.done = 0

    def begin(self, what: str, total_bytes: int) -> None:
        del what
        self.total += total_bytes

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes


def test_a_listing_adds_up_to_what_is_on_disk(root: Path) -> None:
    shown = overview(LocalStorage(root))
    assert sum(entry.own_bytes for entry in shown.steps) == on_disk(root)
    assert shown.steps[1].num_bytes > 8 * 4 * SIZE > 3 * 4 * SIZE > shown.steps[1].own_bytes
    listed = run("ls", root, "--json").json["steps"]
    assert [one["own_bytes"] for one in listed] == [entry.own_bytes for entry in shown.steps]
    assert [one["record"].get("linked_bytes", 0) > 0 for one in listed] == [False, True, True]
    text = run("ls", root).out
    assert "own" in text.splitlines()[0]
    assert "on disk: steps share files" in text
    shutil.rmtree(root / "1")  # what it had is the next one's own now
    assert sum(entry.own_bytes for entry in overview(LocalStorage(root)).steps) == on_disk(root)


def test_a_root_without_shared_files_is_listed_as_ever(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, make_state(1))
        manager.save(2, make_state(1))
    assert "own" not in run("ls", tmp_path).out
    assert all(one["own_bytes"] == one["num_bytes"] for one in run("ls", tmp_path, "--json").json["steps"])


def test_show_tells_what_was_linked_and_by_whom_each_file_was_written(root: Path) -> None:
    text = run("show", root / "3").out
    assert "were linked from the step before" in text
    assert "links" in text
    files = run("show", root / "3", "--json").json["files"]
    record = json.loads((root / "3/commit.json").read_bytes())
    assert [file["attempt"] == record["attempt"] for file in files] == [True, False]
    assert [file["links"] for file in files] == [0, 2]
    assert "linked" not in run("show", root / "1").out


def test_verify_reads_a_shared_file_once_and_tells_every_step_that_it_is_damaged(root: Path) -> None:
    storage, progress = FaultyStorage(LocalStorage(root)), Counted()
    assert verify_steps(storage, progress=progress) == []
    paths = [call.path for call in storage.log if call.name == "open_reader" and call.path.endswith(".safetensors")]
    assert len(paths) == 3
    assert progress.done == progress.total
    with (root / "1/model/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    errors = verify_steps(LocalStorage(root))
    assert [error.step for error in errors] == [1, 2, 3]
    assert all(str(root / str(error.step)) in str(error) for error in errors)
    assert [error.step for error in verify_steps(LocalStorage(root), step=2)] == [2]


def test_a_copy_of_a_shared_file_is_verified_by_itself(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "other")  # which makes a file of every name
    path = next((tmp_path / "other/3").glob("shard-*-*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert [error.step for error in verify_steps(LocalStorage(tmp_path / "other"))] == [3]


def test_copies_share_what_the_originals_share(root: Path, tmp_path: Path) -> None:
    progress = Counted()
    done = copy_steps(LocalStorage(root), tmp_path / "copy", progress=progress)
    assert done.copied == (1, 2, 3)
    assert done.errors == ()
    assert done.num_bytes == on_disk(tmp_path / "copy") == on_disk(root)
    assert progress.done == progress.total
    assert verify_steps(LocalStorage(tmp_path / "copy")) == []
    shutil.rmtree(root)
    for step in (1, 2, 3):
        restores(tmp_path / "copy", step)


def test_a_later_copy_links_to_what_an_earlier_one_brought_if_that_is_sound(root: Path, tmp_path: Path) -> None:
    copy_steps(LocalStorage(root), tmp_path / "copy", step=1)
    assert copy_steps(LocalStorage(root), tmp_path / "copy", step=2).num_bytes < 2 * 4 * SIZE
    with (tmp_path / "copy/1/model/model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert copy_steps(LocalStorage(root), tmp_path / "copy", step=3).num_bytes > 8 * 4 * SIZE
    assert [error.step for error in verify_steps(LocalStorage(tmp_path / "copy"))] == [1, 2]
    restores(tmp_path / "copy", 3)


def test_a_single_step_is_copied_whole(root: Path, tmp_path: Path) -> None:
    copy_steps(LocalStorage(root), tmp_path / "copy", step=3)
    assert verify_steps(LocalStorage(tmp_path / "copy")) == []
    restores(tmp_path / "copy", 3)


def test_space_for_a_copy_is_asked_for_once_a_file(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = on_disk(root) + sum(path.stat().st_size for path in root.rglob("manifest.json"))
    monkeypatch.setattr(LocalStorage, "free_bytes", lambda _: needed)
    assert copy_steps(LocalStorage(root), tmp_path / "copy").copied == (1, 2, 3)


def test_a_sweep_tells_and_frees_what_no_step_that_stays_has(root: Path) -> None:
    (root / "3").rename(root / f"3.tmp-{'a' * 16}")
    plan = plan_sweep(LocalStorage(root), KeepLast(1))
    assert [(leftover.kind, leftover.step) for leftover in plan.leftovers] == [("unkept", 1), ("unfinished", 3)]
    before = num_bytes_below(root)
    sweep(LocalStorage(root), KeepLast(1))
    freed = before - num_bytes_below(root)
    assert plan.num_bytes == pytest.approx(freed, abs=2000)  # the owner's files come and go
    assert plan.num_bytes < 4 * 4 * SIZE
    restores(root, 2)


def test_removing_a_step_leaves_the_others_whole(root: Path) -> None:
    remove_step(LocalStorage(root), 1)
    assert verify_steps(LocalStorage(root)) == []
    for step in (2, 3):
        restores(root, step)


def test_a_consolidated_step_shares_nothing_and_says_so(root: Path, tmp_path: Path) -> None:
    record = consolidate_step(open_step(root / "3"), tmp_path / "whole")
    assert record.linked_bytes == 0
    assert (tmp_path / "whole/3/model/model.safetensors").stat().st_nlink == 1
    restores(tmp_path / "whole", 3)


def test_two_steps_that_share_files_are_compared_leaf_by_leaf(root: Path) -> None:
    found = run("diff", root / "1", root / "3", "--json")
    assert [one["path"] for one in found.json["leaves"]] == ["model.w0"]


def test_sizes_of_names_files_and_links_are_counted_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "a/f").write_bytes(bytes(10))
    os.link(tmp_path / "a/f", tmp_path / "a/same")
    os.link(tmp_path / "a/f", tmp_path / "b/g")
    (tmp_path / "b/own").write_bytes(bytes(5))
    (tmp_path / "c/link").symlink_to("../a/f")
    link = (tmp_path / "c/link").lstat().st_size
    a, b, c = (tmp_path / name for name in ("a", "b", "c"))
    assert bytes_of_each([a, b, c]) == [10, 5, link]
    assert bytes_of_each([b, a]) == [15, 0]
    assert bytes_freed([a]) == [0]
    assert bytes_freed([a, b]) == [0, 15]
    assert bytes_freed([b, a]) == [5, 10]
    assert num_bytes_below(tmp_path) == 15 + link
    assert num_bytes_below(a / "f") == 10
    assert num_bytes_below(a / "none") == 0
