"""How steps appear, are listed, and disappear: promises of safepoint.manager.commit, on a real file system."""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import LocalStorage
from safepoint.manager.commit import Committer
from safepoint.manager.errors import (
    AttemptLostError,
    CorruptDataError,
    InvalidArgumentError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    UnsupportedVersionError,
)
from safepoint.manager.pins import pin, pinned_steps, unpin

from support.steps import DATA, attempt_id, commit_step, content_of, prepare_step, record_for

if TYPE_CHECKING:
    from pathlib import Path

A, B, C = attempt_id(0xA), attempt_id(0xB), attempt_id(0xC)


class Root:
    """One root on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = LocalStorage(path)
        self.committer = Committer(self.storage)

    def commit(self, *steps: int) -> None:
        for step in steps:
            commit_step(self.committer, self.storage, step, attempt_id(0x1000 + self.committer.next_sequence()))

    def steps(self) -> list[int]:
        """Steps as somebody sees them who looks for the first time."""
        fresh = [step.record.step for step in Committer(LocalStorage(self.path)).list_steps()]
        assert [step.record.step for step in self.committer.list_steps()] == fresh
        return fresh

    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.path.iterdir())

    def content(self, step: int) -> bytes:
        return (self.path / str(step) / DATA).read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path / "runs 实验" / "é 1")


def make_junk(path: Path) -> list[str]:
    """Put things into a root that are none of ours; return their names."""
    names = ["007", "+5", " 5", "5 ", "٣", "-1", "1e3", "1_000", "0x10", "9" * 25, "best", "7.tmp", "7.tmp-xyz"]
    names += [
        "7.orbax-checkpoint-tmp-1",
        "8.old-",
        ".trash-",
        ".trash-mine",
        f"007.tmp-{A}",
        f"5.tmp-{A.upper()[:-1]}G",
    ]
    for name in names:
        (path / name).mkdir()
        (path / name / "commit.json").write_bytes(b"{}")
    (path / "99").mkdir()  # a number, and nothing in it
    (path / "98").mkdir()
    (path / "98" / "state.pt").write_bytes(b"weights")
    (path / "97").write_bytes(b"a file")
    (path / f"96.tmp-{A}").write_bytes(b"a file")
    (path / "95").symlink_to(path / "98")
    (path / "notes.txt").write_bytes(b"mine")
    return [*names, "99", "98", "97", f"96.tmp-{A}", "95", "notes.txt"]


def snapshot(path: Path) -> dict[str, bytes | str | None]:
    return {
        str(entry.relative_to(path)): os.readlink(entry)
        if entry.is_symlink()
        else entry.read_bytes()
        if entry.is_file()
        else None
        for entry in sorted(path.rglob("*"))
    }


# Listing


def test_a_missing_and_an_empty_root_have_no_steps(root: Root) -> None:
    assert root.steps() == []
    assert not root.path.exists()
    assert root.committer.next_sequence() == 1


def test_steps_are_integers_in_the_order_of_their_commits(root: Root) -> None:
    root.commit(2, 10, 1, 900_000, 1_080_000, 0)
    assert root.steps() == [2, 10, 1, 900_000, 1_080_000, 0]
    assert [step.record.sequence for step in root.committer.list_steps()] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_goes_back_has_its_own_last_commit_as_latest(root: Root) -> None:
    root.commit(500, 600, 700, 510)
    assert root.steps()[-1] == 510


def test_names_that_are_not_ours_are_neither_listed_nor_touched(root: Root) -> None:
    root.commit(5)
    junk = make_junk(root.path)
    before = snapshot(root.path)
    assert root.steps() == [5]
    assert root.committer.recover() == []
    assert root.committer.delete_hidden() == []
    assert snapshot(root.path) == before
    assert set(junk) <= set(root.names())


def test_copying_a_root_with_other_times_and_renaming_it_changes_nothing(root: Root, tmp_path: Path) -> None:
    root.commit(3, 1, 2)
    copy = Root(tmp_path / "copy")
    shutil.copytree(root.path, copy.path)
    for age, name in enumerate(["2", "3", "1"]):
        for entry in (copy.path / name, *(copy.path / name).rglob("*")):
            os.utime(entry, (age * 1000, age * 1000))
    assert copy.steps() == [3, 1, 2]
    moved = Root(tmp_path / "moved")
    root.path.rename(moved.path)
    assert moved.steps() == [3, 1, 2]
    latest = moved.committer.list_steps()[-1]
    moved.committer.check_files(latest, moved.committer.load_manifest(latest))


def test_a_step_copied_from_another_root_is_listed(root: Root, tmp_path: Path) -> None:
    other = Root(tmp_path / "other")
    other.commit(7)
    root.commit(3)
    shutil.copytree(other.path / "7", root.path / "7")
    assert set(root.steps()) == {3, 7}


def test_a_step_under_another_number_is_a_problem_and_no_step(root: Root) -> None:
    root.commit(3)
    shutil.copytree(root.path / "3", root.path / "4")
    assert root.steps() == [3]
    (problem,) = root.committer.problems()
    assert (problem.step, problem.prefix) == (4, "4")
    assert "Rename it to 3" in str(problem.error)


def test_a_damaged_record_is_a_problem_and_no_step(root: Root) -> None:
    root.commit(3, 4)
    record = root.path / "4" / "commit.json"
    data = bytearray(record.read_bytes())
    data[data.index(b"run")] ^= 1
    (root.path / "4" / "moved").write_bytes(b"")  # a change of the directory, as a copy makes one
    record.write_bytes(data)
    assert root.steps() == [3]
    (problem,) = root.committer.problems()
    assert isinstance(problem.error, CorruptDataError)
    assert problem.error.step == 4
    assert root.committer.next_sequence() == 3  # it may have been the one with sequence 2


def test_a_step_that_is_still_being_copied_is_listed_once_it_is_there(root: Root, tmp_path: Path) -> None:
    other = Root(tmp_path / "other")
    other.commit(7)
    data = (other.path / "7" / "commit.json").read_bytes()
    (root.path / "7").mkdir(parents=True)
    assert root.steps() == []
    for end in (0, 10, len(data) - 1):
        (root.path / "7" / "commit.json").write_bytes(data[:end])
        assert root.steps() == []
    (root.path / "7" / "commit.json").write_bytes(data)
    assert root.steps() == [7]


def test_listing_again_reads_no_record_again(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.commit(1, 2, 3)
    root.committer.list_steps()
    monkeypatch.setattr(LocalStorage, "get", lambda *_, **__: pytest.fail("read a record again"))
    assert [step.record.step for step in root.committer.list_steps()] == [1, 2, 3]


def test_a_read_only_root_can_be_listed_and_read(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.commit(1)
    for method in ("make_dir", "put", "put_if_absent", "replace", "rename_dir", "sync_dir", "delete", "delete_tree"):
        monkeypatch.setattr(LocalStorage, method, lambda *_, **__: pytest.fail("wrote to a root it should only read"))
    (step,) = root.committer.list_steps()
    root.committer.check_files(step, root.committer.load_manifest(step))
    assert root.committer.pinned_attempts() == frozenset()


# Reading


def test_a_manifest_that_was_changed_or_lost_is_reported(root: Root) -> None:
    step = commit_step(root.committer, root.storage, 4, A)
    path = root.path / "4" / "manifest.json"
    sound = path.read_bytes()
    for data in (sound[:-1] + b" ", sound[:-1], sound + b" ", b""):
        path.write_bytes(data)
        with pytest.raises(CorruptDataError) as caught:
            root.committer.load_manifest(step)
        assert caught.value.step == 4
        assert str(caught.value.path) == str(path)
    path.unlink()
    with pytest.raises(CorruptDataError, match="missing"):
        root.committer.load_manifest(step)


@pytest.mark.parametrize("damage", ["cut", "gone", "link", "directory"])
def test_files_that_are_cut_short_lost_or_no_files_are_reported(root: Root, damage: str) -> None:
    step = commit_step(root.committer, root.storage, 4, A)
    manifest = root.committer.load_manifest(step)
    root.committer.check_files(step, manifest)
    path = root.path / "4" / DATA
    data = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(data[:-1])
    elif damage == "link":
        (root.path / "elsewhere").write_bytes(data)
        path.symlink_to(root.path / "elsewhere")
    elif damage == "directory":
        path.mkdir()
    with pytest.raises(CorruptDataError) as caught:
        root.committer.check_files(step, manifest)
    assert (caught.value.step, caught.value.path) == (4, str(path))


def test_a_step_deleted_under_a_reader_is_told_from_a_damaged_one(root: Root) -> None:
    root.commit(3)
    step = commit_step(root.committer, root.storage, 4, A)
    manifest = root.committer.load_manifest(step)
    root.committer.hide(step)
    for read in (lambda: root.committer.load_manifest(step), lambda: root.committer.check_files(step, manifest)):
        with pytest.raises(StepNotFoundError) as caught:
            read()
        assert caught.value.available == (3,)


# Making


def test_nothing_is_listed_before_the_publish(root: Root) -> None:
    manifest = prepare_step(root.committer, root.storage, 4, A)
    written = root.committer.write_manifest(4, A, manifest)
    assert root.steps() == []
    root.committer.publish(record_for(4, A, 1, *written))
    assert root.steps() == [4]
    assert root.names() == ["4"]
    assert root.content(4) == content_of(A)


def test_an_attempt_needs_an_id_that_is_ours(root: Root) -> None:
    for attempt in ("", "a1", "../../../../etc/a", A.upper()):
        with pytest.raises(InvalidArgumentError, match="hexadecimal"):
            root.committer.begin(4, attempt)


def test_a_step_is_not_replaced_unless_asked_to(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    manifest = prepare_step(root.committer, root.storage, 4, B)
    written = root.committer.write_manifest(4, B, manifest)
    with pytest.raises(StepExistsError) as caught:
        root.committer.publish(record_for(4, B, 2, *written))
    assert caught.value.outcome == "not_committed"
    assert root.content(4) == content_of(A)
    assert root.committer.abandon(4, B)
    assert root.names() == ["4"]


def test_a_replaced_step_is_gone_and_the_new_one_there(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    root.commit(5)
    commit_step(root.committer, root.storage, 4, B)
    assert root.steps() == [5, 4]
    assert root.content(4) == content_of(B)
    assert root.committer.delete_hidden() == []
    assert root.names() == ["4", "5"]


def test_the_name_of_something_foreign_is_refused_before_a_byte_is_written(root: Root) -> None:
    root.path.mkdir(parents=True)
    for make in (lambda p: p.mkdir(), lambda p: p.write_bytes(b""), lambda p: p.symlink_to(root.path)):
        place = root.path / "4"
        make(place)
        with pytest.raises(StepExistsError) as caught:
            root.committer.begin(4, A)
        assert caught.value.outcome == "not_committed"
        assert root.names() == ["4"]
        place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()


def test_a_damaged_step_is_set_aside_and_kept_when_it_is_saved_again(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    (root.path / "4" / "commit.json").write_bytes(b"{")
    commit_step(Committer(root.storage), root.storage, 4, B)
    assert root.content(4) == content_of(B)
    (aside,) = set(root.names()) - {"4"}
    assert (root.path / aside / DATA).read_bytes() == content_of(A)
    assert Committer(root.storage).recover() == []


def test_a_step_of_a_newer_release_is_not_set_aside(root: Root) -> None:
    record = commit_step(root.committer, root.storage, 4, A).record
    path = root.path / "4" / "commit.json"
    path.write_bytes(record.to_bytes().replace(b'"version":1', b'"version":3'))
    fresh = Committer(root.storage)
    assert isinstance(fresh.problems()[0].error, UnsupportedVersionError)
    with pytest.raises(StepExistsError, match="newer"):
        fresh.begin(4, B)


def test_private_roots_take_only_their_own_records(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    committer = Committer(storage, scope="per_process", process_index=1)
    own = {"scope": "per_process", "process_index": 1, "process_count": 2}
    assert commit_step(committer, storage, 3, A, **own).record.process_index == 1
    for wrong in ({}, own | {"process_index": 0}):
        with pytest.raises(InvalidArgumentError, match="does not belong") as caught:
            commit_step(committer, storage, 4, B, **wrong)
        assert caught.value.outcome == "not_committed"
        committer.abandon(4, B)


# Losing


def test_an_abandoned_attempt_cannot_be_published(root: Root) -> None:
    manifest = prepare_step(root.committer, root.storage, 4, A)
    written = root.committer.write_manifest(4, A, manifest)
    assert root.committer.abandon(4, A)
    assert not root.committer.abandon(4, A)
    for late in (
        lambda: root.committer.publish(record_for(4, A, 1, *written)),
        lambda: root.committer.write_manifest(4, A, manifest),
    ):
        with pytest.raises(AttemptLostError) as caught:
            late()
        assert caught.value.outcome == "not_committed"
        assert caught.value.step == 4
    assert root.steps() == []
    assert root.names() == []


def test_a_published_attempt_cannot_be_abandoned(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    assert not root.committer.abandon(4, A)
    assert root.steps() == [4]


@pytest.mark.parametrize("replacing", [False, True])
def test_an_attempt_taken_away_at_the_last_moment_leaves_the_old_step(
    root: Root, monkeypatch: pytest.MonkeyPatch, *, replacing: bool
) -> None:
    old = commit_step(root.committer, root.storage, 4, A) if replacing else None
    manifest = prepare_step(root.committer, root.storage, 4, B)
    written = root.committer.write_manifest(4, B, manifest)
    rename = LocalStorage.rename_dir

    def taken_over_first(storage: LocalStorage, source: str, target: str) -> bool:
        if source == f"4.tmp-{B}" and target == "4":
            monkeypatch.undo()
            Committer(LocalStorage(root.path)).recover()
        return rename(storage, source, target)

    monkeypatch.setattr(LocalStorage, "rename_dir", taken_over_first)
    with pytest.raises(AttemptLostError) as caught:
        root.committer.publish(record_for(4, B, 2, *written), old)
    assert caught.value.outcome == "not_committed"
    assert root.steps() == ([4] if replacing else [])
    if replacing:
        assert root.content(4) == content_of(A)
    root.committer.delete_hidden()
    assert root.names() == (["4"] if replacing else [])


# Removing


def test_a_hidden_step_is_gone_from_the_listing_at_once_and_from_disk_later(root: Root) -> None:
    root.commit(3)
    step = commit_step(root.committer, root.storage, 4, A)
    assert root.committer.hide(step)
    assert not root.committer.hide(step)
    assert root.steps() == [3]
    assert root.names() == [f".trash-{A}", "3"]
    assert root.committer.delete_hidden() == []
    assert root.names() == ["3"]


def test_a_step_in_use_is_kept_and_deleted_another_time(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    step = commit_step(root.committer, root.storage, 4, A)

    def busy(*_: object) -> bool:
        raise StorageError("cannot rename", errno=errno.EBUSY)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "rename_dir", busy)
        assert not root.committer.hide(step)
    assert root.steps() == [4]
    assert root.committer.hide(step)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete_tree", busy)
        assert root.committer.delete_hidden() == [f".trash-{A}"]
    assert root.committer.delete_hidden() == []


def test_a_hidden_name_that_is_taken_is_avoided(root: Root) -> None:
    step = commit_step(root.committer, root.storage, 4, A)
    (root.path / f".trash-{A}").mkdir()
    assert root.committer.hide(step)
    assert root.names() == [f".trash-{A}", f".trash-{A}-1"]
    assert root.committer.delete_hidden() == []
    assert root.names() == []


def test_nothing_outside_the_root_is_deleted_through_links(root: Root, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"1")
    step = commit_step(root.committer, root.storage, 4, A)
    (root.path / "4" / "link").symlink_to(outside)
    (root.path / f".trash-{B}").symlink_to(outside)
    (root.path / f"5.tmp-{C}").symlink_to(outside)
    root.committer.hide(step)
    root.committer.recover()
    root.committer.delete_hidden()
    assert (outside / "precious").read_bytes() == b"1"


# Recovering


def test_unfinished_attempts_are_swept_with_everything_in_them(root: Root) -> None:
    root.commit(3)
    manifest = prepare_step(root.committer, root.storage, 4, A)
    root.committer.write_manifest(4, A, manifest)
    root.committer.begin(5, B)
    lines = root.committer.recover()
    assert sorted(line.partition("(")[2] for line in lines) == [f"4.tmp-{A})", f"5.tmp-{B})"]
    assert root.committer.delete_hidden() == []
    assert root.names() == ["3"]


def test_a_step_whose_replacement_was_interrupted_is_listed_and_gets_its_name_back(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    (root.path / "4").rename(root.path / f"4.old-{B}")
    assert root.steps() == [4]
    (step,) = root.committer.list_steps()
    root.committer.check_files(step, root.committer.load_manifest(step))
    assert len(root.committer.recover()) == 1
    assert root.names() == ["4"]
    assert root.steps() == [4]


def test_an_interrupted_replacement_can_be_replaced_and_hidden_as_it_is(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    (root.path / "4").rename(root.path / f"4.old-{B}")
    commit_step(root.committer, root.storage, 4, C)
    assert root.content(4) == content_of(C)
    root.committer.delete_hidden()
    assert root.names() == ["4"]
    (root.path / "4").rename(root.path / f"4.old-{B}")
    assert root.committer.hide(root.committer.list_steps()[0])
    assert root.steps() == []


def test_a_replaced_step_that_was_not_hidden_is_swept(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    shutil.copytree(root.path / "4", root.path / f"4.old-{C}")
    commit_step(root.committer, root.storage, 4, B)
    assert root.steps() == [4]
    assert root.content(4) == content_of(B)
    assert len(root.committer.recover()) == 1
    root.committer.delete_hidden()
    assert root.names() == ["4"]


def test_an_old_step_is_kept_while_the_one_in_its_place_is_damaged(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    (root.path / "4").rename(root.path / f"4.old-{B}")
    (root.path / "4").mkdir()
    (root.path / "4" / "commit.json").write_bytes(b"{")
    assert root.steps() == [4]
    assert root.committer.recover() == []
    assert root.steps() == [4]


# Pins


def test_pins_name_the_attempt_that_has_the_step_now(root: Root) -> None:
    root.commit(3)
    commit_step(root.committer, root.storage, 4, A)
    assert pin(root.storage, 4, note="for the paper")
    assert not pin(root.storage, 4)
    assert pin(root.storage, 9)  # not there yet
    (root.path / ".safepoint" / "pins" / "04").write_bytes(b"")
    assert pinned_steps(root.storage) == {4, 9}
    assert root.committer.pinned_attempts() == {A}
    assert unpin(root.storage, 4)
    assert not unpin(root.storage, 4)
    assert root.committer.pinned_attempts() == frozenset()
    assert root.steps() == [3, 4]
