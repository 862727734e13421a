"""How steps are listed and read in a root of any kind: promises of safepoint.manager.commit and step_reading."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from safepoint.manager.commit import Committer
from safepoint.manager.errors import (
    CorruptDataError,
    InvalidArgumentError,
    StepExistsError,
    StepNotFoundError,
    UnsupportedVersionError,
)
from safepoint.manager.pins import pin, pinned_steps, unpin

from support.faulty_storage import FaultyStorage
from support.steps import DATA, attempt_id, commit_step, content_of

if TYPE_CHECKING:
    from support.roots import Root

A, B = attempt_id(0xA), attempt_id(0xB)
RECORD = "4/commit.json"
CHANGES = (
    "make_dir",
    "put",
    "put_if_absent",
    "replace",
    "put_if_unchanged",
    "delete_if_unchanged",
    "rename_dir",
    "sync_dir",
    "delete",
    "delete_tree",
    "delete_dir",
    "open_writer",
    "link_file",
)


def test_a_missing_and_an_empty_root_have_no_steps(root: Root) -> None:
    assert root.steps() == {}
    assert root.committer.next_sequence() == 1
    assert root.files() == set()


def test_steps_are_integers_in_the_order_of_their_commits(root: Root) -> None:
    root.commit(2, 10, 1, 900_000, 1_080_000, 0)
    assert list(root.steps()) == [2, 10, 1, 900_000, 1_080_000, 0]
    assert [step.record.sequence for step in root.committer.list_steps()] == [1, 2, 3, 4, 5, 6]
    assert root.another().next_sequence() == 7


def test_a_run_that_goes_back_has_its_own_last_commit_as_latest(root: Root) -> None:
    root.commit(500, 600, 510)
    assert list(root.steps())[-1] == 510


def test_names_that_are_not_ours_are_neither_listed_nor_touched(root: Root) -> None:
    root.commit(5)
    junk = ["007", "+5", " 5", "5 ", "٣", "-1", "1e3", "1_000", "0x10", "9" * 25, "best", "7.tmp", "7.tmp-xyz"]
    junk += ["7.orbax-checkpoint-tmp-1", "8.old-", ".trash-", ".trash-mine", f"007.tmp-{A}"]
    for name in (*junk, f"5.tmp-{A.upper()[:-1]}G"):
        root.write(f"{name}/commit.json", b"{}")
    root.write("98/state.pt", b"weights")
    for name in ("97", f"96.tmp-{A}", "notes.txt"):
        root.write(name, b"a file")
    before = root.contents()
    assert list(root.steps()) == [5]
    assert root.committer.recover() == []
    assert root.committer.delete_hidden() == []
    assert root.contents() == before


def test_copying_a_root_changes_nothing(root: Root) -> None:
    root.commit(3, 1, 2)
    copied = root.beside("copy")
    copied.copy_from(root)
    assert list(copied.steps()) == [3, 1, 2]


def test_a_step_copied_from_another_root_is_listed(root: Root) -> None:
    other = root.beside("other")
    other.commit(7)
    root.commit(3)
    root.copy_from(other, "7")
    assert set(root.steps()) == {3, 7}


def test_a_step_under_another_number_is_a_problem_and_no_step(root: Root) -> None:
    root.commit(3)
    root.copy_from(root, "3", to="4")
    assert list(root.steps()) == [3]
    (problem,) = root.committer.problems()
    assert (problem.step, problem.prefix) == (4, "4")
    assert "Rename it to 3" in str(problem.error)


def test_a_damaged_record_is_a_problem_and_no_step(root: Root) -> None:
    root.commit(3, 4)
    data = bytearray(root.read(RECORD))
    data[data.index(b"run")] ^= 1
    root.storage.replace(RECORD, bytes(data))
    assert list(root.steps()) == [3]
    (problem,) = root.committer.problems()
    assert isinstance(problem.error, CorruptDataError)
    assert problem.error.step == 4
    assert root.committer.next_sequence() == 3  # it may have been the one with sequence 2


@pytest.mark.parametrize("record_first", [False, True])
def test_a_step_that_is_being_copied_to_here_is_listed_once_it_is_whole_and_is_never_debris(
    root: Root, *, record_first: bool
) -> None:
    other = root.beside("other")
    commit_step(other.committer, other.storage, 7, A)
    root.commit(3)
    paths = sorted(other.files("7"), key=lambda path: (path == "7/commit.json") != record_first)
    for count, path in enumerate(paths, start=1):
        data = other.read(path)
        if path == "7/commit.json":
            for end in (0, 10, len(data) - 1):
                root.write(path, data[:end])
                assert list(root.steps()) == [3]
        root.write(path, data)
        successor = root.another()
        assert successor.recover() == []
        assert successor.delete_hidden() == []
        assert len(root.files("7")) == count
    assert root.steps()[7] == content_of(A)


def test_a_root_that_may_not_be_written_to_can_be_listed_and_read(root: Root) -> None:
    root.commit(1)
    refusing = FaultyStorage(root.storage, at=1, times=None, only=CHANGES)
    committer = Committer(refusing)
    (step,) = committer.list_steps()
    committer.check_files(step, committer.load_manifest(step))
    assert committer.pinned_attempts() == frozenset()
    assert refusing.fired == 0


# Reading


def test_a_manifest_that_was_changed_or_lost_is_reported(root: Root) -> None:
    step = commit_step(root.committer, root.storage, 4, A)
    path = f"{step.files_prefix}/manifest.json"
    sound = root.read(path)
    for data in (sound[:-1] + b" ", sound[:-1], sound + b" ", b""):
        root.storage.replace(path, data)
        with pytest.raises(CorruptDataError) as caught:
            root.committer.load_manifest(step)
        assert caught.value.step == 4
        assert caught.value.path == root.storage.describe(path)
    root.storage.delete(path)
    with pytest.raises(CorruptDataError, match="missing"):
        root.committer.load_manifest(step)


@pytest.mark.parametrize("damage", ["cut", "gone", "directory"])
def test_files_that_are_cut_short_lost_or_no_files_are_reported(root: Root, damage: str) -> None:
    step = commit_step(root.committer, root.storage, 4, A)
    manifest = root.committer.load_manifest(step)
    root.committer.check_files(step, manifest)
    path = f"{step.files_prefix}/{DATA}"
    if damage == "cut":
        root.storage.replace(path, root.read(path)[:-1])
    else:
        root.storage.delete(path)
        if damage == "directory":
            root.write(f"{path}/below", b"")
    with pytest.raises(CorruptDataError) as caught:
        root.committer.check_files(step, manifest)
    assert (caught.value.step, caught.value.path) == (4, root.storage.describe(path))


def test_a_step_deleted_under_a_reader_is_told_from_a_damaged_one(root: Root) -> None:
    root.commit(3)
    step = commit_step(root.committer, root.storage, 4, A)
    manifest = root.committer.load_manifest(step)
    root.committer.hide(step)
    root.committer.delete_hidden()
    for read in (lambda: root.committer.load_manifest(step), lambda: root.committer.check_files(step, manifest)):
        with pytest.raises(StepNotFoundError) as caught:
            read()
        assert caught.value.available == (3,)


def test_a_step_of_a_newer_release_is_told_and_not_replaced(root: Root) -> None:
    record = commit_step(root.committer, root.storage, 4, A).record
    root.storage.replace(RECORD, replace(record, version=3).to_bytes())
    assert isinstance(root.another().problems()[0].error, UnsupportedVersionError)
    with pytest.raises(StepExistsError, match="layout version 3"):
        root.another().begin(4, B)


def test_private_roots_take_only_their_own_records(root: Root) -> None:
    committer = root.another(scope="per_process", process_index=1)
    own = {"scope": "per_process", "process_index": 1, "process_count": 2}
    assert commit_step(committer, root.storage, 3, A, **own).record.process_index == 1
    for wrong in ({}, own | {"process_index": 0}):
        with pytest.raises(InvalidArgumentError, match="does not belong") as caught:
            commit_step(committer, root.storage, 4, B, **wrong)
        assert caught.value.outcome == "not_committed"
        committer.abandon(4, B)


def test_pins_name_the_attempt_that_has_the_step_now(root: Root) -> None:
    root.commit(3)
    commit_step(root.committer, root.storage, 4, A)
    assert pin(root.storage, 4, note="for the paper")
    assert not pin(root.storage, 4)
    assert pin(root.storage, 9)  # not there yet
    root.write(".safepoint/pins/04", b"")
    assert pinned_steps(root.storage) == {4, 9}
    assert root.committer.pinned_attempts() == {A}
    assert unpin(root.storage, 4)
    assert not unpin(root.storage, 4)
    assert root.committer.pinned_attempts() == frozenset()
    assert list(root.steps()) == [3, 4]
