"""What else may lie in a root without renames: steps that tools copied, steps by renames, damage, others' things."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import LocalStorage, MemoryObjects
from safepoint.formats.tombstone import Tombstone
from safepoint.manager.commit import Committer
from safepoint.manager.errors import (
    CorruptDataError,
    StepExistsError,
    UnsupportedVersionError,
)
from safepoint.manager.slots import read_slot
from safepoint.manager.unsettled import read_marks

from support.marker_root import Root, prepared
from support.steps import DATA, attempt_id, commit_step, content_of, prepare_step

if TYPE_CHECKING:
    from pathlib import Path


A, B, C = attempt_id(0xA), attempt_id(0xB), attempt_id(0xC)


@pytest.fixture(params=["objects", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    return Root(MemoryObjects() if request.param == "objects" else LocalStorage(tmp_path / "runs 实验" / "é 1"))


@pytest.mark.parametrize("record_first", [False, True])
def test_a_step_that_is_being_copied_to_here_is_never_debris(root: Root, *, record_first: bool) -> None:
    other = Root(MemoryObjects())
    commit_step(other.committer, other.storage, 7, A)
    root.commit(3)
    paths = sorted(other.files("7"), key=lambda path: (path == "7/commit.json") != record_first)
    for count, path in enumerate(paths):
        folders = path.split("/")[:-1]
        for depth in range(len(folders)):
            root.storage.make_dir("/".join(folders[: depth + 1]))
        root.storage.put(path, other.storage.get(path, max_bytes=1 << 20))
        successor = root.another()
        assert successor.recover() == []
        assert successor.delete_hidden() == []
        assert len([found for found in root.files() if found.startswith("7/")]) == count + 1
    assert root.steps()[7] == content_of(A)


def test_a_step_of_a_file_system_is_one_here_and_can_be_replaced_and_deleted(root: Root, tmp_path: Path) -> None:
    local = LocalStorage(tmp_path / "other")
    step = commit_step(Committer(local), local, 7, A)
    root.commit(3)

    def copy() -> None:
        for directory in ("7", "7/model"):
            root.storage.make_dir(directory)
        for path in ("7/commit.json", "7/manifest.json", f"7/{DATA}"):
            root.storage.put(path, local.get(path, max_bytes=1 << 20))

    copy()
    assert root.steps()[7] == content_of(A)
    commit_step(root.committer, root.storage, 7, B)
    assert root.steps()[7] == content_of(B)
    root.clean()
    assert root.committer.hide(next(known for known in root.committer.list_steps() if known.record.step == 7))
    root.clean()
    copy()
    assert root.committer.hide(step)
    assert set(root.steps()) == {3}
    root.clean()


def test_a_step_by_marker_is_one_on_a_file_system_and_can_be_replaced_and_deleted(tmp_path: Path) -> None:
    marked = Root(LocalStorage(tmp_path / "marked"))
    commit_step(marked.committer, marked.storage, 7, A)
    storage = LocalStorage(tmp_path / "renamed")
    committer = Committer(storage)
    committer.begin(3, C)
    committer.abandon(3, C)
    for attempt in (B, C):
        shutil.copytree(tmp_path / "marked" / "7", tmp_path / "renamed" / "7")
        (step,) = committer.list_steps()
        committer.check_files(step, committer.load_manifest(step))
        if attempt == B:
            commit_step(committer, storage, 7, attempt)
            (step,) = committer.list_steps()
            assert step.files_prefix == "7"
        assert committer.hide(step)
        assert committer.delete_hidden() == []
        assert [entry.name for entry in storage.list("")] == []


def test_a_root_may_change_from_renames_to_markers_and_back(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    renaming, marking = Committer(storage), Committer(storage, commit="marker")
    prepare_step(renaming, storage, 4, A)
    prepare_step(marking, storage, 5, B)
    prepare_step(renaming, storage, 6, C)
    assert len(Committer(storage, commit="marker").recover()) == 3
    prepare_step(marking, storage, 7, A)
    assert len(Committer(storage).recover()) == 2  # that of step 5 is told again, its files being there still
    assert Committer(storage).delete_hidden() == []
    assert [entry.name for entry in storage.list("")] == [".safepoint"]
    commit_step(renaming, storage, 4, B)
    commit_step(marking, storage, 4, C)
    commit_step(renaming, storage, 4, A)
    for committer in (renaming, marking, Committer(storage)):
        committer.recover()
        assert committer.delete_hidden() == []
    assert read_marks(storage) == []
    assert sorted(entry.name for entry in storage.list("4")) == ["commit.json", "manifest.json", "model"]


def test_a_tombstone_that_was_copied_along_is_no_step_and_in_nobodys_way(root: Root, tmp_path: Path) -> None:
    prepared(root, 4, A)
    slot = read_slot(root.storage, "4")
    assert slot is not None
    other = Root(MemoryObjects())
    other.storage.put("4/commit.json", slot.data)
    assert other.steps() == {}
    assert other.another().problems() == []
    commit_step(other.committer, other.storage, 4, B)
    assert other.steps() == {4: content_of(B)}
    local = LocalStorage(tmp_path / "other")
    local.make_dir("")
    local.make_dir("4")
    local.put("4/commit.json", slot.data)
    committer = Committer(local)
    commit_step(committer, local, 4, B)
    assert committer.delete_hidden() == []
    assert [entry.name for entry in local.list("")] == ["4"]


def test_a_tombstone_that_stands_for_nothing_goes_with_the_next_owner_and_nothing_beside_it(root: Root) -> None:
    root.commit(3)
    for step in (4, 5):
        root.storage.make_dir(str(step))
        root.storage.put(f"{step}/commit.json", Tombstone(step=step, attempt=A, state="claimed").to_bytes())
    root.storage.make_dir(f"5/{B}")
    root.storage.put(f"5/{B}/copied", b"1")
    record = prepared(root, 6, C)
    assert root.another().recover(spare=[C]) == []
    assert {path for path in root.files() if path[0] in "45"} == {f"5/{B}/copied"}
    root.committer.publish(record)
    assert set(root.steps()) == {3, 6}


def test_what_is_not_ours_is_refused_before_a_byte_is_written(root: Root) -> None:
    root.commit(3)
    root.storage.make_dir("4")
    root.storage.put("4/weights.pt", b"1")
    root.storage.put("5", b"a file")
    for step in (4, 5):
        with pytest.raises(StepExistsError) as caught:
            root.committer.begin(step, A)
        assert caught.value.outcome == "not_committed"
    assert root.another().recover() == []
    assert root.committer.delete_hidden() == []
    assert {"4/weights.pt", "5"} <= root.files()
    assert read_marks(root.storage) == []


def test_a_damaged_record_is_kept_beside_the_one_that_takes_its_place(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    commit_step(root.committer, root.storage, 4, A)
    root.storage.replace("4/commit.json", b"{")
    assert isinstance(root.another().problems()[0].error, CorruptDataError)
    with caplog.at_level(logging.WARNING, "safepoint"):
        commit_step(root.committer, root.storage, 4, B)
    assert "damaged" in caplog.text
    assert root.steps() == {4: content_of(B)}
    assert root.storage.get(f"4/commit.damaged-{B}.json", max_bytes=9) == b"{"
    assert f"4/{A}/{DATA}" in root.files()


def test_a_step_of_a_newer_release_is_not_replaced(root: Root) -> None:
    record = commit_step(root.committer, root.storage, 4, A).record
    root.storage.replace("4/commit.json", replace(record, version=3).to_bytes())
    assert isinstance(root.another().problems()[0].error, UnsupportedVersionError)
    with pytest.raises(StepExistsError, match="layout version 3"):
        root.another().begin(4, B)


def test_marks_and_tombstones_that_are_none_delete_nothing(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    root.storage.make_dir(".safepoint")
    root.storage.make_dir(".safepoint/unsettled")
    for number, data in enumerate([b"", b"{}", b"[]", b'{"kind":"deleted","prefix":"..","attempt":"a","files":""}']):
        root.storage.put(f".safepoint/unsettled/{number}", data)
    assert root.another().recover() == []
    assert root.another().delete_hidden() == []
    assert root.steps() == {4: content_of(A)}
    tombstone = Tombstone(step=4, attempt=A, state="deleted").to_bytes()
    root.storage.replace("4/commit.json", tombstone.replace(b"deleted", b"removed"))
    (problem,) = root.another().problems()
    assert isinstance(problem.error, CorruptDataError)
