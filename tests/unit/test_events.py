"""What observers are told, in which order, on which thread; and that nothing they do can harm a save."""

from __future__ import annotations

import gc
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.errors import AsyncSaveError, InvalidArgumentError, StepNotFoundError, UnsupportedValueError
from safepoint.manager.event_stream import EventStream
from safepoint.manager.events import (
    Event,
    Preempted,
    RestoreBegun,
    RestoreDone,
    RestoreFailed,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveWritten,
    StepPassedOver,
    StepsRemoved,
    WorkProgress,
    sized,
)

if TYPE_CHECKING:
    from pathlib import Path

STATE = {"w": torch.arange(1000.0), "note": "x"}


def kinds(seen: list[Event]) -> list[type[Event]]:
    return [type(event) for event in seen]


def test_a_blocking_save_is_told_from_its_beginning_to_its_commit(tmp_path: Path) -> None:
    seen: list[Event] = []
    with CheckpointManager(tmp_path, observers=[seen.append]) as manager:
        result = manager.save(3, STATE, metrics={"loss": 0.5})

    assert kinds(seen) == [SaveBegun, SaveWritten, SaveCommitted]
    begun, written, committed = seen
    assert isinstance(begun, SaveBegun)
    assert isinstance(written, SaveWritten)
    assert isinstance(committed, SaveCommitted)
    assert (begun.step, begun.mode, begun.blocking) == (3, "consolidated", True)
    assert begun.mode_reason == result.mode_reason
    assert written.num_bytes == committed.num_bytes == result.num_bytes == 4000
    assert committed.metrics == (("loss", 0.5),)
    assert committed.attempt == begun.attempt
    assert committed.secs == committed.blocked_secs >= committed.begin_secs + committed.write_secs
    assert (committed.process_index, committed.process_count) == (0, 1)
    assert abs(committed.time - time.time()) < 3600


def test_an_async_save_is_told_when_it_is_staged_and_how_long_the_caller_was_held_up(tmp_path: Path) -> None:
    seen: list[Event] = []
    with CheckpointManager(tmp_path, observers=[seen.append]) as manager:
        manager.save(3, STATE, blocking=False)

    assert kinds(seen) == [SaveBegun, SaveStaged, SaveWritten, SaveCommitted]
    committed = seen[-1]
    assert isinstance(committed, SaveCommitted)
    assert not committed.blocking
    assert committed.blocked_secs < committed.secs


def test_what_is_skipped_removed_and_not_due(tmp_path: Path) -> None:
    seen: list[Event] = []
    with CheckpointManager(tmp_path, keep=KeepLast(1), save_every=2, observers=[seen.append]) as manager:
        for step in range(3):
            manager.save(step, STATE)
        manager.save(2, STATE)

    assert next(event for event in seen if isinstance(event, StepsRemoved)).steps == (0,)
    (skipped,) = [event for event in seen if isinstance(event, SaveSkipped)]
    assert (skipped.step, skipped.reason) == (2, "the step is committed already")
    assert all(getattr(event, "step", None) != 1 for event in seen)


def test_failures_are_told_and_raised_all_the_same(tmp_path: Path) -> None:
    seen: list[Event] = []
    with CheckpointManager(tmp_path, observers=[seen.append]) as manager:
        with pytest.raises(UnsupportedValueError):
            manager.save(1, {"w": lambda: None})
        with pytest.raises(StepNotFoundError):
            manager.restore(7)

    assert kinds(seen) == [SaveFailed, RestoreFailed]
    failed, restore = seen
    assert isinstance(failed, SaveFailed)
    assert (failed.step, failed.error, failed.outcome) == (1, "UnsupportedValueError", "not_committed")
    assert isinstance(restore, RestoreFailed)
    assert (restore.step, restore.error) == (7, "StepNotFoundError")


def test_a_failure_behind_the_loop_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Event] = []
    manager = CheckpointManager(tmp_path, observers=[seen.append])
    monkeypatch.setattr(type(manager._session.storage), "open_writer", fails)
    manager.save(1, STATE, blocking=False)
    with pytest.raises(AsyncSaveError):
        manager.close()

    (failed,) = [event for event in seen if isinstance(event, SaveFailed)]
    assert (failed.step, failed.error, failed.message) == (1, "OSError", "the disk is on fire")


def fails(*_: Any, **__: Any) -> None:
    raise OSError("the disk is on fire")


def test_a_restore_is_told_with_what_was_passed_over(tmp_path: Path) -> None:
    seen: list[Event] = []
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
        manager.save(2, STATE)
    data = next((tmp_path / "2").rglob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-4] + b"\0\0\0\1")

    with CheckpointManager(tmp_path, observers=[seen.append]) as manager:
        manager.restore_latest({"w": torch.zeros(1000), "note": ""})

    assert kinds(seen) == [RestoreBegun, StepPassedOver, RestoreBegun, RestoreDone]
    done = seen[-1]
    assert isinstance(done, RestoreDone)
    assert (done.step, done.passed_over) == (1, 1)
    assert done.num_bytes >= 4000
    assert isinstance(seen[1], StepPassedOver)
    assert "digest" in seen[1].problem


def test_an_agreed_stop_is_told_once(tmp_path: Path) -> None:
    seen: list[Event] = []
    with (
        CheckpointManager(tmp_path, observers=[seen.append]) as manager,
        manager.preemption(signals=()) as preemption,
    ):
        preemption.request("the end of the day")
        step = next(step for step in range(10_000) if preemption.should_stop(step) or time.sleep(0.001))
        assert preemption.should_stop(step + 1)

    (stop,) = [event for event in seen if isinstance(event, Preempted)]
    assert stop.step == step
    assert "the end of the day" in stop.reason


def test_every_event_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "safepoint"), CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        manager.save(1, STATE, blocking=False)
        manager.save(2, STATE)
        manager.restore_latest()

    told = {record.getMessage(): record.levelname for record in caplog.records}
    assert all("\n" not in line for line in told)
    news = [line for line, level in told.items() if level == "INFO"]
    assert len(news) == 4, news  # two commits, one removal, one restore
    assert any(line.startswith("step 2 is committed: 4 kB in ") for line in news)


def test_observers_run_one_at_a_time_on_a_thread_of_their_own(tmp_path: Path) -> None:
    threads: set[str] = set()
    busy = threading.Lock()

    def observe(event: Event) -> None:
        assert busy.acquire(blocking=False), event
        threads.add(threading.current_thread().name)
        time.sleep(0.001)
        busy.release()

    with CheckpointManager(tmp_path, observers=[observe, observe]) as manager:
        for step in range(3):
            manager.save(step, STATE, blocking=False)

    assert threads == {"safepoint-events"}
    assert "safepoint-events" not in {thread.name for thread in threading.enumerate()}


def test_an_observer_that_raises_harms_nothing_and_hears_of_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Event] = []

    def bad(event: Event) -> None:
        calls.append(event)
        raise SystemExit(1) if len(calls) == 1 else ValueError("no such dashboard")

    with CheckpointManager(tmp_path, observers=[bad]) as manager:
        manager.save(1, STATE)
        assert manager.verify() == []

    assert len(calls) == 3
    assert caplog.text.count("an observer of checkpoint events failed") == 3


def test_an_observer_that_hangs_holds_up_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    release = threading.Event()
    manager = CheckpointManager(tmp_path, observers=[lambda _: release.wait(60)], deadline_secs=0.3)
    for step in range(3):
        manager.save(step, STATE)
    assert manager.latest_step() == 2
    manager.close()
    release.set()

    assert "still busy after 0.3 s" in caplog.text


def test_an_observer_may_close_the_manager_but_not_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def observe(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            try:
                manager.close()
            finally:
                done.set()

    manager = CheckpointManager(tmp_path, observers=[observe])
    manager.save(1, STATE)
    assert done.wait(20)
    with pytest.raises(InvalidArgumentError, match="closed"):
        manager.save(2, STATE)
    assert "failed" not in caplog.text


def test_a_flood_that_nobody_takes_is_bounded_and_the_log_says_what_was_lost(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    seen: list[Event] = []

    def observe(event: Event) -> None:
        gate.wait(20)
        seen.append(event)

    stream = EventStream([observe])
    for step in range(10_050):
        stream.tell(SaveSkipped(step=step, reason=""))
    gate.set()
    stream.close(timeout_secs=20)
    stream.tell(SaveSkipped(step=0, reason="too late"))

    assert 10_000 <= len(seen) <= 10_001
    assert "checkpoint events were not told" in caplog.text


def test_a_manager_that_nobody_closes_leaves_no_thread(tmp_path: Path) -> None:
    seen: list[Event] = []
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
    manager = CheckpointManager(tmp_path, observers=[seen.append])
    manager.verify()
    manager.restore_latest()
    names = {"safepoint-events", "safepoint-progress"}
    threads = [thread for thread in threading.enumerate() if thread.name in names]
    assert {thread.name for thread in threads} == names
    del manager
    gc.collect()

    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert kinds(seen) == [RestoreBegun, RestoreDone]


@pytest.mark.parametrize("observers", [[3], ["print"]])
def test_an_observer_that_is_no_function_is_refused(tmp_path: Path, observers: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="observer"):
        CheckpointManager(tmp_path, observers=observers)


def test_numbers_of_bytes_are_told_with_three_digits() -> None:
    assert [sized(number) for number in (0, 1, 999, 1000, 4040, 999_499, 999_500, 1_500_000_000, 10**18)] == [
        "0 bytes",
        "1 byte",
        "999 bytes",
        "1 kB",
        "4.04 kB",
        "999 kB",
        "1 MB",
        "1.5 GB",
        "1e+06 TB",
    ]


def test_progress_says_how_much_is_left() -> None:
    def told(rate: float, done: int = 10**9) -> str:
        return str(
            WorkProgress(what="save", step=7, done_bytes=done, total_bytes=4 * 10**9, secs=2.0, rate=rate, is_sum=True)
        )

    assert told(1e9) == "saving step 7: 1 GB of 4 GB, 1 GB/s, 3 s left"
    assert told(1e7).endswith("10 MB/s, 5:00 left")
    assert told(1e5).endswith("100 kB/s, 8:20:00 left")
    assert told(0.0).endswith("0 bytes/s")
