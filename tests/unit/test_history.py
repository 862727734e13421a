"""The record of what happened in a root: who writes it, how large it gets, and that nothing depends on it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.formats.storage import LocalStorage, MemoryStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import RootInUseError, StepNotFoundError, UnsupportedValueError
from safepoint.manager.events import SaveBegun, SaveFailed, StepPassedOver
from safepoint.manager.history import HISTORY_NAME, History, read_history

if TYPE_CHECKING:
    from pathlib import Path

STATE = {"w": torch.arange(10.0)}


def events_of(root: Path) -> list[str]:
    return [line["event"] for line in read_history(LocalStorage(root))]


def begun(step: int) -> SaveBegun:
    return SaveBegun(step=step, attempt="a", mode="sharded", mode_reason="", blocking=True, secs=0.0)


def failed(step: int, error: str = "StorageError", message: str = "full") -> SaveFailed:
    return SaveFailed(step=step, error=error, message=message, outcome="not_committed")


def test_saves_failures_and_the_restore_at_the_start_of_a_run_are_written_down(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
        with pytest.raises(UnsupportedValueError):
            manager.save(2, {"w": print})
    with CheckpointManager(tmp_path) as manager:
        manager.restore_latest()
        manager.save(2, STATE, blocking=False)

    assert events_of(tmp_path) == ["SaveCommitted", "SaveFailed", "RestoreDone", "SaveCommitted"]
    first, failure, restore, last = read_history(LocalStorage(tmp_path))
    assert "cannot be kept" in failure["message"]
    assert restore["attempt"] == first["attempt"]
    assert restore["run"] == last["run"] != first["run"]


def test_who_only_restores_leaves_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
    (tmp_path / HISTORY_NAME).unlink()
    with CheckpointManager(tmp_path) as manager:
        manager.restore_latest()
        with pytest.raises(StepNotFoundError):
            manager.restore(9)

    assert not (tmp_path / HISTORY_NAME).exists()


def test_who_does_not_own_the_root_writes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as owner:
        owner.save(1, STATE)
        with CheckpointManager(tmp_path, deadline_secs=2.0) as other, pytest.raises(RootInUseError):
            other.save(2, STATE)

    assert events_of(tmp_path) == ["SaveCommitted"]


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


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"[]\n3\nnull\n{}\n",
        b'{"event": 3, "time": 1}\n{"event": "X", "time": "1"}\n{"event": "X", "time": true}\n{"event": "X"}\n',
        b'{"event": "X", "time": 1e999}\n{"event": "X", "time": -1}\n',
        b"[" * 100_000,
        b"x" * (4 << 20),
    ],
    ids=["empty", "no text", "no objects", "wrong types", "no times", "deep", "huge"],
)
def test_whatever_is_wrong_with_it_is_no_history_and_no_problem(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".safepoint").mkdir()
    (tmp_path / HISTORY_NAME).write_bytes(content)

    assert read_history(LocalStorage(tmp_path)) == []
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)
        assert manager.verify() == []
    assert events_of(tmp_path) == ["SaveCommitted"]


def test_a_name_that_is_taken_by_something_else_harms_no_save(tmp_path: Path) -> None:
    os.makedirs(tmp_path / HISTORY_NAME / "x")
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, STATE)

    assert (tmp_path / HISTORY_NAME / "x").is_dir()
    assert read_history(LocalStorage(tmp_path)) == []
