"""Commits by renaming directories: promises of safepoint.manager.commit that are about a file system.

About names beside each other (`.tmp-`, `.old-`, `.trash-`), times, links, and entries that need not be read again.
What is promised for a root of any kind is in tests/contract/test_root_listing.py and test_root_commits.py.
"""

from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import LocalStorage
from safepoint.manager.commit import Committer
from safepoint.manager.errors import AttemptLostError, CorruptDataError, StepExistsError, StorageError
from safepoint.manager.unsettled import read_marks

from support.roots import Root
from support.steps import DATA, attempt_id, commit_step, content_of, prepare_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

A, B, C = attempt_id(0xA), attempt_id(0xB), attempt_id(0xC)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(kind="directory", url=str(tmp_path / "runs 实验" / "é 1"))


# Listing


def test_links_and_empty_directories_are_neither_listed_nor_touched(root: Root) -> None:
    root.commit(5)
    for name in ("99", "7.tmp", f"007.tmp-{A}", ".trash-mine"):
        (root.path / name).mkdir()
    (root.path / "98").mkdir()
    (root.path / "98" / "commit.json").symlink_to(root.path / "5" / "commit.json")
    (root.path / "95").symlink_to(root.path / "5")
    (root.path / f"94.tmp-{A}").symlink_to(root.path / "5")
    before = snapshot(root.path)
    assert list(root.steps()) == [5]
    assert root.committer.recover() == []
    assert root.committer.delete_hidden() == []
    assert snapshot(root.path) == before


def snapshot(path: Path) -> dict[str, bytes | str | None]:
    return {
        str(entry.relative_to(path)): os.readlink(entry)
        if entry.is_symlink()
        else entry.read_bytes()
        if entry.is_file()
        else None
        for entry in sorted(path.rglob("*"))
    }


def test_copying_a_root_with_other_times_and_renaming_it_changes_nothing(root: Root, tmp_path: Path) -> None:
    root.commit(3, 1, 2)
    copy = Root(kind="directory", url=str(tmp_path / "copy"))
    shutil.copytree(root.path, copy.path)
    for age, name in enumerate(["2", "3", "1"]):
        for entry in (copy.path / name, *(copy.path / name).rglob("*")):
            os.utime(entry, (age * 1000, age * 1000))
    assert list(copy.steps()) == [3, 1, 2]
    moved = Root(kind="directory", url=str(tmp_path / "moved"))
    root.path.rename(moved.path)
    assert list(moved.steps()) == [3, 1, 2]


def test_listing_again_reads_no_record_again(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.commit(1, 2, 3)
    root.committer.list_steps()
    monkeypatch.setattr(LocalStorage, "get", lambda *_, **__: pytest.fail("read a record again"))
    assert [step.record.step for step in root.committer.list_steps()] == [1, 2, 3]


def test_a_root_that_is_as_it_was_is_one_listing_and_any_change_of_it_another(root: Root) -> None:
    root.commit(1, 2, 3)
    listing = root.committer.listing()
    root.storage.make_dir(".safepoint")
    root.storage.put(".safepoint/note", b"")
    (root.path / "notes.txt").write_text("")
    (root.path / "notes.txt").unlink()
    assert root.committer.listing() is listing

    def steps_after(change: Callable[[], object]) -> list[int]:
        change()
        return [step.record.step for step in root.committer.list_steps()]

    aside = root.path.with_name("aside")
    assert steps_after(lambda: (root.path / "2").rename(aside)) == [1, 3]
    assert steps_after(lambda: aside.rename(root.path / "2")) == [1, 2, 3]
    assert steps_after(lambda: root.commit(4)) == [1, 2, 3, 4]
    assert steps_after((root.path / "3" / "commit.json").unlink) == [1, 2, 4]
    assert root.committer.listing().occupied == {"1", "2", "3", "4"}


@pytest.mark.parametrize("damage", [b"", b"{}"], ids=["cut short", "of another content"])
def test_a_record_that_is_damaged_and_mended_in_its_place_is_looked_at_each_time(root: Root, damage: bytes) -> None:
    root.commit(1, 2)
    record = root.path / "2" / "commit.json"
    whole = record.read_bytes()
    record.write_bytes(damage)
    for _ in range(2):
        assert [step.record.step for step in root.another().list_steps()] == [1]
    reader = root.another()
    assert [[problem.step for problem in reader.problems()] for _ in range(2)] == [[2], [2]]
    record.write_bytes(whole)
    assert [step.record.step for step in reader.list_steps()] == [1, 2]


def test_a_link_that_comes_to_lead_to_a_step_is_a_problem_at_the_next_look(root: Root) -> None:
    root.commit(1)
    other = root.path.with_name("other")
    other.mkdir()
    (root.path / "2").symlink_to(other)
    reader = root.another()
    assert [len(reader.problems()) for _ in range(2)] == [0, 0]
    (other / "commit.json").write_bytes((root.path / "1" / "commit.json").read_bytes())
    assert [problem.step for problem in reader.problems()] == [2]


def test_a_directory_that_becomes_a_step_is_one_at_the_next_look(root: Root) -> None:
    root.commit(1, 2)
    record = root.path / "2" / "commit.json"
    whole = record.read_bytes()
    record.unlink()
    reader = root.another()
    assert [len(reader.list_steps()) for _ in range(2)] == [1, 1]
    record.write_bytes(whole)
    assert len(reader.list_steps()) == 2


def test_a_link_in_place_of_a_file_is_reported_whatever_it_leads_to(root: Root) -> None:
    step = commit_step(root.committer, root.storage, 4, A)
    manifest = root.committer.load_manifest(step)
    path = root.path / "4" / DATA
    path.rename(root.path / "elsewhere")
    path.symlink_to(root.path / "elsewhere")
    with pytest.raises(CorruptDataError) as caught:
        root.committer.check_files(step, manifest)
    assert (caught.value.step, caught.value.path) == (4, str(path))


# Making


@pytest.mark.parametrize(
    "make", [lambda path: path.mkdir(), lambda path: path.symlink_to(path.parent)], ids=["empty directory", "link"]
)
def test_what_has_the_name_of_a_step_and_is_none_is_refused(root: Root, make: Callable[[Path], None]) -> None:
    root.path.mkdir(parents=True)
    make(root.path / "4")
    with pytest.raises(StepExistsError) as caught:
        root.committer.begin(4, A)
    assert caught.value.outcome == "not_committed"
    assert root.names() == {"4"}


def test_a_damaged_step_is_set_aside_as_a_whole(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    (root.path / "4" / "commit.json").write_bytes(b"{")
    commit_step(root.another(), root.storage, 4, B)
    (aside,) = root.names() - {"4"}
    assert (root.path / aside / DATA).read_bytes() == content_of(A)


def test_a_root_may_change_from_renames_to_markers_and_back(root: Root) -> None:
    storage = root.storage
    renaming, marking = Committer(storage), Committer(storage, commit="marker")
    prepare_step(renaming, storage, 4, A)
    prepare_step(marking, storage, 5, B)
    prepare_step(renaming, storage, 6, C)
    assert len(Committer(storage, commit="marker").recover()) == 3
    prepare_step(marking, storage, 7, A)
    assert len(Committer(storage).recover()) == 2  # that of step 5 is told again, its files being there still
    assert Committer(storage).delete_hidden() == []
    assert root.names() == set()
    commit_step(renaming, storage, 4, B)
    commit_step(marking, storage, 4, C)
    commit_step(renaming, storage, 4, A)
    for committer in (renaming, marking, Committer(storage)):
        committer.recover()
        assert committer.delete_hidden() == []
    assert read_marks(storage) == []
    assert sorted(entry.name for entry in storage.list("4")) == ["commit.json", "manifest.json", "model"]


# Losing


def test_an_abandoned_attempt_has_no_place_to_write_to(root: Root) -> None:
    manifest = prepare_step(root.committer, root.storage, 4, A)
    assert root.committer.abandon(4, A)
    with pytest.raises(AttemptLostError) as caught:
        root.committer.write_manifest(4, A, manifest)
    assert (caught.value.outcome, caught.value.step) == ("not_committed", 4)
    assert root.names() == set()


@pytest.mark.parametrize("replacing", [False, True])
def test_an_attempt_taken_away_at_the_last_moment_leaves_the_old_step(
    root: Root, monkeypatch: pytest.MonkeyPatch, *, replacing: bool
) -> None:
    old = commit_step(root.committer, root.storage, 4, A) if replacing else None
    record = root.prepared(4, B)
    rename = LocalStorage.rename_dir

    def taken_over_first(storage: LocalStorage, source: str, target: str) -> bool:
        if source == f"4.tmp-{B}" and target == "4":
            monkeypatch.undo()
            root.another().recover()
        return rename(storage, source, target)

    monkeypatch.setattr(LocalStorage, "rename_dir", taken_over_first)
    with pytest.raises(AttemptLostError) as caught:
        root.committer.publish(record, old)
    assert caught.value.outcome == "not_committed"
    assert root.steps() == ({4: content_of(A)} if replacing else {})
    root.check_clean()


# Removing


def test_a_hidden_step_waits_for_its_deletion_under_another_name(root: Root) -> None:
    root.commit(3)
    assert root.committer.hide(commit_step(root.committer, root.storage, 4, A))
    assert root.names() == {f".trash-{A}", "3"}
    root.check_clean()


def test_a_step_in_use_is_kept_and_deleted_another_time(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    step = commit_step(root.committer, root.storage, 4, A)

    def busy(*_: object) -> bool:
        raise StorageError("cannot rename", errno=errno.EBUSY)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "rename_dir", busy)
        assert not root.committer.hide(step)
    assert list(root.steps()) == [4]
    assert root.committer.hide(step)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete_tree", busy)
        assert root.committer.delete_hidden() == [f".trash-{A}"]
    assert root.committer.delete_hidden() == []


def test_a_hidden_name_that_is_taken_is_avoided(root: Root) -> None:
    step = commit_step(root.committer, root.storage, 4, A)
    (root.path / f".trash-{A}").mkdir()
    assert root.committer.hide(step)
    assert root.names() == {f".trash-{A}", f".trash-{A}-1"}
    assert root.committer.delete_hidden() == []
    assert root.names() == set()


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


def test_a_step_whose_replacement_was_interrupted_is_listed_and_gets_its_name_back(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    (root.path / "4").rename(root.path / f"4.old-{B}")
    assert root.steps() == {4: content_of(A)}
    assert len(root.committer.recover()) == 1
    assert root.names() == {"4"}
    assert root.steps() == {4: content_of(A)}


def test_an_interrupted_replacement_can_be_replaced_and_hidden_as_it_is(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    (root.path / "4").rename(root.path / f"4.old-{B}")
    commit_step(root.committer, root.storage, 4, C)
    assert root.steps() == {4: content_of(C)}
    root.check_clean()
    (root.path / "4").rename(root.path / f"4.old-{B}")
    assert root.committer.hide(root.committer.list_steps()[0])
    assert root.steps() == {}


def test_a_replaced_step_that_was_not_hidden_is_swept(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    shutil.copytree(root.path / "4", root.path / f"4.old-{C}")
    commit_step(root.committer, root.storage, 4, B)
    assert root.steps() == {4: content_of(B)}
    assert len(root.committer.recover()) == 1
    root.check_clean()


def test_an_old_step_is_kept_while_the_one_in_its_place_is_damaged(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    (root.path / "4").rename(root.path / f"4.old-{B}")
    (root.path / "4").mkdir()
    (root.path / "4" / "commit.json").write_bytes(b"{")
    assert root.steps() == {4: content_of(A)}
    assert root.committer.recover() == []
    assert root.steps() == {4: content_of(A)}
