from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from safepoint.manager.coordination.worker import Worker

if TYPE_CHECKING:
    import pytest


def test_a_worker_can_be_closed_by_one_thread_while_another_makes_its_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    start = threading.Thread.start

    def slow_start(thread: threading.Thread) -> None:
        if thread.name == "the worker's":
            begun.set()
            assert go_on.wait(20)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", slow_start)
    worker: Worker[None] = Worker("the worker's", lambda: None)
    done = threading.Event()
    caller = threading.Thread(target=worker.post, args=(lambda _: done.set(),))
    caller.start()
    assert begun.wait(20)
    worker.close(within_secs=0.1)
    go_on.set()
    caller.join(20)
    assert done.wait(20)
    worker.close(within_secs=5.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "the worker's"]
