"""Two sides of a meeting in one process, over a real store: how they wait. `tests/multiprocess` has the rest."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from safepoint.manager.coordination.address import open_server
from safepoint.manager.coordination.distributed import Meetings
from safepoint.manager.coordination.meeting import Verdict
from safepoint.manager.coordination.store import TCPStore, Values, connect_tcp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from safepoint.manager.coordination.address import Server
    from safepoint.manager.coordination.store import Store

SECS = 30.0


class CountedStore(TCPStore):
    """A connection to a store that counts what is asked of it."""

    calls = 0

    def _counted(self, result: Any) -> Any:
        type(self).calls += 1
        return result

    def compare_set(self, *args: Any) -> Any:
        return self._counted(super().compare_set(*args))

    def check(self, *args: Any) -> Any:
        return self._counted(super().check(*args))

    def wait(self, *args: Any) -> Any:
        return self._counted(super().wait(*args))


@pytest.fixture
def server() -> Iterator[Server]:
    served = open_server()
    yield served
    served.close()


def connect(server: Server) -> TCPStore:
    return connect_tcp("127.0.0.1", server.address.port)


@pytest.fixture
def meetings(server: Server) -> Iterator[Callable[[int], Meetings]]:
    made: list[Meetings] = []

    def make(process_index: int, connected: Callable[[], Store] = lambda: connect(server)) -> Meetings:
        made.append(Meetings(connected, "here/", process_index=process_index, process_count=2))
        return made[-1]

    yield make
    for each in made:
        each.close(until=time.monotonic())


@pytest.mark.parametrize(("late", "sign"), [(0, "here/1"), (1, "1/open")])
def test_who_waits_for_the_others_hardly_asks_the_store(
    server: Server, meetings: Callable[..., Meetings], late: int, sign: str
) -> None:
    def connect_counted() -> CountedStore:
        return CountedStore("127.0.0.1", server.address.port, is_master=False, wait_for_workers=False)

    early, other = meetings(1 - late, connect_counted), meetings(late)
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(early.meet, "save", b"a", deadline_secs=SECS, decide=lambda brought: brought[1])
        Values(connect(server), "here/").wait(sign, until=time.monotonic() + SECS, is_over=lambda: False)
        before = CountedStore.calls
        time.sleep(1.0)
        assert CountedStore.calls < before + 10
        answer = other.meet("save", b"b", deadline_secs=SECS, decide=lambda brought: brought[1])
        assert waiting.result() == answer == (b"b" if late == 1 else b"a")
    assert CountedStore.calls > 0


@pytest.mark.parametrize("answer", [b"", bytes(range(256)), b"x" * 4096, b"x" * 4097, [b"", b"\xff" * 5000]])
def test_answers_of_any_size_and_kind_reach_the_peer(
    meetings: Callable[..., Meetings], answer: bytes | list[bytes]
) -> None:
    primary, peer = meetings(0), meetings(1)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(peer.meet, "save", b"", deadline_secs=SECS)
        primary.meet("save", b"", deadline_secs=SECS, decide=lambda _: answer)
        assert waiting.result() == (answer if isinstance(answer, bytes) else answer[1])


def test_a_peer_finds_a_turn_whose_bell_it_missed_and_is_not_misled_by_one_that_means_nothing(
    server: Server, meetings: Callable[..., Meetings]
) -> None:
    peer = meetings(1)
    values = Values(connect(server), "here/")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(peer.meet, "save", b"", deadline_secs=SECS)
        time.sleep(0.2)
        values.free("1/open")
        values.write("turn", b"1 open")  # and no bell
        values.wait("1/ready", until=time.monotonic() + SECS, is_over=lambda: False)
        assert values.has(["1/in/1"])
        assert values.read("1/end") is None  # in a TCPStore this wakes who waits for the key
        time.sleep(0.2)
        assert not waiting.done()
        values.claim("1/end", Verdict.answering(b"yes", entered=1).to_bytes())
        assert waiting.result() == b"yes"


def test_a_primary_that_is_called_too_early_waits_on(server: Server, meetings: Callable[..., Meetings]) -> None:
    """A peer whose connection broke counts itself twice."""
    primary, peer = meetings(0), meetings(1)
    values = Values(connect(server), "here/")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(primary.meet, "save", b"a", deadline_secs=SECS, decide=b"".join)
        values.wait("1/open", until=time.monotonic() + SECS, is_over=lambda: False)
        values.ring("1/ready")
        time.sleep(0.2)
        assert not waiting.done()
        assert peer.meet("save", b"b", deadline_secs=SECS) == waiting.result() == b"ab"


def test_threads_that_waited_in_vain_end(meetings: Callable[..., Meetings]) -> None:
    before = set(threading.enumerate())
    for process_index in (0, 1):
        waiting = meetings(process_index)
        with pytest.raises(TimeoutError):
            waiting.meet("save", b"", deadline_secs=0.3)
        waiting.close(until=time.monotonic())
    until = time.monotonic() + SECS
    while (left := set(threading.enumerate()) - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left
