"""What happened in a root of any kind is written down there, by its owner, and nothing depends on it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager.errors import RootInUseError, StepNotFoundError, UnsupportedValueError
from safepoint.manager.history import HISTORY_NAME, read_history

if TYPE_CHECKING:
    from support.roots import Root

STATE = {"w": torch.arange(10.0)}


def events_of(root: Root) -> list[str]:
    return [line["event"] for line in read_history(root.storage)]


def test_saves_failures_and_the_restore_at_the_start_of_a_run_are_written_down(root: Root) -> None:
    with root.manager() as manager:
        manager.save(1, STATE)
        with pytest.raises(UnsupportedValueError):
            manager.save(2, {"w": print})
    with root.manager() as manager:
        manager.restore_latest()
        manager.save(2, STATE, blocking=False)

    assert events_of(root) == ["SaveCommitted", "SaveFailed", "RestoreDone", "SaveCommitted"]
    first, failure, restore, last = read_history(root.storage)
    assert "cannot be kept" in failure["message"]
    assert restore["attempt"] == first["attempt"]
    assert restore["run"] == last["run"] != first["run"]


def test_who_only_restores_leaves_nothing(root: Root) -> None:
    with root.manager() as manager:
        manager.save(1, STATE)
    root.storage.delete(HISTORY_NAME)
    with root.manager() as manager:
        manager.restore_latest()
        with pytest.raises(StepNotFoundError):
            manager.restore(9)

    assert root.storage.size(HISTORY_NAME) is None


def test_who_does_not_own_the_root_writes_nothing(root: Root) -> None:
    with root.manager() as owner:
        owner.save(1, STATE)
        with root.manager() as other, pytest.raises(RootInUseError):
            other.save(2, STATE)

    assert events_of(root) == ["SaveCommitted"]


def test_whatever_is_wrong_with_it_is_no_history_and_no_problem(root: Root) -> None:
    contents = {
        "empty": b"",
        "no text": b"\xff\xfe\x00",
        "no objects": b"[]\n3\nnull\n{}\n",
        "wrong types": b'{"event": 3, "time": 1}\n{"event": "X", "time": "1"}\n{"event": "X", "time": true}\n',
        "no time": b'{"event": "X"}\n',
        "no times": b'{"event": "X", "time": 1e999}\n{"event": "X", "time": -1}\n',
        "huge": b"x" * (4 << 20),
        "deep": b"[" * 100_000,
    }
    for content in contents.values():
        root.write(HISTORY_NAME, content)
        assert read_history(root.storage) == []
    with root.manager() as manager:
        manager.save(1, STATE)
        assert manager.verify() == []
    assert events_of(root) == ["SaveCommitted"]
