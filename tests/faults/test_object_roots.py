"""Whole managers on buckets that fail: what is told, what is there then, and that the next save works."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import MemoryObjects, StorageOptions, open_storage
from safepoint.manager import CheckpointManager, KeepLast, session
from safepoint.manager.commit import Committer
from safepoint.manager.errors import CheckpointError, StorageError
from safepoint.manager.unsettled import read_marks

from support.fault_proxy import FaultProxy, s3_error, writes
from support.faulty_storage import FaultyStorage
from support.object_servers import ObjectServer, environment_of
from support.steps import attempt_id, record_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.http_proxy import Exchange


@pytest.fixture
def proxy(object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    open_storage(object_server.url("connect")).make_dir("")  # while the environment still leads there
    with FaultProxy(object_server.address) as proxy:
        for name, value in environment_of(object_server.scheme, proxy.address).items():
            monkeypatch.setenv(name, value)
        yield proxy


def open_manager(root: str, *, deadline_secs: float = 20.0, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, deadline_secs=60.0, storage=StorageOptions(deadline_secs=deadline_secs), **options)


def state(version: int) -> dict[str, Any]:
    return {"w": torch.full((5000,), float(version)), "version": version}


def version_at(manager: CheckpointManager, step: int) -> int:
    found = manager.restore(step).state
    assert found is not None
    assert (found["w"] == found["version"]).all()
    return int(found["version"])


def of_record(step: int) -> Callable[[Exchange], bool]:
    """Return whether a request writes the record, or a tombstone, of a step."""
    return lambda exchange: writes(exchange) and f"{step}/commit.json" in _plain(exchange)


def _plain(exchange: Exchange) -> str:
    return exchange.target.replace("%2F", "/")


def check_clean(root: str, steps: set[int]) -> None:
    storage = open_storage(root)
    assert read_marks(storage) == []
    assert {entry.name for entry in storage.list("")} - {".safepoint"} == set(map(str, steps))


@pytest.mark.parametrize("kind", ["lost reply", "busy", "reset"])
def test_a_save_survives_what_one_request_meets(
    object_server: ObjectServer, proxy: FaultProxy, unused_prefix: str, kind: Any
) -> None:
    root = object_server.url(unused_prefix)
    with open_manager(root, keep=KeepLast(2)) as manager:
        manager.save(1, state(1))
        for step in (2, 3):  # the claim, then the record, then the tombstone of step 1
            proxy.fail(kind, of_record(step))
            manager.save(step, state(step))
            assert [fault.left for fault in proxy._faults] == [0] * (step - 1)  # each was met
        manager.save(3, state(30), on_exists="replace")
        assert [version_at(manager, step) for step in (2, 3)] == [2, 30]
    check_clean(root, {2, 3})


def test_a_commit_that_nobody_answers_ends_at_the_deadline_and_is_known_afterwards(
    object_server: ObjectServer, proxy: FaultProxy, unused_prefix: str
) -> None:
    root = object_server.url(unused_prefix)
    with open_manager(root, deadline_secs=1.0) as manager:
        manager.save(1, state(1))
        session_storage = manager._session.storage
        put = session_storage.put_if_unchanged

        def stalled(path: str, *rest: Any) -> bool:
            if path == "2/commit.json":
                proxy.fail("stall", of_record(2), times=20)
            return put(path, *rest)

        session_storage.put_if_unchanged = stalled  # type: ignore[method-assign]
        with pytest.raises(CheckpointError) as caught:
            manager.save(2, state(2))
        assert caught.value.outcome in ("not_committed", "unknown")
        proxy.heal()
        session_storage.put_if_unchanged = put  # type: ignore[method-assign]
        # What went unanswered may be sent again now that the server is well, and win: it is this run's own step then.
        assert [info.step for info in manager.steps()] == [1] or caught.value.outcome == "unknown"
        again = manager.save(2, state(20))
        assert version_at(manager, 2) == (20 if again.saved else 2)
    with open_manager(root) as manager:  # has time to delete what the save before it, with its short deadline, left
        manager.save(3, state(3))
    check_clean(root, {1, 2, 3})


def test_credentials_that_expire_in_the_middle_leave_the_step_before_and_nothing_half_visible(
    object_server: ObjectServer, proxy: FaultProxy, unused_prefix: str
) -> None:
    root = object_server.url(unused_prefix)
    with open_manager(root) as manager:
        manager.save(1, state(1))
        proxy.fail("expired", lambda exchange: writes(exchange) and "w.safetensors" in _plain(exchange), times=100)
        with pytest.raises(StorageError) as caught:
            manager.save(2, state(2))
        proxy.heal()
        assert caught.value.errno == errno.EACCES
        assert caught.value.hint
        assert caught.value.outcome == "not_committed"
        assert [info.step for info in manager.steps()] == [1]
        manager.save(2, state(2))
    check_clean(root, {1, 2})


def test_a_bucket_that_is_not_there_is_named_when_the_manager_opens(object_server: ObjectServer) -> None:
    with pytest.raises(StorageError) as caught:
        open_manager(f"{object_server.scheme}://no-such-bucket-here/run")
    assert caught.value.errno == errno.ENOENT
    assert "no-such-bucket-here" in str(caught.value)
    assert caught.value.hint


def test_credentials_that_are_refused_say_what_to_check(
    s3: ObjectServer, unused_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FaultProxy(s3.address) as refusing:
        for name, value in environment_of(s3.scheme, refusing.address).items():
            monkeypatch.setenv(name, value)
        refusing.fail(s3_error(403, "InvalidAccessKeyId"), times=100)
        with pytest.raises(StorageError) as caught:
            open_manager(s3.url(unused_prefix))
    assert caught.value.errno == errno.EACCES
    assert caught.value.hint


def test_a_root_of_many_steps_is_listed_and_a_save_reads_each_record_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    objects = MemoryObjects("memory://many")
    for step in range(1200):
        record = record_for(step, attempt_id(step), step + 1, 1, "0" * 32)
        objects.put(f"{step}/commit.json", record.to_bytes())
    steps = Committer(objects).list_steps()
    assert [known.record.step for known in steps] == list(range(1200))
    storage = FaultyStorage(objects)
    monkeypatch.setattr(session, "open_storage", lambda *_: storage)
    with CheckpointManager("memory://many") as manager:
        manager.save(5000, {"n": 1})
        storage.log.clear()
        manager.save(6000, {"n": 1})
    assert storage.counts["get"] <= 2 * 1202
