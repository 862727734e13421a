"""Committing without a rename: promises of safepoint.manager.marker_commit, on an object store and on a file system."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import LocalStorage, MemoryObjects
from safepoint.manager.commit import Committer
from safepoint.manager.errors import (
    AttemptLostError,
    InvalidArgumentError,
    StepExistsError,
)
from safepoint.manager.unsettled import read_marks
from safepoint.manager.verifying import verify_steps

from support.marker_root import Root, prepared
from support.steps import DATA, attempt_id, commit_step, content_of

if TYPE_CHECKING:
    from pathlib import Path


A, B, C = attempt_id(0xA), attempt_id(0xB), attempt_id(0xC)


@pytest.fixture(params=["objects", "local"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    return Root(MemoryObjects() if request.param == "objects" else LocalStorage(tmp_path / "runs 实验" / "é 1"))


def test_an_object_store_commits_by_markers_and_cannot_by_renames() -> None:
    assert Committer(MemoryObjects()).prefix_of(4, A) == f"4/{A}"
    assert Committer(MemoryObjects(), commit="marker").prefix_of(4, A) == f"4/{A}"
    with pytest.raises(InvalidArgumentError, match="rename"):
        Committer(MemoryObjects(), commit="rename")


def test_a_step_is_its_record_and_the_directory_that_it_names(root: Root) -> None:
    record = prepared(root, 4, A)
    assert root.steps() == {}
    root.committer.publish(record)
    assert root.steps() == {4: content_of(A)}
    assert root.files() == {"4/commit.json", f"4/{A}/manifest.json", f"4/{A}/{DATA}"}
    (step,) = root.another().list_steps()
    assert (step.record.files, step.record.version, step.files_prefix) == (A, 2, f"4/{A}")
    assert verify_steps(root.storage) == []
    root.clean()


def test_steps_are_in_the_order_of_their_commits(root: Root) -> None:
    root.commit(2, 10, 1, 0)
    assert [step.record.step for step in root.another().list_steps()] == [2, 10, 1, 0]
    assert root.another().next_sequence() == 5


def test_a_step_is_replaced_only_when_asked_to_and_then_gone(root: Root) -> None:
    old = commit_step(root.committer, root.storage, 4, A)
    record = prepared(root, 4, B)
    with pytest.raises(StepExistsError) as caught:
        root.committer.publish(record)
    assert caught.value.outcome == "not_committed"
    assert root.committer.abandon(4, B)
    assert root.steps() == {4: content_of(A)}
    root.clean()
    record = prepared(root, 4, C)
    root.committer.publish(record, root.committer.list_steps()[0])
    assert root.steps() == {4: content_of(C)}
    assert not root.committer.hide(old)
    root.clean()


def test_a_given_up_replacement_stays_hidden_and_the_replaced_step_comes_back(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    replaced = root.committer.publish_beside(prepared(root, 4, B), root.committer.list_steps()[0])
    assert replaced is not None
    assert root.committer.delete_hidden() == []  # takes nothing that may be wanted again
    assert root.steps() == {4: content_of(B)}
    assert root.committer.hide(root.committer.list_steps()[0])
    assert root.steps() == {4: content_of(A)}
    root.clean()


def test_of_two_jobs_that_save_a_step_one_wins_and_the_other_says_so(root: Root) -> None:
    first, second = root.another(), root.another()
    record = prepared(root, 4, A, committer=first)
    other = prepared(root, 4, B, committer=second)  # which takes the slot
    second.publish(other)
    with pytest.raises(StepExistsError) as caught:
        first.publish(record)
    assert caught.value.outcome == "not_committed"
    assert B in str(caught.value)
    assert not first.abandon(4, A)
    assert root.steps() == {4: content_of(B)}
    root.clean()


def test_of_many_jobs_that_save_a_step_at_once_one_wins(root: Root) -> None:
    jobs = [(root.another(), attempt_id(0x100 + number)) for number in range(6)]
    outcomes: dict[str, str | None] = {}
    start = threading.Barrier(len(jobs))

    def save(committer: Committer, attempt: str) -> None:
        start.wait()
        try:
            committer.publish(prepared(root, 4, attempt, committer=committer))
        except (AttemptLostError, StepExistsError) as error:
            outcomes[attempt] = error.outcome
            committer.abandon(4, attempt)
        else:
            outcomes[attempt] = "committed"

    threads = [threading.Thread(target=save, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    winners = [attempt for attempt, outcome in outcomes.items() if outcome == "committed"]
    assert sorted(map(str, outcomes.values())) == ["committed", *["not_committed"] * 5]
    assert root.steps() == {4: content_of(winners[0])}
    root.clean()


@pytest.mark.parametrize("replacing", [False, True])
def test_an_abandoned_attempt_is_never_published_whoever_abandoned_it(root: Root, *, replacing: bool) -> None:
    old = commit_step(root.committer, root.storage, 4, A) if replacing else None
    record = prepared(root, 4, B)
    assert root.another(process_count=2).abandon(4, B)
    assert not root.another(process_count=2).abandon(4, B)
    with pytest.raises(AttemptLostError) as caught:
        root.committer.publish(record, old)
    assert (caught.value.outcome, caught.value.step) == ("not_committed", 4)
    assert root.steps() == ({4: content_of(A)} if replacing else {})
    root.committer.abandon(4, B)
    root.clean()
    commit_step(root.committer, root.storage, 4, C)
    assert root.steps() == {4: content_of(C)}
    root.clean()


def test_what_others_of_a_job_still_write_after_it_gave_up_goes_later(root: Root) -> None:
    committer = root.another(process_count=2)
    record = prepared(root, 4, A, committer=committer)
    assert committer.abandon(4, A)
    if not root.storage.renames:  # where there are directories, it finds none
        root.storage.put(f"4/{A}/late", b"1")
    assert committer.delete_hidden() == []
    assert [mark.attempt for mark in read_marks(root.storage)] == [A]
    assert not any(step.record.step == 4 for step in committer.list_steps())
    commit_step(committer, root.storage, 5, B)  # which all begin together
    assert committer.delete_hidden() == []
    root.clean()
    with pytest.raises(AttemptLostError):
        committer.publish(record)


def test_a_published_attempt_cannot_be_abandoned(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    assert not root.committer.abandon(4, A)
    assert root.steps() == {4: content_of(A)}


def test_a_hidden_step_is_gone_at_once_and_its_files_later(root: Root) -> None:
    root.commit(3)
    step = commit_step(root.committer, root.storage, 4, A)
    assert root.committer.hide(step)
    assert not root.committer.hide(step)
    assert set(root.steps()) == {3}
    assert f"4/{A}/{DATA}" in root.files()
    root.clean()
    commit_step(root.committer, root.storage, 4, B)
    assert root.steps()[4] == content_of(B)


def test_deleting_takes_nothing_of_an_attempt_that_is_under_way(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    record = prepared(root, 4, B)
    assert root.committer.delete_hidden() == []
    old = root.committer.list_steps()[0]
    root.committer.publish(record, old)
    assert root.steps() == {4: content_of(B)}
    root.clean()


def test_the_next_owner_clears_up_what_was_left_and_nobody_publishes_it(root: Root) -> None:
    root.commit(3)
    commit_step(root.committer, root.storage, 5, C)
    records = [prepared(root, 4, A), prepared(root, 5, B)]
    successor = root.another()
    lines = successor.recover()
    assert sorted(line.partition("(")[2] for line in lines) == [f"4/{A})", f"5/{B})"]
    for record in records:
        with pytest.raises(AttemptLostError):
            root.committer.publish(record, root.committer.list_steps()[-1] if record.step == 5 else None)
    assert successor.delete_hidden() == []
    assert set(root.steps()) == {3, 5}
    Root.clean(root)


def test_an_attempt_that_is_gone_on_with_is_spared(root: Root) -> None:
    prepared(root, 4, A)
    successor = root.another()
    assert successor.recover(spare={A}) == []
    assert successor.delete_hidden() == []
    assert successor.resume(4, A)
    assert not successor.resume(4, B)
    assert root.storage.size(f"4/{A}/manifest.json") is None
    assert root.storage.size(f"4/{A}/{DATA}") is not None


def test_a_fence_keeps_what_a_record_has_that_is_not_known_here(root: Root) -> None:
    old = commit_step(root.committer, root.storage, 4, A)
    prepared(root, 4, B)
    root.committer.abandon(4, B)
    (step,) = root.another().list_steps()
    assert step.record == replace(old.record, fence=B)
