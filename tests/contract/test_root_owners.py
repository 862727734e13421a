"""One writer to a root of any kind: promises of safepoint.manager.owner. Other hosts are owner files left by hand."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest

from safepoint.manager.errors import AttemptLostError, CheckpointError, RootInUseError
from safepoint.manager.owner import Acquired, Owner, Refused, Wait
from safepoint.manager.process_identity import ProcessIdentity

from support.owners import DEADLINE_SECS, OWNER, Clock, OwnedRoot
from support.roots import SHARED_KINDS

if TYPE_CHECKING:
    from support.process_pool import ProcessPool
    from support.roots import Root


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def owned(root: Root) -> OwnedRoot:
    return OwnedRoot(root)


def test_the_first_to_come_owns_the_root_and_is_told_so_again(owned: OwnedRoot) -> None:
    owner = owned.open()
    assert owner.acquire() == Acquired(is_new=True)
    assert owner.acquire() == Acquired(is_new=False)
    owner.verify()
    holder = owned.holder()
    assert holder is not None
    assert holder.process == ProcessIdentity.current()
    owner.release()
    owner.release()
    assert owned.holder() is None
    assert owner.acquire() == Acquired(is_new=True)
    owner.release()


def test_a_second_manager_of_the_same_process_is_refused_until_the_first_is_closed(owned: OwnedRoot) -> None:
    first, second = owned.open(), owned.open()
    first.acquire()
    answer = second.acquire()
    assert isinstance(answer, Refused)
    assert answer.holder.process == ProcessIdentity.current()
    error = answer.to_error(owned.root.url, step=7)
    assert isinstance(error, RootInUseError)
    assert (error.step, error.outcome, error.path) == (7, "not_committed", owned.root.url)
    assert f"process {os.getpid()} on host" in str(error)
    with pytest.raises(AttemptLostError):
        second.verify()
    second.release()
    first.verify()
    first.release()
    assert second.acquire() == Acquired(is_new=True)
    second.release()


def test_a_manager_that_nobody_holds_any_more_lets_go(owned: OwnedRoot) -> None:
    owner = owned.open()
    owner.acquire()
    del owner
    gc.collect()
    assert owned.holder() is None


theirs: list[Owner] = []  # of a process of the pool


def acquire_case(_rank: int, root: Root) -> tuple[str, int]:
    theirs[:] = [OwnedRoot(root).open()]
    return type(theirs[0].acquire()).__name__, os.getpid()


def verify_case(_rank: int) -> str:
    try:
        theirs.pop().verify()
    except CheckpointError as error:
        return type(error).__name__
    return "verified"


@pytest.fixture
def others_pid(root: Root, process_pool: ProcessPool) -> int:
    """The id of another process, which owns the root."""
    ((answer, pid),) = process_pool.run(acquire_case, root, num_processes=1)
    assert answer == "Acquired"
    return int(pid)


seen_by_others = pytest.mark.parametrize("root", SHARED_KINDS, indirect=True)


@seen_by_others
def test_a_living_process_is_refused_and_a_killed_one_replaced_at_once(
    owned: OwnedRoot, others_pid: int, process_pool: ProcessPool
) -> None:
    owner = owned.open()
    answer = owner.acquire()
    assert isinstance(answer, Refused)
    assert answer.holder.process is not None
    assert answer.holder.process.pid == others_pid
    process_pool.kill(0)
    assert isinstance(owner.acquire(), Acquired)
    owner.verify()
    owner.release()


@seen_by_others
@pytest.mark.usefixtures("others_pid")
def test_a_stopped_process_is_replaced_after_twice_the_deadline_and_cannot_publish_when_it_wakes(
    owned: OwnedRoot, clock: Clock, process_pool: ProcessPool
) -> None:
    process_pool.pause(0)
    owner = owned.open(clock)
    give_up = time.monotonic() + 10
    while isinstance(answer := owner.acquire(), Refused) and time.monotonic() < give_up:
        time.sleep(0.01)  # the signal is on its way
    assert isinstance(answer, Wait)
    clock.now += 2 * DEADLINE_SECS - 1
    assert isinstance(owner.acquire(), Wait)
    clock.now += 1
    assert owner.acquire() == Acquired(is_new=True)
    process_pool.resume(0)
    assert process_pool.run(verify_case, num_processes=1) == ["AttemptLostError"]
    owner.verify()  # and its end took nothing away
    owner.release()


@pytest.mark.parametrize("elsewhere", [{"host": "other"}, {"boot_id": "other"}, {"pid_space": "other"}])
def test_an_owner_that_cannot_be_seen_from_here_is_watched_for_twice_the_deadline(
    owned: OwnedRoot, clock: Clock, elsewhere: dict[str, str]
) -> None:
    owned.leave_file(pid=1 << 22, **elsewhere)  # no such process, but who knows over there
    owner = owned.open(clock)
    answer = owner.acquire()
    assert isinstance(answer, Wait)
    assert (answer.secs, answer.remaining_secs) == (20.0, 200.0)
    clock.now += 190
    answer = owner.acquire()
    assert isinstance(answer, Wait)
    assert answer.secs == answer.remaining_secs == 10.0
    clock.now += 10
    assert owner.acquire() == Acquired(is_new=True)
    owner.release()


def test_a_heartbeat_from_elsewhere_is_enough_to_be_refused(owned: OwnedRoot, clock: Clock) -> None:
    owned.leave_file(host="other")
    owner = owned.open(clock)
    assert isinstance(owner.acquire(), Wait)
    clock.now += 20
    owned.beat(host="other")
    answer = owner.acquire()
    assert isinstance(answer, Refused)
    assert "on host other, since 2026" in str(answer.holder)
    # it dies after that: the watch begins anew
    clock.now += 2 * DEADLINE_SECS - 1
    assert isinstance(owner.acquire(), Wait)
    clock.now += 1
    assert isinstance(owner.acquire(), Acquired)
    owner.release()


@pytest.mark.parametrize("gone", [{"pid": 1 << 22}, {"start_ticks": 1}], ids=["no such process", "another process"])
def test_an_owner_that_is_gone_from_this_host_is_replaced_at_once(owned: OwnedRoot, gone: dict[str, int]) -> None:
    owned.leave_file(**gone)
    owner = owned.open()
    assert owner.acquire() == Acquired(is_new=True)
    owner.release()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"process": {"pid": "1"}}', b"\xff\xfe", b"null", b"9" * 9999]
)
def test_an_owner_file_that_cannot_be_read_is_waited_for_like_any_other(
    owned: OwnedRoot, clock: Clock, content: bytes
) -> None:
    owned.root.write(OWNER, content)
    owner = owned.open(clock)
    answer = owner.acquire()
    assert isinstance(answer, Wait)
    assert "unknown process" in str(answer.holder)
    clock.now += 2 * DEADLINE_SECS
    assert isinstance(owner.acquire(), Acquired)
    owner.release()


def test_the_heart_beats_while_the_root_is_owned(owned: OwnedRoot) -> None:
    owner = owned.open(deadline_secs=0.2)
    owner.acquire()
    seen = {owned.pulse()}
    give_up = time.monotonic() + 20
    while len(seen) < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
        seen.add(owned.pulse())
    owner.verify()
    owner.release()
    assert len(seen) >= 3
    assert not [thread for thread in threading.enumerate() if thread.name == "safepoint-owner"]


def test_an_owner_that_was_replaced_knows_it_and_leaves_its_successor_alone(owned: OwnedRoot) -> None:
    owner = owned.open(deadline_secs=0.2)
    owner.acquire()
    owned.leave_file()
    found = owned.pulse()
    with pytest.raises(AttemptLostError) as caught:
        owner.verify()
    assert caught.value.outcome == "not_committed"
    time.sleep(0.1)
    assert owned.pulse() == found
    assert isinstance(owner.acquire(), Refused)
    owner.release()
    holder = owned.holder()
    assert holder is not None
    assert holder.nonce == "theirs"


def test_an_owner_whose_file_went_away_has_lost_the_root(owned: OwnedRoot) -> None:
    owner = owned.open()
    owner.acquire()
    owned.root.storage.delete(OWNER)
    with pytest.raises(AttemptLostError, match="nobody"):
        owner.verify()
    owner.release()
    assert owned.holder() is None


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_come_at_once_one_gets_the_root(owned: OwnedRoot, *, stale: bool) -> None:
    for _ in range(3):
        if stale:
            owned.leave_file(start_ticks=1)
        owners = [owned.open() for _ in range(4)]
        start = threading.Barrier(len(owners))
        answers: list[object] = []

        def come(owner: Owner, start: threading.Barrier = start, answers: list[object] = answers) -> None:
            start.wait()
            answers.append(owner.acquire())

        threads = [threading.Thread(target=come, args=(owner,)) for owner in owners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sum(isinstance(answer, Acquired) for answer in answers) == 1
        if owned.root.kind == "directory":  # its lock lets one after the other look; elsewhere a loser may have to wait
            assert all(isinstance(answer, Acquired | Refused) for answer in answers)
        for owner in owners:
            owner.release()
        assert owned.root.files() <= {".safepoint/lock", ".safepoint/conditions"}
