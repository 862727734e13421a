from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager import retention as module
from safepoint.manager.commit import Committer
from safepoint.manager.retention import RetentionWorker

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def retention_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "safepoint-retention"}


def wait_until_gone(threads: set[threading.Thread]) -> None:
    until = time.monotonic() + 20
    while threads & retention_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads & retention_threads()


def test_the_thread_ends_when_there_is_nothing_to_delete_and_a_new_one_deletes_what_comes_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_IDLE_SECS", 0.05)
    before = retention_threads()
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)})
            wait_until_gone(retention_threads() - before)
            assert not list(tmp_path.glob(".trash-*")), caplog.text
        assert {path.name for path in tmp_path.iterdir()} == {"2", ".safepoint"}


def test_a_closed_worker_starts_no_thread(tmp_path: Path) -> None:
    worker = RetentionWorker(Committer(LocalStorage(tmp_path)), KeepLast(1))
    before = retention_threads()
    worker.close(1.0)
    worker.delete_soon()
    assert retention_threads() <= before
