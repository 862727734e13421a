"""One process on its own keeps the coordinator's contract without anybody to meet; and what needs no second process."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager.coordination import SingleProcess, detect_coordinator, run_together
from safepoint.manager.coordination.address import Address, find_server, open_server
from safepoint.manager.coordination.explicit import open_at
from safepoint.manager.coordination.meeting import Message, Verdict
from safepoint.manager.coordination.store import Line, StoreGoneError, StoreStuckError, Values, connect_tcp
from safepoint.manager.coordination.worker import StuckError, Worker
from safepoint.manager.errors import (
    DisagreementError,
    InvalidArgumentError,
    RendezvousTimeoutError,
    StepNotFoundError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from safepoint.manager.coordination.address import Server


def test_alone_the_answer_is_what_decide_makes_of_the_one_payload() -> None:
    alone = SingleProcess()
    assert (alone.process_index, alone.process_count, alone.is_primary) == (0, 1, True)
    assert alone.meet("save", b"a", deadline_secs=1) == b""
    assert alone.meet("save", b"a", deadline_secs=1, decide=lambda payloads: payloads[0] * 2) == b"aa"
    assert alone.meet("save", b"a", deadline_secs=1, decide=list) == b"a"
    assert alone.background().meet("save", b"b", deadline_secs=1, decide=list) == b"b"


def test_alone_an_error_of_decide_or_of_the_work_is_raised_as_it_is() -> None:
    def refuse(payloads: Sequence[bytes]) -> bytes:
        raise DisagreementError(f"{len(payloads)} payload")

    def fail() -> bytes:
        raise StepNotFoundError("no such step", step=3)

    alone = SingleProcess()
    with pytest.raises(DisagreementError, match="1 payload"):
        alone.meet("save", b"", deadline_secs=1, decide=refuse)
    with pytest.raises(StepNotFoundError, match="no such step"):
        run_together(alone, "save", 1, fail)
    assert run_together(alone, "save", 1, lambda: b"x") == b""
    assert run_together(alone, "save", 1, lambda: b"x", list) == b"x"


def test_alone_there_is_nobody_to_send_to() -> None:
    alone = SingleProcess()
    assert alone.open_transport(1) is alone.transport()
    with pytest.raises(InvalidArgumentError, match="no process 1"):
        alone.transport().send(torch.zeros(1, dtype=torch.uint8), 1, 1)
    with pytest.raises(InvalidArgumentError, match="no process 1"):
        alone.transport().receive(torch.zeros(1, dtype=torch.uint8), 1, 1)


def test_alone_blobs_are_found_by_digest_and_are_bounded() -> None:
    alone = SingleProcess()
    digest = alone.share_blob(b"data")
    assert alone.fetch_blob(digest, deadline_secs=1) == b"data"
    for number in range(1000):
        alone.share_blob(b"%d" % number)
    with pytest.raises(RendezvousTimeoutError):
        alone.fetch_blob(digest, deadline_secs=1)


def test_events_are_told_in_their_order() -> None:
    events: list[str] = []
    with SingleProcess() as alone:
        alone.on_event = events.append
        alone.sync_devices()
        alone.meet("save-begin", b"", deadline_secs=1)
    assert events == ["sync_devices", "meet:save-begin"]


def test_one_process_is_detected_as_one() -> None:
    assert isinstance(detect_coordinator(deadline_secs=1), SingleProcess)


def test_a_launcher_whose_processes_cannot_meet_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert isinstance(detect_coordinator(deadline_secs=1), SingleProcess)
    assert "init_process_group" in caplog.text


@pytest.mark.parametrize("store", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_a_store_that_is_no_address_is_refused(store: str) -> None:
    with pytest.raises(InvalidArgumentError, match="host:port"):
        open_at(store, deadline_secs=1)


@pytest.mark.parametrize(("rank", "count"), [(None, None), ("0", None), ("2", "2"), ("-1", "2"), ("x", "2")])
def test_a_store_without_a_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, count: str | None
) -> None:
    for name, value in (("RANK", rank), ("WORLD_SIZE", count)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError, match="RANK and WORLD_SIZE"):
        open_at("localhost:4711", deadline_secs=1)


# The words of the protocol.


def test_messages_and_verdicts_survive_the_way() -> None:
    message = Message(name="säve\n", entered=3, payload=b"\x00\n\xff")
    assert Message.from_bytes(message.to_bytes()) == message
    error = DisagreementError("two steps", brought=(("5", (0,)), ("6", (1, 2))), step=5)
    verdict = Verdict.from_bytes(Verdict.failure(error, entered=2).to_bytes())
    assert type(verdict.raised()) is DisagreementError
    assert verdict.raised().to_json() == error.to_json()


def test_an_error_too_long_for_the_store_is_cut_short() -> None:
    verdict = Verdict.failure(DisagreementError("x" * (20 << 20), step=5), entered=1)
    assert len(verdict.to_bytes()) < 4 << 20
    assert verdict.raised().step == 5


# The line to the store.


@pytest.fixture
def server() -> Iterator[Server]:
    served = open_server()
    yield served
    served.close()


def test_values_of_any_size_are_read_as_they_were_written_and_leave_nothing_when_erased(server: Server) -> None:
    store = connect_tcp("127.0.0.1", server.address.port)
    before = store.num_keys()
    values = Values(store, "here/")
    for size in (0, 1, 4 << 20, (4 << 20) + 1, 20 << 20):
        value = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        values.write("key", value)
        assert values.read("key") == value
        values.erase("key")
        assert values.read("key") is None
        values.write("key", value)
        values.erase("key", num_bytes=size)
        assert store.num_keys() == before


def test_only_the_first_claim_holds(server: Server) -> None:
    values = Values(connect_tcp("127.0.0.1", server.address.port), "")
    assert values.claim("end", b"first") == b"first"
    assert values.claim("end", b"second") == b"first"


def test_a_line_says_when_the_store_is_gone_and_when_it_is_silent(server: Server) -> None:
    port = server.address.port
    line = Line("test", lambda: connect_tcp("127.0.0.1", port), "")
    line.call(lambda values: values.write("key", b"value"), until=time.monotonic() + 30)
    with pytest.raises(StoreStuckError):
        line.call(lambda _: time.sleep(1), until=time.monotonic() + 0.1)
    assert line.call(lambda values: values.read("key"), until=time.monotonic() + 30) == b"value"
    server.close()
    with pytest.raises(StoreGoneError):
        line.call(lambda values: values.read("key"), until=time.monotonic() + 30)
    line.close()


def test_a_worker_leaves_a_stuck_call_behind_and_goes_on() -> None:
    worker: Worker[list[int]] = Worker("test", list)
    ticks: list[float] = []

    def tick() -> float:
        ticks.append(time.monotonic())
        return 60.0

    began = time.monotonic()
    with pytest.raises(StuckError):
        worker.run(lambda _: time.sleep(3), until=began + 1.2, meanwhile=tick)
    assert 1.2 <= time.monotonic() - began < 2.5
    assert len(ticks) == 1
    worker.post(lambda made: made.append(1))
    assert worker.run(lambda made: [*made, 2], until=time.monotonic() + 30) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        worker.run(lambda _: 1 // 0, until=time.monotonic() + 30)
    worker.close(within_secs=1)


def test_another_server_at_the_address_is_not_taken_for_ours(server: Server) -> None:
    ours = server.address
    assert find_server(ours, deadline_secs=30) == "127.0.0.1"
    assert Address.from_bytes(ours.to_bytes()) == ours
    wrong = Address(hosts=(), port=ours.port, boot_id=ours.boot_id, nonce="other")
    with pytest.raises(RendezvousTimeoutError, match="another server answers there") as caught:
        find_server(wrong, deadline_secs=3.0)
    assert caught.value.absent == (0,)


def test_what_a_host_answered_is_told_although_the_last_try_was_cut_short(server: Server) -> None:
    def relay() -> None:
        """Pass on one try, which is a connection to see whether anybody listens and one to ask; hold all others up."""
        listening.accept()[0].close()
        with listening.accept()[0] as client, socket.create_connection(("127.0.0.1", server.address.port)) as above:
            back = threading.Thread(target=pass_on, args=(above, client))
            back.start()
            pass_on(client, above)
            back.join()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(4096):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        relaying = threading.Thread(target=relay)
        relaying.start()
        port = listening.getsockname()[1]
        wrong = Address(hosts=(), port=port, boot_id=server.address.boot_id, nonce="other")
        with pytest.raises(RendezvousTimeoutError, match="another server answers there"):
            find_server(wrong, deadline_secs=3.0)
        relaying.join(timeout=30)
