"""The threads that delete steps in this process."""

from __future__ import annotations

import threading
import time

__all__ = ["retention_threads", "wait_until_gone"]


def retention_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "safepoint-retention"}


def wait_until_gone(threads: set[threading.Thread]) -> None:
    until = time.monotonic() + 20
    while threads & retention_threads() and time.monotonic() < until:
        time.sleep(0.01)
    assert not threads & retention_threads()
