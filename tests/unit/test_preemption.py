"""Preemption on one process: which handlers run when, where the loop stops, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager
from safepoint.manager.coordination import SingleProcess
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.signal_watch import NativeAction, SignalWatch, signal_name
from safepoint.manager.stop_decision import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NOT_ON_TIME_SECS = 10.0


def tell_self(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # the handler runs between two instructions


def comes_true(is_true: Callable[[], Any]) -> bool:
    until = time.monotonic() + NOT_ON_TIME_SECS
    while not is_true():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


@contextlib.contextmanager
def handled_by(handler: Any, number: int = signal.SIGTERM) -> Iterator[None]:
    former = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, former)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(tmp_path / "run", save_every=1000) as made:
        yield made


# -- where the loop stops -------------------------------------------------------------------------------------------


def test_the_step_in_which_the_signal_comes_is_the_last_and_is_saved(manager: CheckpointManager) -> None:
    with manager.preemption() as preemption:
        for step in range(100):
            if step == 7:
                tell_self()
                assert comes_true(lambda: preemption.stop_step is not None)
            stop = preemption.should_stop(step)
            manager.save(step, {"x": torch.ones(3)}, force=stop)
            if stop:
                break

        assert (step, preemption.stop_step, preemption.reason) == (7, 7, "SIGTERM on process 0")
    assert [info.step for info in manager.steps()] == [0, 7]


def test_without_a_signal_nothing_is_known_and_nothing_stops(manager: CheckpointManager) -> None:
    with manager.preemption() as preemption:
        assert not any(preemption.should_stop(step) for step in range(100))
        assert preemption.reason is None
        assert preemption.stop_step is None


def test_a_signal_before_the_first_step_stops_the_loop_after_it(manager: CheckpointManager) -> None:
    with manager.preemption() as preemption:
        tell_self()
        assert comes_true(lambda: preemption.stop_step is not None)
        assert preemption.should_stop(500)  # the first step of a run that was resumed


def test_a_loop_that_asks_every_tenth_step_stops_at_one_that_it_asks_about(manager: CheckpointManager) -> None:
    with manager.preemption() as preemption:
        assert not preemption.should_stop(10)
        tell_self()
        assert comes_true(lambda: preemption.stop_step is not None)
        assert preemption.should_stop(20)
        assert preemption.should_stop(30)


def test_a_request_stops_like_a_signal_from_any_thread(manager: CheckpointManager) -> None:
    with manager.preemption(signals=()) as preemption:
        thread = threading.Thread(target=preemption.request, args=("the time limit",))
        thread.start()
        thread.join()
        assert comes_true(lambda: preemption.stop_step is not None)
        assert preemption.reason == "the time limit on process 0"
        assert preemption.should_stop(0)


def test_the_stop_is_known_while_the_main_thread_is_in_a_long_call_of_c_code(manager: CheckpointManager) -> None:
    decided_at: list[float] = []
    handled_at: list[float] = []
    with handled_by(lambda *_: handled_at.append(time.monotonic())), manager.preemption() as preemption:
        assert not preemption.should_stop(3)

        def look() -> None:
            if comes_true(lambda: preemption.stop_step is not None):
                decided_at.append(time.monotonic())

        threads = [threading.Thread(target=look), threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))]
        for thread in threads:
            thread.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # one call, which signals do not interrupt
        for thread in threads:
            thread.join()

        assert preemption.stop_step == 4
    assert decided_at[0] < handled_at[0]


def test_the_check_takes_microseconds(manager: CheckpointManager) -> None:
    with manager.preemption() as preemption:
        secs = []
        for step in range(5000):
            began = time.perf_counter()
            preemption.should_stop(step)
            secs.append(time.perf_counter() - began)

    assert sorted(secs)[len(secs) // 2] < 20e-6


def test_steps_that_are_none_are_refused(manager: CheckpointManager) -> None:
    with manager.preemption() as preemption:
        for step in (-1, 1.5, True, "3", None):
            with pytest.raises(InvalidArgumentError, match="whole number"):
                preemption.should_stop(step)  # type: ignore[arg-type]
        assert not preemption.should_stop(torch.tensor(3))  # type: ignore[arg-type]


# -- further signals ------------------------------------------------------------------------------------------------


def test_a_second_signal_changes_nothing(manager: CheckpointManager) -> None:
    with manager.preemption() as preemption:
        assert not preemption.should_stop(3)
        tell_self()
        assert comes_true(lambda: preemption.stop_step is not None)
        tell_self()
        tell_self()
        assert preemption.stop_step == 4
        assert preemption.should_stop(4)
        manager.save(4, {"x": 1}, force=True)
    assert manager.latest_step() == 4


def test_the_second_sigint_interrupts(manager: CheckpointManager) -> None:
    with (
        handled_by(signal.default_int_handler, signal.SIGINT),
        manager.preemption(signals=(signal.SIGTERM, signal.SIGINT)) as preemption,
    ):
        tell_self(signal.SIGINT)
        assert comes_true(lambda: preemption.stop_step is not None)
        assert preemption.reason == "SIGINT on process 0"
        with pytest.raises(KeyboardInterrupt):
            tell_self(signal.SIGINT)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_signal_during_a_save_lets_it_end_and_saves_the_next_step(
    manager: CheckpointManager, tmp_path: Path, *, blocking: bool
) -> None:
    state = {"x": torch.zeros(4_000_000)}
    with manager.preemption() as preemption:
        timer = threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGTERM))
        for step in range(100):
            stop = preemption.should_stop(step)
            if step == 3:
                timer.start()
            manager.save(step, state, force=stop or step == 3, blocking=blocking)
            if stop:
                break
            if step == 3:
                assert comes_true(lambda: preemption.stop_step is not None)
    timer.join()

    assert step in (4, 3)
    assert manager.latest_step() == step == 4
    assert [info.step for info in manager.steps()] == [0, 3, 4]
    assert not list((tmp_path / "run").glob("*.tmp-*"))


def test_leaving_the_block_waits_for_the_save_in_flight_while_signals_are_still_caught(
    manager: CheckpointManager,
) -> None:
    during: list[Any] = []  # the handler in place when the save has ended
    with manager.preemption() as preemption:
        tell_self()
        assert comes_true(lambda: preemption.stop_step is not None)
        assert preemption.should_stop(0)
        manager.save(0, {"x": torch.zeros(4_000_000)}, force=True, blocking=False)
        assert manager._in_flight is not None
        join = manager._in_flight.join

        def joined() -> None:
            if not during:
                tell_self()  # the scheduler grows impatient
            join()
            during.append(signal.getsignal(signal.SIGTERM))

        manager._in_flight.join = joined  # type: ignore[method-assign]
        caught = signal.getsignal(signal.SIGTERM)
    assert during == [caught]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert manager.latest_step() == 0


# -- everybody else's handlers --------------------------------------------------------------------------------------


def test_the_users_handler_runs_at_every_signal_and_is_put_back(manager: CheckpointManager) -> None:
    calls: list[tuple[int, bool]] = []

    def handler(number: int, frame: Any) -> None:
        calls.append((number, frame is not None))

    with handled_by(handler):
        with manager.preemption():
            tell_self()
            tell_self()
        assert signal.getsignal(signal.SIGTERM) is handler
        tell_self()

    assert calls == [(signal.SIGTERM, True)] * 3


def test_what_the_users_handler_raises_is_raised(manager: CheckpointManager) -> None:
    def handler(*_: Any) -> None:
        sys.exit(143)

    with handled_by(handler), manager.preemption() as preemption:
        with pytest.raises(SystemExit):
            tell_self()
        assert comes_true(lambda: preemption.stop_step is not None)


@pytest.mark.parametrize("former", [signal.SIG_DFL, signal.SIG_IGN])
def test_the_systems_own_dispositions_are_put_back(manager: CheckpointManager, former: Any) -> None:
    with handled_by(former):
        with manager.preemption():
            tell_self()
        assert signal.getsignal(signal.SIGTERM) == former
        assert NativeAction.of(signal.SIGTERM).address == int(former)


def test_a_handler_installed_meanwhile_stays_and_may_call_ours(manager: CheckpointManager) -> None:
    calls: list[str] = []
    with handled_by(lambda *_: calls.append("first")):
        with manager.preemption() as preemption:
            ours = signal.getsignal(signal.SIGTERM)
            assert callable(ours)

            def later(number: int, frame: Any) -> None:
                calls.append("later")
                ours(number, frame)

            signal.signal(signal.SIGTERM, later)
            tell_self()
            assert comes_true(lambda: preemption.stop_step is not None)
        assert signal.getsignal(signal.SIGTERM) is later
        tell_self()

    assert calls == ["later", "first", "later", "first"]


def test_a_handler_of_c_code_is_known_and_put_back(manager: CheckpointManager) -> None:
    import ctypes  # noqa: PLC0415 - only here

    calls: list[int] = []
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(calls.append)
    with handled_by(signal.SIG_DFL):
        library = ctypes.CDLL(None)
        library.signal.restype = ctypes.c_void_p
        library.signal(ctypes.c_int(signal.SIGTERM), handler)
        installed = NativeAction.of(signal.SIGTERM).address
        with manager.preemption() as preemption:
            assert preemption._signals.native[signal.SIGTERM].address == installed
            preemption._signals.native[signal.SIGTERM].call(signal.SIGTERM)
            assert NativeAction.of(signal.SIGTERM).address != installed
        assert NativeAction.of(signal.SIGTERM).address == installed

    assert calls == [signal.SIGTERM]


def test_an_event_loops_wake_up_descriptor_still_hears_of_signals_and_is_put_back(manager: CheckpointManager) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        os.set_blocking(theirs.fileno(), False)
        former = signal.set_wakeup_fd(theirs.fileno())
        try:
            with manager.preemption(), handled_by(lambda *_: None, signal.SIGUSR2):
                tell_self()
                tell_self(signal.SIGUSR2)
                ours.settimeout(NOT_ON_TIME_SECS)
                told = b"".join(ours.recv(1) for _ in range(2))
            assert signal.set_wakeup_fd(-1) == theirs.fileno()
        finally:
            signal.set_wakeup_fd(former)

    assert told == bytes([signal.SIGTERM, signal.SIGUSR2])


def test_closing_the_manager_puts_everything_back(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    before = signal.getsignal(signal.SIGTERM), num_fds()
    for _ in range(20):
        manager.preemption().close()
    preemption = manager.preemption()
    manager.close()

    with pytest.raises(InvalidArgumentError, match="no preemption is watched"):
        preemption.should_stop(3)
    assert (signal.getsignal(signal.SIGTERM), num_fds()) == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "safepoint-preemption"]


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_two_managers_hear_of_one_signal(manager: CheckpointManager, tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path / "other") as other,
        manager.preemption() as first,
        other.preemption() as second,
    ):
        tell_self()
        assert comes_true(lambda: first.stop_step is not None and second.stop_step is not None)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# -- where signals cannot be caught ---------------------------------------------------------------------------------


def test_another_thread_is_told_how_to_do_without_signals(manager: CheckpointManager) -> None:
    errors: list[BaseException] = []

    def try_it() -> None:
        try:
            manager.preemption()
        except InvalidArgumentError as error:
            errors.append(error)

    thread = threading.Thread(target=try_it)
    thread.start()
    thread.join()

    (error,) = errors
    assert "main thread" in str(error)
    assert "signals=()" in str(error)


@pytest.mark.parametrize("number", [signal.SIGKILL, 9999, "TERM"])
def test_what_cannot_be_caught_is_refused_and_nothing_stays(manager: CheckpointManager, number: Any) -> None:
    before = num_fds()
    with pytest.raises(InvalidArgumentError, match="cannot be caught"):
        manager.preemption(signals=(signal.SIGTERM, number))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert num_fds() == before


def test_a_deadline_that_is_none_is_refused(manager: CheckpointManager) -> None:
    with pytest.raises(InvalidArgumentError, match="deadline_secs"):
        manager.preemption(deadline_secs=0.0)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


FORKED = """
import multiprocessing, os, signal, sys, time
from safepoint.manager import CheckpointManager

def child():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)

with CheckpointManager(sys.argv[1]) as manager, manager.preemption() as preemption:
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(20)
    time.sleep(0.2)
    print(process.exitcode, preemption.reason, preemption.should_stop(1))
"""


def test_a_forked_process_dies_of_its_own_signal_and_preempts_nobody(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.split() == ["-15", "None", "False"]


# -- the parts ------------------------------------------------------------------------------------------------------


def test_a_step_beyond_the_limit_is_held_until_the_decision(caplog: pytest.LogCaptureFixture) -> None:
    del caplog
    progress = Progress()
    assert not progress.reached(5)
    assert progress.hold() == 5
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(progress.reached(6)))
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    progress.settle(8)
    thread.join(NOT_ON_TIME_SECS)

    assert answers == [False]
    assert [progress.reached(step) for step in (7, 8, 9)] == [False, True, True]


def test_steps_shorter_than_the_time_ahead_are_not_held() -> None:
    progress = Progress()
    for step in range(5):
        progress.reached(step)
        time.sleep(0.004)
    limit = progress.hold(ahead_secs=0.05)

    assert 5 <= limit <= 4 + 12
    assert not progress.reached(limit)
    progress.settle(limit + 1)


def test_long_steps_are_not_put_off() -> None:
    progress = Progress()
    for step in range(3):
        progress.reached(step)
        time.sleep(0.06)
    assert progress.hold(ahead_secs=0.05) == 2


def test_no_step_is_crossed_between_answer_and_decision_however_the_threads_interleave() -> None:
    for _ in range(300):
        progress = Progress()
        passed: list[int] = []

        def train(progress: Progress = progress, passed: list[int] = passed) -> None:
            step = 0
            while not progress.reached(step):
                passed.append(step)
                step += 1
            passed.append(step)

        thread = threading.Thread(target=train)
        thread.start()
        limit = progress.hold()
        progress.settle(limit + 1)
        thread.join(NOT_ON_TIME_SECS)
        assert passed[-1] == limit + 1


def test_one_process_keeps_its_note_in_one_view() -> None:
    alone = SingleProcess()
    view = alone.background("a")
    assert view.find_note(deadline_secs=1) is None
    assert view.leave_note(b"first", deadline_secs=1) == b"first"
    assert view.leave_note(b"second", deadline_secs=1) == b"first"
    assert alone.background("a").find_note(deadline_secs=1) == b"first"
    assert alone.background("b").find_note(deadline_secs=1) is None


def test_signals_have_names() -> None:
    assert signal_name(signal.SIGUSR1) == "SIGUSR1"
    assert signal_name(35) == "signal 35"


def test_a_watch_without_signals_can_be_woken() -> None:
    watch = SignalWatch(())
    watch.wake()
    assert watch.wait(NOT_ON_TIME_SECS) is None
    watch.close()
