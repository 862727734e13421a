"""Long work is told, logged and shown; short work costs nothing; what others do is added where that can be had."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.coordination.single import SingleProcess
from safepoint.manager.errors import RendezvousTimeoutError
from safepoint.manager.metering import Meter
from safepoint.manager.terminal_line import TerminalLine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest

    from safepoint.manager.events import WorkProgress

SOON = 0.02


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Shown:
    """A line that remembers what it showed; None where it was cleared."""

    def __init__(self) -> None:
        self.texts: list[str | None] = []

    def show(self, text: str) -> None:
        self.texts.append(text)

    def clear(self) -> None:
        self.texts.append(None)


class Store:
    """Counters of two processes, of which the other has done some work; or a store that does not answer."""

    process_index = 0
    process_count = 2

    def __init__(self, *, others_done: int = 0, others_total: int = 0, answers: bool = True) -> None:
        self.sums = {"x/done": others_done, "x/total": others_total}
        self.answers = answers
        self.num_calls = 0

    def count(self, name: str, amount: int, *, deadline_secs: float) -> int:
        self.num_calls += 1
        if not self.answers:
            raise RendezvousTimeoutError("nobody is there", absent=(0,), deadline_secs=deadline_secs)
        self.sums[name] = self.sums.get(name, 0) + amount
        return self.sums[name]

    def drop_count(self, name: str, *, deadline_secs: float) -> None:
        del deadline_secs
        self.sums.pop(name, None)


def wait_for(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def test_work_that_takes_long_is_told_with_its_rate_and_short_work_is_not() -> None:
    told: list[WorkProgress] = []
    meter = Meter(SingleProcess(), tell=told.append, look_every_secs=SOON)
    with meter.work("save", 100, step=1) as work:
        work.advance(100)
    with meter.work("save", 1000, step=2) as work:
        work.advance(400)
        wait_for(lambda: len(told) >= 2)
        work.advance(900)  # a part of it was done twice
        wait_for(lambda: told[-1].done_bytes > 400)
    meter.close()

    assert {progress.step for progress in told} == {2}
    first, last = told[0], told[-1]
    assert (first.done_bytes, first.total_bytes, first.is_sum) == (400, 1000, False)
    assert first.rate > 0
    assert first.left_secs is not None
    assert last.done_bytes == 1000


def test_the_log_hears_of_it_every_half_minute(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter(SingleProcess(), look_every_secs=SOON)
    with caplog.at_level(logging.INFO, "safepoint"), meter.work("restore", 1000, step=2) as work:
        work.logged -= 40
        wait_for(lambda: caplog.records)
        time.sleep(5 * SOON)
    meter.close()

    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["restoring step 2: 0 bytes of 1 kB"]


def test_only_what_holds_the_caller_up_is_shown() -> None:
    line = Shown()
    meter = Meter(SingleProcess(), line=line, look_every_secs=SOON)
    with meter.work("save", 1000, step=2):
        time.sleep(5 * SOON)
        assert [text for text in line.texts if text] == []
        with meter.attended():
            wait_for(lambda: any(line.texts))
        assert line.texts[-1] is None
        count = len(line.texts)
        time.sleep(5 * SOON)
        assert len(line.texts) == count
    with meter.work("restore", 1000, step=3, is_attended=True):
        wait_for(lambda: line.texts[-1] is not None)
    assert line.texts[-1] is None
    meter.close()


def test_the_sum_of_all_processes_is_told_where_the_store_answers() -> None:
    told: list[WorkProgress] = []
    store = Store(others_done=50, others_total=500)
    meter = Meter(store, tell=told.append, look_every_secs=SOON)
    with meter.work("save", 1000, step=2, shared="x") as work:
        work.advance(100)
        wait_for(lambda: told)
        work.advance(100)
        wait_for(lambda: told[-1].done_bytes == 250)
    wait_for(lambda: store.sums["x/done"] == 250)
    meter.close()

    assert (told[0].done_bytes, told[0].total_bytes, told[0].is_sum) == (150, 1500, True)


def test_what_was_done_at_the_end_is_added_too() -> None:
    store = Store()
    meter = Meter(store, look_every_secs=SOON)
    with meter.work("save", 1000, step=2, shared="x") as work:
        wait_for(lambda: store.sums["x/total"])
        work.advance(1000)
    wait_for(lambda: store.sums["x/done"] == 1000)
    meter.close()


def test_a_store_that_does_not_answer_is_left_alone_and_each_tells_of_itself() -> None:
    told: list[WorkProgress] = []
    store = Store(answers=False)
    meter = Meter(store, tell=told.append, look_every_secs=SOON)
    with meter.work("save", 1000, step=2, shared="x") as work:
        work.advance(100)
        wait_for(lambda: len(told) > 4)
    meter.close()

    assert store.num_calls == 1
    assert (told[-1].done_bytes, told[-1].total_bytes, told[-1].is_sum) == (100, 1000, False)


def test_nobody_watching_costs_no_thread(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": torch.zeros(10)})
        manager.restore_latest()
        assert "safepoint-progress" not in {thread.name for thread in threading.enumerate()}


def test_bytes_of_saves_restores_and_verifications_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, int]] = []
    state = {"w": torch.zeros(3 << 20), "v": torch.zeros(5)}
    with CheckpointManager(tmp_path) as manager:
        meter = manager._session.telling._meter
        finish = meter._state.finish
        monkeypatch.setattr(
            meter._state,
            "finish",
            lambda work: (seen.append((work.what, work.done_bytes, work.total_bytes)), finish(work)),
        )
        manager.save(1, state)
        manager.save(2, state, blocking=False)
        manager.wait()
        manager.restore_latest(state)
        manager.verify()
    num_bytes = (12 << 20) + 20
    file_bytes = sum(path.stat().st_size for path in (tmp_path / "1").rglob("*.safetensors"))

    assert seen == [
        ("stage", 0, 0),
        ("save", file_bytes, num_bytes),
        ("stage", num_bytes, num_bytes),
        ("save", file_bytes, num_bytes),
        ("restore", file_bytes, num_bytes),
        ("verify", 2 * file_bytes, 2 * file_bytes),
    ]


def test_a_slow_save_shows_one_line_on_a_terminal_and_takes_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    write = LocalStorage.sync_dir

    def slow(self: LocalStorage, path: str) -> None:
        wait_for(terminal.getvalue)
        write(self, path)

    with CheckpointManager(tmp_path) as manager:
        monkeypatch.setattr(LocalStorage, "sync_dir", slow)
        manager.save(1, {"w": torch.zeros(1 << 20)})
        monkeypatch.undo()
    shown = terminal.getvalue()
    with CheckpointManager(tmp_path, progress="off") as manager:
        assert manager.latest_step() == 1

    assert "saving step 1: 4.19 MB of 4.19 MB" in shown
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[2K")


def test_nothing_is_shown_where_there_is_no_terminal_or_it_is_gone() -> None:
    assert TerminalLine.on_stderr() is None
    terminal = Terminal()
    line = TerminalLine(terminal)
    line.show("x" * 1000)
    assert len(terminal.getvalue()) < 1000
    terminal.close()
    line.show("y")
    line.clear()
