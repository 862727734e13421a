from __future__ import annotations

import gc
import threading

from safepoint.manager.collecting import paused_collection
from safepoint.manager.remembering import Memo


def test_collection_goes_on_after_the_last_of_overlapping_pauses() -> None:
    assert gc.isenabled()
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with paused_collection():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with paused_collection():
        thread.start()
        entered.wait()
        assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_program_that_switched_collection_off_finds_it_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_memo_works_out_again_what_differs() -> None:
    memo: Memo[int] = Memo()
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [memo.get(({"a": 1},), make), memo.get(({"a": 1},), make), memo.get(({"a": 2},), make)] == [0, 0, 1]
    assert memo.get(({"a": 1},), make) == 2
