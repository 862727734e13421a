"""What only roots without a rename have: slots, marks and tombstones (safepoint.manager.marker_commit)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.tombstone import Tombstone
from safepoint.manager.commit import Committer
from safepoint.manager.errors import AttemptLostError, CorruptDataError, InvalidArgumentError, StepExistsError
from safepoint.manager.slots import claim_slot, fence_attempt
from safepoint.manager.unsettled import read_marks

from support.roots import KINDS_WITHOUT_RENAMES, OBJECT_KINDS
from support.steps import DATA, attempt_id, commit_step, content_of

if TYPE_CHECKING:
    from support.roots import Root

A, B, C = attempt_id(0xA), attempt_id(0xB), attempt_id(0xC)

pytestmark = pytest.mark.parametrize("root", KINDS_WITHOUT_RENAMES, indirect=True)


def test_object_stores_commit_by_markers_and_cannot_by_renames(root: Root) -> None:
    if root.kind not in OBJECT_KINDS:
        assert Committer(root.storage).prefix_of(4, A) == f"4.tmp-{A}"
        return
    assert Committer(root.storage).prefix_of(4, A) == f"4/{A}"
    with pytest.raises(InvalidArgumentError, match="rename"):
        Committer(root.storage, commit="rename")
    with pytest.raises(InvalidArgumentError, match="rename"):
        root.manager(commit="rename")


def test_a_step_is_its_record_and_the_directory_that_it_names(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    assert root.files() == {"4/commit.json", f"4/{A}/manifest.json", f"4/{A}/{DATA}"}
    (step,) = root.another().list_steps()
    assert (step.record.files, step.record.version, step.files_prefix) == (A, 2, f"4/{A}")


def test_what_others_of_a_job_still_write_after_it_gave_up_goes_later(root: Root) -> None:
    committer = root.another(process_count=2)
    record = root.prepared(4, A, committer=committer)
    assert committer.abandon(4, A)
    if not root.storage.renames:  # where there are directories, it finds none
        root.storage.put(f"4/{A}/late", b"1")
    assert committer.delete_hidden() == []
    assert [mark.attempt for mark in read_marks(root.storage)] == [A]
    assert not any(step.record.step == 4 for step in committer.list_steps())
    commit_step(committer, root.storage, 5, B)  # which all begin together
    assert committer.delete_hidden() == []
    root.check_clean()
    with pytest.raises(AttemptLostError):
        committer.publish(record)


def test_a_fence_keeps_what_a_record_has_that_is_not_known_here(root: Root) -> None:
    old = commit_step(root.committer, root.storage, 4, A)
    root.prepared(4, B)
    root.committer.abandon(4, B)
    (step,) = root.another().list_steps()
    assert step.record == replace(old.record, fence=B)


def test_an_attempt_that_began_on_a_fenced_record_stays_abandoned_when_the_first_is_fenced_again(root: Root) -> None:
    """Where a version is a digest of the content, as on S3, a content that comes back would let it be published."""
    old = commit_step(root.committer, root.storage, 4, A)
    root.prepared(4, B)
    fence_attempt(root.storage, 4, B)
    fenced = root.read("4/commit.json")
    record = root.prepared(4, C)
    for attempt in (C, B):
        assert fence_attempt(root.storage, 4, attempt)
    with pytest.raises((AttemptLostError, StepExistsError)) as caught:
        root.committer.publish(record, old)
    assert caught.value.outcome == "not_committed"
    assert root.steps() == {4: content_of(A)}
    assert root.read("4/commit.json") != fenced


def test_a_claim_that_is_made_again_is_another_one(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    root.storage.make_dir("")
    claims = []
    put_if_absent = root.storage.put_if_absent

    def beaten_at_once(path: str, data: bytes) -> bool:
        monkeypatch.undo()
        done = put_if_absent(path, data)
        claims.append(root.read("4/commit.json"))
        root.another().begin(4, B)
        claims.append(root.read("4/commit.json"))
        return done

    monkeypatch.setattr(root.storage, "put_if_absent", beaten_at_once)
    slot = claim_slot(root.storage, 4, A)
    claims.append(root.read("4/commit.json"))
    assert slot.data == claims[-1]
    assert len(set(claims)) == 3


def test_a_tombstone_that_stands_for_nothing_goes_with_the_next_owner_and_nothing_beside_it(root: Root) -> None:
    root.commit(3)
    for step in (4, 5):
        root.write(f"{step}/commit.json", Tombstone(step=step, attempt=A, state="claimed").to_bytes())
    root.write(f"5/{B}/copied", b"1")
    record = root.prepared(6, C)
    assert root.another().recover(spare=[C]) == []
    assert {path for path in root.files() if path[0] in "45"} == {f"5/{B}/copied"}
    root.committer.publish(record)
    assert list(root.steps()) == [3, 6]


def test_marks_and_tombstones_that_are_none_delete_nothing(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    for number, data in enumerate([b"", b"{}", b"[]", b'{"kind":"deleted","prefix":"..","attempt":"a","files":""}']):
        root.write(f".safepoint/unsettled/{number}", data)
    assert root.another().recover() == []
    assert root.another().delete_hidden() == []
    assert root.steps() == {4: content_of(A)}
    tombstone = Tombstone(step=4, attempt=A, state="deleted").to_bytes()
    root.storage.replace("4/commit.json", tombstone.replace(b"deleted", b"removed"))
    (problem,) = root.another().problems()
    assert isinstance(problem.error, CorruptDataError)
