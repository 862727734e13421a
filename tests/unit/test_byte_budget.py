"""ByteBudget: never more than its capacity, first come first served, and no wait without an end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from safepoint.formats.storage.flight import ByteBudget


def test_no_more_is_taken_than_there_is() -> None:
    budget = ByteBudget(100)
    seen = []

    def work(num_bytes: int) -> None:
        for _ in range(50):
            taken = budget.take(num_bytes, deadline_secs=30)
            seen.append(budget.taken_bytes)
            budget.give(taken)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, [1, 30, 50, 60, 99, 100, 7, 45]))
    assert max(seen) <= 100
    assert budget.taken_bytes == 0


def test_what_is_larger_than_the_whole_gets_the_whole() -> None:
    budget = ByteBudget(100)
    assert budget.take(1000, deadline_secs=1) == 100
    with pytest.raises(TimeoutError):
        budget.take(1, deadline_secs=0.01)
    budget.give(100)
    assert budget.take(0, deadline_secs=0.01) == 0


def test_a_large_one_does_not_wait_behind_small_ones_that_came_later() -> None:
    budget = ByteBudget(100)
    order: list[str] = []
    first = budget.take(60, deadline_secs=1)
    waiting = threading.Event()

    def large() -> None:
        waiting.set()
        taken = budget.take(90, deadline_secs=30)
        order.append("large")
        budget.give(taken)

    thread = threading.Thread(target=large)
    thread.start()
    waiting.wait(30)
    while not budget._waiting:
        threading.Event().wait(0.001)
    with pytest.raises(TimeoutError):  # there would be room for it, but it is not its turn
        budget.take(10, deadline_secs=0.01)
    budget.give(first)
    thread.join(30)
    assert order == ["large"]
    assert budget.taken_bytes == 0


def test_whoever_gives_up_leaves_the_queue() -> None:
    budget = ByteBudget(10)
    taken = budget.take(10, deadline_secs=1)
    with pytest.raises(TimeoutError):
        budget.take(10, deadline_secs=0.01)
    budget.give(taken)
    assert budget.take(10, deadline_secs=0.01) == 10
