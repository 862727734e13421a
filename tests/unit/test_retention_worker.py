"""The thread that deletes steps; what it deletes is in tests/contract/test_root_retention.py."""

from __future__ import annotations

from safepoint.formats.storage import MemoryObjects
from safepoint.manager import KeepLast
from safepoint.manager.commit import Committer
from safepoint.manager.retention import RetentionWorker

from support.retention_threads import retention_threads


def test_a_closed_worker_starts_no_thread() -> None:
    worker = RetentionWorker(Committer(MemoryObjects()), KeepLast(1))
    before = retention_threads()
    worker.close(1.0)
    worker.delete_soon()
    assert retention_threads() <= before
