"""Who may write to a bucket: the promises of safepoint.manager.owner, kept by compare and set."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import MemoryObjects
from safepoint.manager.errors import AttemptLostError, StorageError
from safepoint.manager.holder import Holder
from safepoint.manager.owner import Acquired, Owner, Refused, Wait, current_holder
from safepoint.manager.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_SECS = 100.0
OWNER = ".safepoint/owner"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def open_owner(objects: MemoryObjects, clock: Callable[[], float] = time.monotonic, secs: float = 100.0) -> Owner:
    return Owner(objects, deadline_secs=secs, clock=clock)


def write_owner(objects: MemoryObjects, *, beats: int = 0, **changes: object) -> None:
    process = replace(ProcessIdentity.current(), **changes)  # type: ignore[arg-type]
    holder = Holder(process=process, since="2026-01-01T00:00:00Z", beat_secs=10.0, nonce="theirs", beats=beats)
    objects.replace(OWNER, holder.to_bytes())


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects()


def test_the_first_owns_the_root_the_second_is_refused_until_it_lets_go(objects: MemoryObjects) -> None:
    first, second = open_owner(objects), open_owner(objects)
    assert first.acquire() == Acquired(is_new=True)
    assert first.acquire() == Acquired(is_new=False)
    answer = second.acquire()
    assert isinstance(answer, Refused)
    assert answer.holder.process == ProcessIdentity.current()
    with pytest.raises(AttemptLostError):
        second.verify()
    first.verify()
    holder = current_holder(objects)
    assert holder is not None
    assert holder.process == ProcessIdentity.current()
    first.release()
    assert current_holder(objects) is None
    assert second.acquire() == Acquired(is_new=True)
    second.release()


def test_an_owner_that_is_gone_is_replaced_at_once(objects: MemoryObjects) -> None:
    write_owner(objects, pid=1 << 22)
    owner = open_owner(objects)
    assert owner.acquire() == Acquired(is_new=True)
    owner.release()


def test_an_owner_elsewhere_is_watched_for_twice_the_deadline_and_each_beat_begins_it_anew(
    objects: MemoryObjects,
) -> None:
    clock = Clock()
    write_owner(objects, host="other")
    owner = open_owner(objects, clock)
    answer = owner.acquire()
    assert isinstance(answer, Wait)
    assert answer.remaining_secs == 2 * DEADLINE_SECS
    clock.now += 190
    write_owner(objects, host="other", beats=1)
    assert isinstance(owner.acquire(), Refused)
    clock.now += 2 * DEADLINE_SECS - 1
    assert isinstance(owner.acquire(), Wait)
    clock.now += 1
    assert isinstance(owner.acquire(), Acquired)
    owner.release()


def test_the_heart_beats_and_an_owner_that_was_replaced_leaves_its_successor_alone(objects: MemoryObjects) -> None:
    owner = open_owner(objects, secs=0.5)
    owner.acquire()
    until = time.monotonic() + 20
    while (holder := current_holder(objects)) is None or holder.beats < 3:
        assert time.monotonic() < until
        time.sleep(0.01)
    owner.verify()
    write_owner(objects, host="other")
    with pytest.raises(AttemptLostError):
        owner.verify()
    time.sleep(0.2)
    owner.release()
    holder = current_holder(objects)
    assert holder is not None
    assert holder.nonce == "theirs"


@pytest.mark.parametrize("stale", [True, False])
def test_of_many_that_come_at_once_one_gets_the_root(objects: MemoryObjects, *, stale: bool) -> None:
    if stale:
        write_owner(objects, pid=1 << 22)
    owners = [open_owner(objects) for _ in range(8)]
    answers: list[object] = []
    start = threading.Barrier(len(owners))

    def come(owner: Owner) -> None:
        start.wait()
        answers.append(owner.acquire())

    threads = [threading.Thread(target=come, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sum(isinstance(answer, Acquired) for answer in answers) == 1
    for owner in owners:
        owner.release()
    assert current_holder(objects) is None


def test_a_store_that_keeps_no_conditions_is_refused(objects: MemoryObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    def put_always(path: str, data: bytes) -> bool:
        objects.replace(path, data)
        return True

    monkeypatch.setattr(objects, "put_if_absent", put_always)
    with pytest.raises(StorageError, match="conditions") as caught:
        open_owner(objects).acquire()
    assert caught.value.errno == errno.EOPNOTSUPP
