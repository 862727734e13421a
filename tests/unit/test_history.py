"""The record of what happened in a root: how large it gets, how often it is written, and a directory in its place.

The rest of what it promises is in tests/contract/test_root_history.py.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import torch

from safepoint.formats.storage import LocalStorage, MemoryStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.events import SaveBegun, SaveFailed, StepPassedOver
from safepoint.manager.history import HISTORY_NAME, History, read_history

if TYPE_CHECKING:
    from pathlib import Path

STATE = {"w": torch.arange(10.0)}


def begun(step: int) -> SaveBegun:
    return SaveBegun(step=step, attempt="a", mode="sharded", mode_reason="", blocking=True, secs=0.0)


def failed(step: int, error: str = "StorageError", message: str = "full") -> SaveFailed:
    return SaveFailed(step=step, error=error, message=message, outcome="not_committed")


def test_it_is_bounded_and_the_newest_stay() -> None:
    storage = MemoryStorage()
    storage.make_dir("")
    storage.make_dir(".safepoint")
    history = History(storage, run="r", clock=lambda: 0.0)
    history(begun(0))
    for step in range(1100):
        history._new.append(json.dumps({"event": "X", "time": 1.0, "step": step, "pad": "p" * 900}))
    history(failed(1100, message="m" * 10_000))

    known = read_history(storage)
    assert known[-1]["step"] == 1100
    assert len(known[-1]["message"]) == 500
    assert len(known) <= 1000
    assert (storage.size(HISTORY_NAME) or 0) <= 1 << 20

    other = History(storage, run="s", clock=lambda: 0.0)  # the next run goes on from there
    other(begun(0))
    other(failed(2000))
    assert [line["step"] for line in read_history(storage)][-2:] == [1100, 2000]


def test_saves_are_written_at_most_every_half_minute_and_failures_at_once() -> None:
    now = [0.0]
    storage = MemoryStorage()
    storage.make_dir("")
    storage.make_dir(".safepoint")
    history = History(storage, run="r", clock=lambda: now[0])
    passed = StepPassedOver(step=3, problem="x")
    history(passed)
    assert read_history(storage) == []  # the root is not known to be ours yet
    history(begun(1))
    assert len(read_history(storage)) == 1
    for count, (secs, event) in enumerate([(1.0, passed), (31.0, passed)], start=2):
        now[0] = secs
        history(event)
        assert len(read_history(storage)) == count


def test_a_name_that_is_taken_by_something_else_harms_no_save(tmp_path: Path) -> None:
    os.makedirs(tmp_path / HISTORY_NAME / "x")
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)

    assert (tmp_path / HISTORY_NAME / "x").is_dir()
    assert read_history(LocalStorage(tmp_path)) == []
