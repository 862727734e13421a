"""Saves with `unchanged="link"` on one process: what is written, what is shared, and that every step stays whole.

Object stores have no links: there every leaf is written, and what is promised of a step holds all the same.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import LocalStorage
from safepoint.formats.storage.system import SystemCalls
from safepoint.manager import KeepLast, PerProcess
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.unchanged import MAX_LINKS

from support.roots import OBJECT_KINDS

if TYPE_CHECKING:
    from support.roots import Root

SIZE = 4096  # items of a leaf: larger than a header, so that a file with one changed leaf of four is worth linking


def make_state(**versions: int) -> dict[str, Any]:
    """Return four leaves in `model` and one in `other`; each is known from its version."""
    names = {"w0": 0, "w1": 0, "w2": 0, "w3": 0, "o": 0} | versions
    leaves = {name: torch.arange(SIZE, dtype=torch.float32) + 1000 * version for name, version in names.items()}
    return {"model": {name: leaves[name] for name in ("w0", "w1", "w2", "w3")}, "other": {"o": leaves["o"]}}


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(a[item][name], b[item][name]) for item in b for name in b[item])


def files_of(root: Root, step: int) -> dict[str, int]:
    """Return the data files of a step in a directory by path, with their inodes."""
    folder = root.path / root.files_of(step)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]
    return {str(path.relative_to(folder)): path.stat().st_ino for path in paths}


def manifest_of(root: Root, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(root.read(f"{root.files_of(step)}/manifest.json"))
    return found


with_links = pytest.mark.parametrize("root", ["directory", "markers"], indirect=True)
in_a_directory = pytest.mark.parametrize("root", ["directory"], indirect=True)
without_links = pytest.mark.parametrize("root", OBJECT_KINDS, indirect=True)


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def blocking(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@with_links
def test_what_did_not_change_is_shared_and_what_did_is_written(root: Root, *, blocking: bool) -> None:
    with root.manager(unchanged="link") as manager:
        first = manager.save(1, make_state(), blocking=blocking)
        manager.wait()
        second = manager.save(2, make_state(w2=1), blocking=blocking)
        manager.wait()
        old, new = files_of(root, 1), files_of(root, 2)
        assert set(old) == {"model/model.safetensors", "other/other.safetensors"}
        assert set(old.values()) < set(new.values())
        (written,) = [path for path, inode in new.items() if inode not in old.values()]
        assert written == "shard-00000-of-00001.safetensors"
        if blocking:
            assert first.full_reason
            assert (second.num_bytes, second.full_reason) == (4 * SIZE, "")
        for step, state in ((1, make_state()), (2, make_state(w2=1))):
            restored = manager.restore(step).state
            assert restored is not None
            assert same(restored, state)
        assert manager.verify() == []


def test_a_step_is_whole_when_the_ones_that_it_shares_with_are_gone(root: Root, *, blocking: bool) -> None:
    with root.manager(unchanged="link", keep=KeepLast(1)) as manager:
        for step in range(1, 5):
            manager.save(step, make_state(w2=step), blocking=blocking)
    with root.manager() as manager:
        assert [info.step for info in manager.steps()] == [4]
        restored = manager.restore(4).state
        assert restored is not None
        assert same(restored, make_state(w2=4))
        assert manager.verify() == []
        if root.storage.renames:
            folder = root.path / root.files_of(4)
            assert [path.stat().st_nlink for path in folder.glob("shard-*")] == [1, 1, 1]
    root.check_holds(4)


def test_without_the_option_nothing_is_computed_and_nothing_recorded(root: Root) -> None:
    with root.manager() as manager:
        manager.save(1, make_state())
        manager.save(2, make_state())
        assert manager._session.links is None
    text = root.read(f"{root.files_of(2)}/manifest.json") + root.read("2/commit.json")
    assert b"links" not in text
    assert b"linked" not in text
    assert all("digest" not in shard for leaf in manifest_of(root, 2)["leaves"] for shard in leaf["shards"])


@with_links
def test_a_state_that_did_not_change_at_all_writes_no_data(root: Root) -> None:
    with root.manager(unchanged="link") as manager:
        manager.save(1, make_state())
        assert manager.save(2, make_state()).num_bytes == 0
        restored = manager.restore(2).state
        assert restored is not None
        assert same(restored, make_state())
    assert set(files_of(root, 1).values()) == set(files_of(root, 2).values())


@in_a_directory
def test_after_ten_links_a_file_is_written_anew(root: Root) -> None:
    with root.manager(unchanged="link") as manager:
        written = [manager.save(step, make_state()).num_bytes for step in range(MAX_LINKS + 3)]
    whole = 5 * 4 * SIZE
    assert written == [whole, *[0] * MAX_LINKS, whole, 0]


@in_a_directory
def test_a_file_of_which_less_than_half_is_live_is_written_anew_and_its_space_won_back(root: Root) -> None:
    with root.manager(unchanged="link", keep=KeepLast(1)) as manager:
        manager.save(1, make_state())
        manager.save(2, make_state(w0=1))
        assert manager.save(3, make_state(w0=1, w1=1, w2=1)).num_bytes == 3 * 4 * SIZE
    paths = [file["path"] for file in manifest_of(root, 3)["files"]]
    held = sum(len(root.read(f"{root.files_of(3)}/{path}")) for path in paths)
    assert held < 7 * 4 * SIZE  # five leaves, a dead half of a file at most, headers


@with_links
def test_a_new_run_links_from_the_step_that_it_restored(root: Root, *, blocking: bool) -> None:
    with root.manager(unchanged="link") as manager:
        manager.save(1, make_state())
    state = make_state(w0=7)
    with root.manager(unchanged="link") as manager:
        assert manager.restore_latest(state) is not None
        manager.save(2, state, blocking=blocking)
    assert set(files_of(root, 2).values()) == set(files_of(root, 1).values())


@with_links
def test_a_run_that_restored_nothing_writes_everything_and_says_why(root: Root) -> None:
    with root.manager(unchanged="link") as manager:
        manager.save(1, make_state())
    with root.manager(unchanged="link") as manager:
        result = manager.save(2, make_state())
    assert result.full_reason == "there is no step of this run to link from"
    assert not set(files_of(root, 2).values()) & set(files_of(root, 1).values())


@with_links
def test_a_step_that_was_saved_without_the_option_has_no_digests_to_link_by(root: Root) -> None:
    with root.manager() as manager:
        manager.save(1, make_state())
    with root.manager(unchanged="link") as manager:
        manager.restore(1)
        assert manager.save(2, make_state()).full_reason == "the step before was saved without digests of its leaves"
        assert manager.save(3, make_state()).num_bytes == 0


@in_a_directory
@pytest.mark.parametrize("file_format", ["torch", "orbax"])
def test_a_run_may_go_on_from_a_step_in_another_format(root: Root, file_format: str) -> None:
    with root.manager(format=file_format) as manager:
        manager.save(1, make_state())
    with root.manager(unchanged="link") as manager:
        manager.restore(1)
        assert manager.save(2, make_state()).full_reason
        assert manager.save(3, make_state()).num_bytes == 0
        restored = manager.restore(3).state
        assert restored is not None
        assert same(restored, make_state())


@with_links
def test_going_back_links_from_the_step_gone_back_to(root: Root) -> None:
    state = make_state()
    with root.manager(unchanged="link") as manager:
        manager.save(1, make_state())
        manager.save(2, make_state(w0=1, w1=1, w2=1, w3=1, o=1))
        manager.restore(1, state)
        assert manager.save(3, state).num_bytes == 0
        assert manager.save(2, state).saved  # of the branch that was left
    assert set(files_of(root, 3).values()) == set(files_of(root, 1).values())


def test_a_step_can_be_replaced_by_one_that_shares_its_files(root: Root, *, blocking: bool) -> None:
    with root.manager(unchanged="link", keep=KeepLast(1)) as manager:
        manager.save(1, make_state())
        manager.save(1, make_state(w1=5), on_exists="replace", blocking=blocking)
        manager.wait()
        manager.save(1, make_state(w1=6), on_exists="replace", blocking=blocking)
        manager.wait()
        restored = manager.restore(1).state
        assert restored is not None
        assert same(restored, make_state(w1=6))
        assert manager.verify() == []
    assert len(manifest_of(root, 1)["files"]) == (3 if root.kind in ("directory", "markers") else 2)


@in_a_directory
@pytest.mark.parametrize("change", ["dtype", "shape", "new leaf", "lost leaf", "order"])
def test_whatever_changes_in_a_state_comes_back_as_it_is(root: Root, change: str, *, blocking: bool) -> None:
    state = make_state()
    if change == "dtype":
        state["model"]["w1"] = state["model"]["w1"].view(torch.int32)
    elif change == "shape":
        state["model"]["w1"] = state["model"]["w1"].reshape(64, -1)
    elif change == "new leaf":
        state["model"]["w9"] = torch.ones(5)
    elif change == "lost leaf":
        del state["model"]["w1"]
    else:
        state["model"] = dict(reversed(state["model"].items()))
    with root.manager(unchanged="link") as manager:
        manager.save(1, make_state())
        manager.save(2, state, blocking=blocking)
        manager.wait()
        restored = manager.restore(2).state
        assert restored is not None
        assert list(restored["model"]) == list(state["model"])
        assert {name: t.dtype for name, t in restored["model"].items()} == {
            name: t.dtype for name, t in state["model"].items()
        }
        assert same(restored, state)
    linked = [file for file in manifest_of(root, 2)["files"] if file.get("links")]
    assert linked


@in_a_directory
def test_shared_and_overlapping_memory_and_odd_leaves_come_back(root: Root, *, blocking: bool) -> None:
    def make(version: int) -> dict[str, Any]:
        pool = torch.arange(3 * SIZE, dtype=torch.float32)
        model = {
            "tied": pool[:SIZE],
            "window": pool[10 : SIZE + 10],
            "all": pool,
            "bf16": torch.ones(SIZE, dtype=torch.bfloat16) * version,
            "c128": torch.ones(64, dtype=torch.complex128),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(version),
            "strided": torch.arange(4 * SIZE).reshape(SIZE, 4).T,
        }
        model["again"] = model["tied"]
        return {"model": model, "rank": PerProcess({"seed": torch.arange(SIZE)}), "step": version}

    with root.manager(unchanged="link") as manager:
        for version in (1, 2, 3):
            manager.save(version, make(version), blocking=blocking)
            manager.wait()
        for version in (1, 2, 3):
            restored = manager.restore(version).state
            assert restored is not None
            for name, tensor in make(version)["model"].items():
                assert torch.equal(restored["model"][name], tensor), (version, name)
            model = restored["model"]
            assert model["again"].data_ptr() == model["tied"].data_ptr() == model["all"].data_ptr()
            assert restored["step"] == version
        assert manager.verify() == []
    assert any(file.get("links") for file in manifest_of(root, 3)["files"])


@pytest.mark.parametrize("file_format", ["torch", "orbax"])
def test_formats_that_are_of_use_only_as_a_whole_are_refused_at_once(root: Root, file_format: str) -> None:
    with pytest.raises(InvalidArgumentError, match="several steps"):
        root.manager(format=file_format, unchanged="link")
    with pytest.raises(InvalidArgumentError, match="unchanged must be one of"):
        root.manager(unchanged="copy")  # type: ignore[arg-type]


def check_all_is_written_and_told_of_once(root: Root, caplog: pytest.LogCaptureFixture, *, blocking: bool) -> None:
    with caplog.at_level(logging.WARNING), root.manager(unchanged="link") as manager:
        results = [manager.save(step, make_state(w0=step), blocking=blocking) for step in (1, 2, 3)]
        manager.wait()
        assert manager.verify() == []
        restored = manager.restore(3).state
        assert restored is not None
        assert same(restored, make_state(w0=3))
    if blocking:
        assert [result.full_reason for result in results[1:]] == ["this storage refuses hard links"] * 2
    assert sum("refuses hard links" in record.message for record in caplog.records) == 1
    paths = {file["path"] for file in manifest_of(root, 3)["files"]}
    assert paths == {"model/model.safetensors", "other/other.safetensors"}


@without_links
def test_an_object_store_is_written_to_in_full_and_that_is_told_of_once(
    root: Root, caplog: pytest.LogCaptureFixture, *, blocking: bool
) -> None:
    check_all_is_written_and_told_of_once(root, caplog, blocking=blocking)
    assert "every leaf of every step is written" in caplog.text


@with_links
def test_a_file_system_that_refuses_links_is_written_to_in_full_and_told_of_once(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, blocking: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def make(path: str) -> LocalStorage:
        return LocalStorage(path, calls=SystemCalls(link_into=refuse))

    monkeypatch.setattr("safepoint.manager.session.LocalStorage", make)
    check_all_is_written_and_told_of_once(root, caplog, blocking=blocking)


@in_a_directory
def test_names_that_other_tools_open_hold_all_of_an_item_or_are_not_there(root: Root) -> None:
    with root.manager(unchanged="link") as manager:
        for step in range(12):
            manager.save(step, make_state(w0=step))
    for step in range(12):
        for path in (root.path / root.files_of(step)).glob("*/*.safetensors"):
            header = json.loads(path.read_bytes()[8:].partition(b" ")[0])
            assert set(header) - {"__metadata__"} in ({"w0", "w1", "w2", "w3"}, {"o"})


@with_links
def test_the_record_says_how_much_is_shared(root: Root) -> None:
    with root.manager(unchanged="link") as manager:
        manager.save(1, make_state())
        manager.save(2, make_state(w3=1))
    first, second = (json.loads(root.read(f"{step}/commit.json")) for step in (1, 2))
    assert "linked_bytes" not in first
    assert second["linked_bytes"] == first["num_bytes"]
    assert second["num_bytes"] > first["num_bytes"]
    assert {file["attempt"] for file in manifest_of(root, 2)["files"]} == {first["attempt"], second["attempt"]}
