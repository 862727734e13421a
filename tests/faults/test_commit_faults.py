"""Whatever fails, and wherever a process dies, the committed steps stay whole and half of one is never listed.

Each operation of the commit protocol is run again and again, with a fault at its first storage call, its second, …
Faults: the call fails; it takes effect and its answer is lost; this and all later calls fail; the process is killed.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import LocalStorage, MemoryObjects, MemoryStorage, Storage
from safepoint.manager.commit import Committer
from safepoint.manager.errors import AttemptLostError, CheckpointError, Outcome, StorageError
from safepoint.manager.unsettled import read_marks

from support.faulty_storage import Fail, FaultyStorage, Kill, Stall
from support.steps import DATA, attempt_id, content_of, prepare_step, record_for, save_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

A, B, NEW, OLD, LATER = (attempt_id(n) for n in (0xA, 0xB, 0xC, 0xD, 0xE))

FAULTS = {
    "fails": (Fail(number=errno.EIO), 1),
    "is full": (Fail(number=errno.ENOSPC), 1),
    "answer is lost": (Fail(number=errno.EIO, done=True), 1),
    "storage is gone from there on": (Fail(number=errno.ESTALE), None),
}


def begin_with(storage: Storage) -> None:
    """Commit steps 10 and 20."""
    committer = Committer(storage)
    save_step(committer, storage, 10, A)
    save_step(committer, storage, 20, B)


def interrupt_earlier_owners(storage: Storage) -> None:
    """Leave what crashes at several places leave."""
    begin_with(storage)
    committer = Committer(storage)
    prepare_step(committer, storage, 30, NEW)
    manifest = prepare_step(committer, storage, 40, LATER)
    committer.write_manifest(40, LATER, manifest)
    if not storage.renames:
        prepare_step(committer, storage, 20, OLD)  # to replace it
        save_step(committer, storage, 10, OLD)  # replaced, the files of the old one still there
        save_step(committer, storage, 50, NEW)
        committer.hide(committer.list_steps()[-1])
        return
    storage.rename_dir("20", f"20.old-{OLD}")  # being replaced, the new one not in
    save_step(committer, storage, 10, OLD)  # replaced, the old one not hidden
    (hidden,) = [entry.name for entry in storage.list("") if entry.name.startswith(".trash")]
    storage.rename_dir(hidden, f"10.old-{OLD}")


def save_30(storage: Storage) -> None:
    save_step(Committer(storage), storage, 30, NEW)


def save_20_again(storage: Storage) -> None:
    save_step(Committer(storage), storage, 20, NEW)


def abandon(storage: Storage) -> None:
    committer = Committer(storage)
    prepare_step(committer, storage, 30, NEW)
    committer.abandon(30, NEW)


def delete_10(storage: Storage) -> None:
    committer = Committer(storage)
    for step in committer.list_steps():
        if step.record.step == 10:
            committer.hide(step)
    committer.delete_hidden()


def recover(storage: Storage) -> None:
    Committer(storage).recover()
    Committer(storage).delete_hidden()


@dataclass(frozen=True)
class Case:
    """An operation, and what may be listed before, during and after it."""

    prepare: Callable[[Storage], None]
    operate: Callable[[Storage], None]
    before: dict[int, str]
    after: dict[int, str]


CASES = {
    "save": Case(begin_with, save_30, {10: A, 20: B}, {10: A, 20: B, 30: NEW}),
    "replace": Case(begin_with, save_20_again, {10: A, 20: B}, {10: A, 20: NEW}),
    "abandon": Case(begin_with, abandon, {10: A, 20: B}, {10: A, 20: B}),
    "delete": Case(begin_with, delete_10, {10: A, 20: B}, {20: B}),
    "recover": Case(interrupt_earlier_owners, recover, {10: OLD, 20: B}, {10: OLD, 20: B}),
}


def look(storage: Storage) -> dict[int, str]:
    """Return the committed steps and their attempts, as somebody finds them who opens the root, all checked."""
    committer = Committer(storage)
    found = {}
    for step in committer.list_steps():
        committer.check_files(step, committer.load_manifest(step))
        attempt = step.record.attempt
        assert storage.get(f"{step.files_prefix}/{DATA}", max_bytes=1 << 20) == content_of(attempt)
        found[step.record.step] = attempt
    assert committer.problems() == []
    return found


def check_aftermath(storage: Storage, case: Case) -> dict[int, str]:
    """Check what was left behind, then that the next owner cleans up and goes on; return what was listed."""
    listed = look(storage)
    assert listed in (case.before, case.after)
    recover(storage)
    assert look(storage) == listed
    check_nothing_else(storage, listed)
    save_step(Committer(storage), storage, 50, LATER)
    assert Committer(storage).list_steps()[-1].record.attempt == LATER
    return listed


def check_nothing_else(storage: Storage, listed: dict[int, str]) -> None:
    """Check that the root holds these steps, and nothing of any other attempt."""
    assert {entry.name for entry in storage.list("")} - {".safepoint"} == set(map(str, listed))
    assert read_marks(storage) == []
    for step, attempt in listed.items():
        assert {entry.name for entry in storage.list(str(step)) if entry.is_dir} in ({"model"}, {attempt})


def attempt_operation(case: Case, storage: Storage) -> CheckpointError | None:
    try:
        case.operate(storage)
    except CheckpointError as error:
        return error
    return None


class Mount(LocalStorage):
    """A file system whose rename is none in one step."""

    renames = False


@pytest.fixture(params=["memory", "local", "objects"])
def make_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Storage]:
    roots = iter(range(10_000))
    if request.param in ("memory", "objects"):
        return MemoryStorage if request.param == "memory" else MemoryObjects
    return lambda: LocalStorage(tmp_path / f"root{next(roots)}")


def count_calls(case: Case, storage: Storage) -> int:
    case.prepare(storage)
    counter = FaultyStorage(storage)
    case.operate(counter)
    assert look(storage) == case.after
    return counter.num_calls


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CASES)
def test_a_failure_at_any_call_leaves_whole_steps_and_says_what_became_of_the_save(
    name: str, fault: str, make_storage: Callable[[], Storage]
) -> None:
    case = CASES[name]
    what, times = FAULTS[fault]
    for k in range(1, count_calls(case, make_storage()) + 1):
        storage = make_storage()
        case.prepare(storage)
        faulty = FaultyStorage(storage, at=k, times=times, fault=what)
        error = attempt_operation(case, faulty)
        assert faulty.fired
        committed = look(storage) == case.after
        if name in ("save", "replace") and error is not None and error.outcome is not None:
            expected: dict[Outcome, bool] = {"committed": True, "not_committed": False}
            assert expected.get(error.outcome, committed) == committed, (k, faulty.log[-1], error)
        if error is None:
            assert committed or name == "delete"
        check_aftermath(storage, case)


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, LocalStorage) for name in CASES), ("save", Mount), ("replace", Mount), ("delete", Mount)],
)
def test_a_process_killed_at_any_call_leaves_whole_steps(name: str, kind: type[LocalStorage], tmp_path: Path) -> None:
    case = CASES[name]
    seen = set()
    for k in range(1, count_calls(case, kind(tmp_path / "counted")) + 1):
        storage = kind(tmp_path / f"{name}{k}")
        case.prepare(storage)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child only makes system calls, then dies
            child = os.fork()
        if child == 0:
            try:
                case.operate(FaultyStorage(storage, at=k, fault=Kill()))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
        seen.add(tuple(sorted(check_aftermath(storage, case).items())))
    assert len(seen) == (1 if case.before == case.after else 2)


def publish_30(storage: Storage, fault: Fail, only: str, at: int) -> CheckpointError | None:
    committer = Committer(storage)
    manifest = prepare_step(committer, storage, 30, NEW)
    written = committer.write_manifest(30, NEW, manifest)
    faulty = FaultyStorage(storage, at=at, fault=fault, only={only})
    try:
        Committer(faulty).publish(record_for(30, NEW, 3, *written))
    except CheckpointError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("only", "at", "fault", "outcome"),
    [
        ("put", 1, Fail(), "not_committed"),
        ("sync_dir", 1, Fail(), "not_committed"),
        ("rename_dir", 1, Fail(), "not_committed"),
        ("rename_dir", 1, Fail(done=True), None),  # the answer was lost, but a look tells
        ("sync_dir", 2, Fail(), "committed"),
    ],
)
def test_the_outcome_is_known_at_each_failure(only: str, at: int, fault: Fail, outcome: str | None) -> None:
    storage = MemoryStorage()
    begin_with(storage)
    error = publish_30(storage, fault, only, at)
    assert (None if error is None else error.outcome) == outcome
    assert error is None or (error.step == 30 and isinstance(error, StorageError))
    assert (30 in look(storage)) == (outcome != "not_committed")


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("fault", [Fail(), Fail(done=True)])
def test_on_an_object_store_a_put_whose_answer_is_lost_is_settled_at_once(fault: Fail, *, replacing: bool) -> None:
    storage = MemoryObjects()
    begin_with(storage)
    step = 20 if replacing else 30
    faulty = FaultyStorage(storage, at=1, fault=fault, only={"put_if_unchanged"})
    committer = Committer(faulty)
    try:
        save_step(committer, faulty, step, NEW)
    except StorageError as error:
        assert error.outcome == "not_committed"  # noqa: PT017
        assert not fault.done
        assert not committer.abandon(step, NEW)
    assert faulty.fired
    assert look(storage).get(step) == (NEW if fault.done else B if replacing else None)


def test_on_an_object_store_that_is_gone_after_the_put_the_outcome_is_unknown() -> None:
    storage = MemoryObjects()
    faulty = FaultyStorage(
        storage, at=1, times=None, fault=Fail(done=True), only={"put_if_unchanged", "read_versioned"}
    )
    faulty._at = None
    committer = Committer(faulty)
    record = record_for(30, NEW, 1, *committer.write_manifest(30, NEW, prepare_step(committer, faulty, 30, NEW)))
    faulty._at = faulty.num_calls + 2  # after the look at the slot
    with pytest.raises(StorageError) as caught:
        committer.publish(record)
    assert caught.value.outcome == "unknown"
    assert look(storage) == {30: NEW}


@pytest.mark.parametrize("done", [True, False])
def test_the_outcome_is_unknown_when_the_rename_fails_and_nobody_can_look(*, done: bool) -> None:
    storage = MemoryStorage()
    begin_with(storage)
    committer = Committer(storage)
    manifest = prepare_step(committer, storage, 30, NEW)
    written = committer.write_manifest(30, NEW, manifest)
    renaming = FaultyStorage(storage, at=1, fault=Fail(done=done), only={"rename_dir"})
    looks = FaultyStorage(renaming, only={"get"}, times=None, fault=Fail())
    publisher = Committer(looks)
    publisher.list_steps()  # fills the cache, so that only the look after the rename reads
    looks._at = looks.num_calls + 1
    with pytest.raises(StorageError) as caught:
        publisher.publish(record_for(30, NEW, 3, *written))
    assert caught.value.outcome == "unknown"
    assert (30 in look(storage)) == done


@pytest.mark.parametrize("kind", ["local", "objects"])
def test_of_abandoning_and_publishing_at_once_exactly_one_happens(kind: str, tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path) if kind == "local" else MemoryObjects()
    published = 0
    for number in range(100):
        committer = Committer(storage)
        attempt = attempt_id(0x100 + number)
        manifest = prepare_step(committer, storage, number, attempt)
        written = committer.write_manifest(number, attempt, manifest)
        abandoned: list[bool] = []
        start = threading.Barrier(2)

        def give_up(step: int = number, attempt: str = attempt) -> None:
            start.wait()  # noqa: B023 joined below
            abandoned.append(Committer(storage).abandon(step, attempt))  # noqa: B023

        thread = threading.Thread(target=give_up)
        thread.start()
        start.wait()
        try:
            committer.publish(record_for(number, attempt, number + 1, *written))
            won = True
        except AttemptLostError as error:
            assert error.outcome == "not_committed"  # noqa: PT017
            won = False
        thread.join()
        assert abandoned == [not won]
        published += won
    assert len(look(storage)) == published
    check_nothing_else(storage, look(storage))


@pytest.mark.parametrize("kind", [MemoryStorage, MemoryObjects])
@pytest.mark.parametrize("name", ["save", "replace"])
def test_a_primary_that_stalls_at_any_call_and_is_taken_over_harms_nobody(
    name: str, kind: type[MemoryStorage | MemoryObjects]
) -> None:
    case = CASES[name]
    step = 30 if name == "save" else 20
    for k in range(1, count_calls(case, kind()) + 1):
        storage = kind()
        case.prepare(storage)
        stall = Stall()
        faulty = FaultyStorage(storage, at=k, fault=stall)
        errors: list[CheckpointError | None] = []
        stalled = threading.Thread(target=lambda f=faulty: errors.append(attempt_operation(case, f)))  # type: ignore[misc]  # noqa: B023
        stalled.start()
        assert stall.reached.wait(10)
        recover(storage)
        overtaken = look(storage)
        save_step(Committer(storage), storage, step, LATER)
        stall.resume.set()
        stalled.join(10)
        (error,) = errors
        if overtaken != case.after:
            # What it had not published when it was taken over, it can only save anew from the start.
            assert error is None or error.outcome in ("not_committed", None)
        final = look(storage)
        began_after = error is None and overtaken != case.after
        assert final[step] == (NEW if began_after else LATER), (k, faulty.log[k - 1])
        assert {number: attempt for number, attempt in final.items() if number != step} == {
            number: attempt for number, attempt in case.before.items() if number != step
        }
        recover(storage)
        assert look(storage) == final
        assert sorted(entry.name for entry in storage.list("")) == sorted(map(str, final))
