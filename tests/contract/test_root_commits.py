"""How steps appear in a root of any kind, are replaced, lost and removed: promises of safepoint.manager.commit."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest

from safepoint.manager.errors import AttemptLostError, CorruptDataError, InvalidArgumentError, StepExistsError
from safepoint.manager.unsettled import read_marks
from safepoint.manager.verifying import verify_steps

from support.roots import Root
from support.steps import DATA, attempt_id, commit_step, content_of

if TYPE_CHECKING:
    from pathlib import Path

    from safepoint.manager.commit import Committer

    from support.roots import RootKind

A, B, C = attempt_id(0xA), attempt_id(0xB), attempt_id(0xC)


# Making


def test_nothing_is_listed_before_the_publish(root: Root) -> None:
    record = root.prepared(4, A)
    assert root.steps() == {}
    root.committer.publish(record)
    assert root.steps() == {4: content_of(A)}
    assert root.names() == {"4"}
    assert verify_steps(root.storage) == []
    root.check_clean()


def test_an_attempt_needs_an_id_that_is_ours(root: Root) -> None:
    for attempt in ("", "a1", "../../../../etc/a", A.upper()):
        with pytest.raises(InvalidArgumentError, match="hexadecimal"):
            root.committer.begin(4, attempt)


def test_a_step_is_not_replaced_unless_asked_to(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    record = root.prepared(4, B)
    with pytest.raises(StepExistsError) as caught:
        root.committer.publish(record)
    assert caught.value.outcome == "not_committed"
    assert root.steps() == {4: content_of(A)}
    assert root.committer.abandon(4, B)
    root.check_clean()


def test_a_replaced_step_is_gone_and_the_new_one_there(root: Root) -> None:
    old = commit_step(root.committer, root.storage, 4, A)
    root.commit(5)
    commit_step(root.committer, root.storage, 4, B)
    steps = root.steps()
    assert list(steps) == [5, 4]
    assert steps[4] == content_of(B)
    root.check_clean()
    if root.kind != "directory":  # there its name is that of the new one
        assert not root.committer.hide(old)


def test_a_given_up_replacement_stays_hidden_and_the_replaced_step_comes_back(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    replaced = root.committer.publish_beside(root.prepared(4, B), root.committer.list_steps()[0])
    assert replaced is not None
    assert root.committer.delete_hidden() == []  # takes nothing that may be wanted again
    assert root.steps() == {4: content_of(B)}
    assert root.committer.hide(root.committer.list_steps()[0])
    assert root.steps() == {4: content_of(A)}
    root.check_clean()


def test_what_is_not_ours_is_refused_before_a_byte_is_written(root: Root) -> None:
    root.commit(3)
    root.write("4/weights.pt", b"1")
    root.write("5", b"a file")
    before = root.contents()
    for step in (4, 5):
        with pytest.raises(StepExistsError) as caught:
            root.committer.begin(step, A)
        assert caught.value.outcome == "not_committed"
    assert root.another().recover() == []
    assert root.committer.delete_hidden() == []
    assert root.contents() == before
    assert read_marks(root.storage) == []


def test_what_was_damaged_is_kept_when_the_step_is_saved_again(root: Root, caplog: pytest.LogCaptureFixture) -> None:
    commit_step(root.committer, root.storage, 4, A)
    root.storage.replace("4/commit.json", b"{")
    assert isinstance(root.another().problems()[0].error, CorruptDataError)
    with caplog.at_level(logging.WARNING, "safepoint"):
        commit_step(root.another(), root.storage, 4, B)
    assert "damaged" in caplog.text
    assert root.steps() == {4: content_of(B)}
    assert root.another().recover() == []
    assert root.committer.delete_hidden() == []
    kept = root.contents()
    assert [data for path, data in kept.items() if "damaged" in path and path.endswith(".json") and data == b"{"]
    assert [path for path, data in kept.items() if path.endswith(DATA) and data == content_of(A)]


# Losing


def test_of_two_jobs_that_save_a_step_one_wins_and_the_other_says_so(root: Root) -> None:
    first, second = root.another(), root.another()
    record = root.prepared(4, A, committer=first)
    second.publish(root.prepared(4, B, committer=second))
    with pytest.raises(StepExistsError) as caught:
        first.publish(record)
    assert caught.value.outcome == "not_committed"
    assert (B in str(caught.value)) == (root.kind != "directory")  # whose record it is, or only that a name is taken
    first.abandon(4, A)
    assert root.steps() == {4: content_of(B)}
    root.check_clean()


def test_of_many_jobs_that_save_a_step_at_once_one_wins(root: Root) -> None:
    jobs = [(root.another(), attempt_id(0x100 + number)) for number in range(6)]
    outcomes: dict[str, str | None] = {}
    start = threading.Barrier(len(jobs))

    def save(committer: Committer, attempt: str) -> None:
        start.wait()
        try:
            committer.publish(root.prepared(4, attempt, committer=committer))
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
    root.check_clean()


@pytest.mark.parametrize("replacing", [False, True])
def test_an_abandoned_attempt_is_never_published_whoever_abandoned_it(root: Root, *, replacing: bool) -> None:
    old = commit_step(root.committer, root.storage, 4, A) if replacing else None
    record = root.prepared(4, B)
    assert root.another(process_count=2).abandon(4, B)
    assert not root.another(process_count=2).abandon(4, B)
    with pytest.raises(AttemptLostError) as caught:
        root.committer.publish(record, old)
    assert (caught.value.outcome, caught.value.step) == ("not_committed", 4)
    assert root.steps() == ({4: content_of(A)} if replacing else {})
    root.committer.abandon(4, B)
    root.check_clean()
    commit_step(root.committer, root.storage, 4, C)
    assert root.steps() == {4: content_of(C)}
    root.check_clean()


def test_a_published_attempt_cannot_be_abandoned(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    assert not root.committer.abandon(4, A)
    assert root.steps() == {4: content_of(A)}


# Removing


def test_a_hidden_step_is_gone_at_once_and_its_files_later(root: Root) -> None:
    root.commit(3)
    step = commit_step(root.committer, root.storage, 4, A)
    assert root.committer.hide(step)
    assert not root.committer.hide(step)
    assert list(root.steps()) == [3]
    assert [data for data in root.contents().values() if data == content_of(A)]
    root.check_clean()
    assert not [data for data in root.contents().values() if data == content_of(A)]
    commit_step(root.committer, root.storage, 4, B)
    assert root.steps()[4] == content_of(B)


def test_deleting_takes_nothing_of_an_attempt_that_is_under_way(root: Root) -> None:
    commit_step(root.committer, root.storage, 4, A)
    record = root.prepared(4, B)
    assert root.committer.delete_hidden() == []
    old = root.committer.list_steps()[0]
    root.committer.publish(record, old)
    assert root.steps() == {4: content_of(B)}
    root.check_clean()


# Recovering


def test_the_next_owner_clears_up_what_was_left_and_nobody_publishes_it(root: Root) -> None:
    root.commit(3)
    commit_step(root.committer, root.storage, 5, C)
    records = [root.prepared(4, A), root.prepared(5, B)]
    root.committer.begin(6, C)
    successor = root.another()
    lines = successor.recover()
    left = [successor.prefix_of(step, attempt) for step, attempt in ((4, A), (5, B), (6, C))]
    assert sorted(line.partition("(")[2] for line in lines) == [f"{prefix})" for prefix in left]
    for record in records:
        with pytest.raises(AttemptLostError):
            root.committer.publish(record, root.committer.list_steps()[-1] if record.step == 5 else None)
    assert successor.delete_hidden() == []
    assert list(root.steps()) == [3, 5]
    root.check_clean()


def test_an_attempt_that_is_gone_on_with_is_spared(root: Root) -> None:
    root.prepared(4, A)
    successor = root.another()
    assert successor.recover(spare={A}) == []
    assert successor.delete_hidden() == []
    assert successor.resume(4, A)
    assert not successor.resume(4, B)
    prefix = successor.prefix_of(4, A)
    assert root.storage.size(f"{prefix}/manifest.json") is None
    assert root.storage.size(f"{prefix}/{DATA}") is not None


@pytest.mark.parametrize("origin", ["directory", "markers"])
def test_a_step_of_either_kind_of_directory_is_one_here_and_can_be_replaced_and_deleted(
    root: Root, tmp_path: Path, origin: RootKind
) -> None:
    other = Root(kind=origin, url=str(tmp_path / "other"))
    commit_step(other.committer, other.storage, 7, A)
    root.commit(3)
    root.copy_from(other, "7")
    assert root.steps()[7] == content_of(A)
    commit_step(root.committer, root.storage, 7, B)
    assert root.steps()[7] == content_of(B)
    root.check_clean()
    for copied_again in (True, False):
        assert root.committer.hide(next(known for known in root.committer.list_steps() if known.record.step == 7))
        root.check_clean()
        assert list(root.steps()) == [3]
        if copied_again:
            root.copy_from(other, "7")


def test_a_tombstone_that_was_copied_along_is_no_step_and_in_nobodys_way(root: Root) -> None:
    other = Root(kind="memory", url=f"memory://{root.url}-other")
    other.prepared(4, A)
    root.copy_from(other, "4/commit.json")
    assert root.steps() == {}
    assert root.another().problems() == []
    commit_step(root.committer, root.storage, 4, B)
    assert root.steps() == {4: content_of(B)}
    root.check_clean()
