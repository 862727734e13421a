"""Meetings of real processes: they agree, or all of them learn why not, and nobody ever hangs."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from safepoint.manager.coordination import Coordinator, detect_coordinator, distributed, run_together
from safepoint.manager.errors import (
    CheckpointError,
    DisagreementError,
    PeerFailedError,
    RendezvousTimeoutError,
    StepNotFoundError,
    UnsupportedValueError,
)

from support.process_pool import CaseFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from support.process_pool import PoolView, ProcessPool

pytestmark = pytest.mark.timeout(90)

_kept: dict[str, Any] = {}
"""In a member of the pool: what one case leaves for the next."""


def open_and_keep(rank: int) -> str:
    del rank
    close_kept(0)
    _kept["coordinator"] = detect_coordinator(deadline_secs=20)
    return str(kept().description)


def kept() -> Coordinator:
    coordinator: Coordinator = _kept["coordinator"]
    return coordinator


def close_kept(rank: int) -> float:
    del rank
    began = time.monotonic()
    if "coordinator" in _kept:
        _kept.pop("coordinator").close()
    return time.monotonic() - began


def joined(payloads: Sequence[bytes]) -> bytes:
    return b"+".join(payloads)


def outcome(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call gave, or its error, and how long it took."""
    began = time.monotonic()
    try:
        result: Any = call()
    except CheckpointError as error:
        result = error
    return result, time.monotonic() - began


def meet(rank: int, name: str, deadline_secs: float) -> tuple[Any, float]:
    return outcome(lambda: kept().meet(name, b"%d" % rank, deadline_secs=deadline_secs, decide=joined))


def longest(deadline_secs: float) -> float:
    """Return what the contract allows, and what a busy machine may add to it."""
    return deadline_secs + min(1.5, 0.25 * deadline_secs) + 0.75


# Agreement.


def meet_in_all_ways(rank: int) -> list[bytes]:
    coordinator = kept()
    assert coordinator.process_index == rank
    assert coordinator.is_primary == (rank == 0)

    def one_each(payloads: Sequence[bytes]) -> list[bytes]:
        return [payload * 2 for payload in payloads]

    own = b"%d" % rank
    return [
        coordinator.meet("none", own, deadline_secs=20),
        coordinator.meet("one", own, deadline_secs=20, decide=joined),
        coordinator.meet("each", own, deadline_secs=20, decide=one_each),
        coordinator.background().meet("async", own, deadline_secs=20, decide=joined),
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_answer_of_the_primary_reaches_every_process(process_pool: ProcessPool, count: int) -> None:
    pool = process_pool.view(count)
    pool.run(open_and_keep)
    together = joined([b"%d" % rank for rank in range(count)])
    for rank, answers in enumerate(pool.run(meet_in_all_ways)):
        assert answers == [b"", together, b"%d%d" % (rank, rank), together]


def exchange_much(rank: int) -> list[bool]:
    parts = [bytes([process + 1]) * (9 << 20) for process in range(3)]
    answer = kept().meet("big", parts[rank], deadline_secs=30, decide=b"".join)
    own = kept().meet("big, each", b"", deadline_secs=30, decide=lambda _: parts)
    return [answer == b"".join(parts), own == parts[rank]]


def test_payloads_and_answers_of_many_megabytes_arrive(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    assert pool3.run(exchange_much) == [[True, True]] * 3


def count_keys(rank: int, num_meetings: int) -> list[int]:
    coordinator: Any = kept()
    counts = []
    for number in range(num_meetings):
        coordinator.meet("same", b"%d" % number, deadline_secs=20, decide=list)
        coordinator.share_blob(b"%d/%d" % (rank, number))
        coordinator.meet("shared", b"", deadline_secs=20)
        if number in {num_meetings // 2, num_meetings - 1}:
            coordinator.meet("before counting", b"", deadline_secs=20)
            counts.append(coordinator._connect().num_keys())
            coordinator.meet("after counting", b"", deadline_secs=20)
    return counts


def test_the_store_does_not_grow_over_500_meetings(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    for half, whole in pool3.run(count_keys, 250):
        assert whole < half + 10 < 400


# Errors of the meeting's subject.


def disagree_about_a_step(rank: int) -> tuple[Any, float]:
    def same_step(payloads: Sequence[bytes]) -> bytes:
        if len(set(payloads)) > 1:
            raise DisagreementError("two steps", brought=(("step 5", (0,)), ("step 6", (1,))), step=5, hint="agree")
        return b""

    return outcome(lambda: kept().meet("save", b"%d" % (5 + rank), deadline_secs=30, decide=same_step))


def test_processes_that_bring_different_steps_all_get_the_same_error_at_once(pool2: PoolView) -> None:
    """OpenTau#396."""
    pool2.run(open_and_keep)
    (first, secs), (second, _) = pool2.run(disagree_about_a_step)
    assert type(first) is type(second) is DisagreementError
    assert first.to_json() == second.to_json()
    assert first.brought == second.brought == (("step 5", (0,)), ("step 6", (1,)))
    assert secs < 5
    assert [answer for answer, _ in pool2.run(meet, "next", 20)] == [b"0+1"] * 2


def meet_with_a_bug_on_the_primary(rank: int) -> tuple[Any, float]:
    def decide(payloads: Sequence[bytes]) -> bytes:
        raise ZeroDivisionError(f"{len(payloads)} payloads")

    try:
        return outcome(lambda: kept().meet("save", b"%d" % rank, deadline_secs=30, decide=decide))
    except ZeroDivisionError as error:
        return error, 0


def test_a_bug_of_the_primary_is_raised_there_and_told_to_the_others(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    errors = [error for error, _ in pool3.run(meet_with_a_bug_on_the_primary)]
    assert isinstance(errors[0], ZeroDivisionError)
    for error in errors[1:]:
        assert type(error) is PeerFailedError
        assert error.process_index == 0
        assert "ZeroDivisionError: 3 payloads" in str(error)


def meet_under_different_names(rank: int) -> tuple[Any, float]:
    return meet(rank, "restore" if rank == 1 else "save", 30)


def test_names_that_disagree_are_told_with_who_brought_them(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    outcomes = pool3.run(meet_under_different_names)
    assert len({str(error) for error, _ in outcomes}) == 1
    for error, secs in outcomes:
        assert type(error) is DisagreementError
        assert error.brought == (("save", (0, 2)), ("restore", (1,)))
        assert secs < 5
    assert [answer for answer, _ in pool3.run(meet, "next", 20)] == [b"0+1+2"] * 3


def work_together(rank: int, failing: dict[int, str]) -> tuple[str, Any]:
    def work() -> bytes:
        if rank in failing:
            if failing[rank] == "ours":
                raise StepNotFoundError("no such step", step=7, available=(1, 2))
            raise OSError("disk on fire")
        return b"%d" % rank

    try:
        return "returned", run_together(kept(), "work", 20, work, joined)
    except (CheckpointError, OSError) as error:
        return type(error).__name__, error


def test_a_failure_of_some_is_everybodys(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    assert [result for _, result in pool3.run(work_together, {})] == [b"0+1+2"] * 3

    (_, first), (own, _), (_, third) = pool3.run(work_together, {1: "ours"})
    assert own == "StepNotFoundError"
    assert first.to_json() == third.to_json()
    assert type(first) is PeerFailedError
    assert (first.process_index, first.step) == (1, 7)
    assert "StepNotFoundError: no such step" in str(first)

    kinds = pool3.run(work_together, {1: "foreign", 2: "ours"})
    assert [kind for kind, _ in kinds] == ["PeerFailedError", "OSError", "StepNotFoundError"]
    assert kinds[0][1].process_index == 1
    assert "disk on fire" in str(kinds[0][1])
    assert [kind for kind, _ in pool3.run(work_together, dict.fromkeys(range(3), "ours"))] == ["StepNotFoundError"] * 3
    assert [kind for kind, _ in pool3.run(work_together, {})] == ["returned"] * 3


# Absence.


def test_a_save_called_by_one_of_three_names_the_other_two_and_later_all_three_meet(pool3: PoolView) -> None:
    """Lightning#2700."""
    pool3.run(open_and_keep)
    for caller, others in ((1, (0, 2)), (0, (1, 2))):
        ((error, secs),) = pool3.run(meet, "save", 3, ranks=[caller])
        assert type(error) is RendezvousTimeoutError
        assert error.absent == others
        assert error.deadline_secs == 3
        assert 3 <= secs < 5
        assert [answer for answer, _ in pool3.run(meet, "save", 20)] == [b"0+1+2"] * 3


@pytest.mark.parametrize("absent", [0, 1, 2])
@pytest.mark.parametrize("deadline_secs", [0.5, 2])
def test_everybody_who_came_gets_the_same_error_at_the_deadline(
    pool3: PoolView, absent: int, deadline_secs: float
) -> None:
    pool3.run(open_and_keep)
    came = [rank for rank in range(3) if rank != absent]
    outcomes = pool3.run(meet, "save", deadline_secs, ranks=came)
    assert len({str(error) for error, _ in outcomes}) == 1
    for error, secs in outcomes:
        assert type(error) is RendezvousTimeoutError
        assert error.absent == (absent,)
        assert f"process {absent} did not come" in str(error)
        assert deadline_secs <= secs < longest(deadline_secs)
    assert [answer for answer, _ in pool3.run(meet, "save", 20)] == [b"0+1+2"] * 3


def save_every_ten_steps(rank: int) -> list[str]:
    """Rank 1 is late for the first save; nobody stops at an error, and no training collective holds them together."""

    def same_step(payloads: Sequence[bytes]) -> bytes:
        if len(set(payloads)) > 1:
            raise DisagreementError(f"steps {payloads!r}")
        return payloads[0]

    told = []
    if rank == 1:
        time.sleep(1.5)
    for step in (10, 20, 30, 40):
        result, _ = outcome(lambda: kept().meet("save", b"%d" % step, deadline_secs=1, decide=same_step))  # noqa: B023
        told.append(result.decode() if isinstance(result, bytes) else type(result).__name__)
        time.sleep(0.2)
    return told


def test_a_process_that_missed_a_meeting_catches_up(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    first, late, third = pool3.run(save_every_ten_steps)
    assert first == third
    assert first == ["RendezvousTimeoutError", "20", "30", "40"]
    assert late == ["DisagreementError", "20", "30", "40"]


def test_a_process_that_arrives_after_a_failed_meeting_waits_no_longer_than_its_own_deadline(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    pool3.run(meet, "save", 0.5, ranks=[0, 2])
    ((error, secs),) = pool3.run(meet, "save", 1, ranks=[1])
    assert error.absent == (0, 2)
    assert secs < longest(1)
    assert [answer for answer, _ in pool3.run(meet, "save", 20)] == [b"0+1+2"] * 3


def open_alone(rank: int, deadline_secs: float) -> tuple[Any, float]:
    del rank
    return outcome(lambda: detect_coordinator(deadline_secs=deadline_secs))


def test_opening_names_the_processes_that_did_not_come_and_works_later(pool3: PoolView) -> None:
    for came, absent in (([1], (0, 2)), ([0, 2], (1,))):
        for error, secs in pool3.run(open_alone, 3.0, ranks=came):
            assert type(error) is RendezvousTimeoutError
            assert error.absent == absent
            assert secs < longest(3)
    assert pool3.run(open_and_keep) == ["torch.distributed, 3 processes"] * 3
    assert [answer for answer, _ in pool3.run(meet, "save", 20)] == [b"0+1+2"] * 3


# Processes that die, are interrupted, or are stopped.


def exit_in_a_meeting(rank: int, leaver: int) -> tuple[Any, float]:
    if rank == leaver:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))
    return meet(rank, "save", 20)


@pytest.mark.parametrize("leaver", [0, 2])
def test_a_process_that_exits_within_a_meeting_is_named_at_once(pool3: PoolView, leaver: int) -> None:
    pool3.run(open_and_keep)
    outcomes = pool3.start(exit_in_a_meeting, leaver, ranks=[0, 2]).outcomes()
    assert isinstance(outcomes.pop(leaver), CaseFailedError)
    ((error, secs),) = outcomes.values()
    if leaver == 0 and isinstance(error, RendezvousTimeoutError):  # its store went with it, before its word was read
        assert error.absent == (0,)
        assert "Process 0 left" in str(error)
    else:
        assert type(error) is PeerFailedError
        assert error.process_index == leaver
        assert "SystemExit: 3" in str(error)
    assert secs < 3


def meet_after_death(rank: int) -> list[tuple[Any, float]]:
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return [meet(rank, "save", 1), meet(rank, "save", 1)]


def test_a_process_that_is_gone_is_named_at_every_deadline(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    outcomes = pool3.start(meet_after_death).outcomes(ranks=[0, 1])
    for error, secs in [*outcomes[0], *outcomes[1]]:
        assert type(error) is RendezvousTimeoutError
        assert error.absent == (2,)
        assert secs < longest(1)


def test_a_primary_that_is_killed_is_named_at_once(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    run = pool3.start(meet, "save", 60, ranks=[1, 2])
    time.sleep(1)
    pool3.kill(0)
    killed = time.monotonic()
    for error, _ in run.outcomes().values():
        assert type(error) is RendezvousTimeoutError
        assert error.absent == (0,)
        assert "Process 0 left" in str(error)
    assert time.monotonic() - killed < 3


def test_a_primary_that_is_stopped_is_named_at_the_deadline_and_meets_again_later(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    pool3.pause(0)
    ((error, secs),) = pool3.run(meet, "save", 3, ranks=[1])
    assert type(error) is RendezvousTimeoutError
    assert error.absent == (0, 2)
    assert secs < 5
    pool3.resume(0)
    assert [answer for answer, _ in pool3.run(meet, "save", 20)] == [b"0+1+2"] * 3


def stop_while_deciding(rank: int) -> tuple[Any, float]:
    def decide(payloads: Sequence[bytes]) -> bytes:
        os.kill(os.getpid(), signal.SIGSTOP)
        return joined(payloads)

    return outcome(lambda: kept().meet("save", b"old %d" % rank, deadline_secs=2, decide=decide))


def test_a_primary_that_wakes_up_after_the_deadline_mixes_no_answers(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    run = pool3.start(stop_while_deciding)
    for error, secs in run.outcomes(ranks=[1, 2]).values():
        assert type(error) is RendezvousTimeoutError
        assert 0 in error.absent
        assert secs < 4
    late = pool3.start(meet, "new", 20, ranks=[1, 2])
    time.sleep(0.5)
    pool3.resume(0)
    ((error, _),) = run.outcomes(ranks=[0]).values()
    assert type(error) is RendezvousTimeoutError
    assert error.absent == (0,)
    assert pool3.run(meet, "new", 20, ranks=[0])[0][0] == b"0+1+2"
    assert [answer for answer, _ in late.results()] == [b"0+1+2"] * 2


def test_a_peer_that_wakes_up_after_the_deadline_meets_again_later(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    run = pool3.start(meet, "save", 2, ranks=[2])
    time.sleep(0.5)
    pool3.pause(2)
    others = pool3.start(meet, "save", 1, ranks=[0, 1])
    assert [error.absent for error, _ in others.results()] == [(2,), (2,)]
    time.sleep(1.5)
    pool3.resume(2)
    assert isinstance(run.results()[0][0], RendezvousTimeoutError)
    assert [answer for answer, _ in pool3.run(meet, "save", 20)] == [b"0+1+2"] * 3


# Waiting.


def save_slowly_beside_an_impatient_group(rank: int) -> tuple[Any, float]:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    if rank == 1:
        time.sleep(6)
    result = meet(rank, "save", 30)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 2
    return result


def test_a_save_may_take_longer_than_the_training_groups_timeout(pool2: PoolView) -> None:
    """Automodel#3108."""
    pool2.run(open_and_keep)
    outcomes = pool2.run(save_slowly_beside_an_impatient_group)
    assert [answer for answer, _ in outcomes] == [b"0+1"] * 2
    assert outcomes[0][1] > 5


def wait_and_log(rank: int) -> list[str]:
    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    told: list[str] = []
    handler = Collect()
    logging.getLogger("safepoint.coordination").addHandler(handler)
    usual, distributed.WARN_EVERY_SECS = distributed.WARN_EVERY_SECS, 0.4
    try:
        if rank == 2:
            time.sleep(1)
        meet(rank, "save", 20)
    finally:
        distributed.WARN_EVERY_SECS = usual
        logging.getLogger("safepoint.coordination").removeHandler(handler)
    return told


def test_a_long_wait_is_logged_with_who_is_missing(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    first, _, late = pool3.run(wait_and_log)
    assert late == []
    assert len(first) == 2
    assert all("Meeting 'save' has waited" in text and "process 2 (deadline 20 s)" in text for text in first)


def meet_on_two_threads(rank: int) -> tuple[list[bytes], list[bytes]]:
    behind = kept().background()
    answers: list[bytes] = []

    def save() -> None:
        for number in range(50):
            answers.append(behind.meet("same", b"b%d" % number, deadline_secs=20, decide=joined))
            time.sleep(0.001 * (rank == 1))

    thread = threading.Thread(target=save)
    thread.start()
    own = [kept().meet("same", b"f%d" % number, deadline_secs=20, decide=joined) for number in range(50)]
    thread.join()
    return own, answers


def test_meetings_of_the_background_do_not_mix_with_those_of_the_foreground(pool2: PoolView) -> None:
    pool2.run(open_and_keep)
    for own, behind in pool2.run(meet_on_two_threads):
        assert own == [b"f%d+f%d" % (number, number) for number in range(50)]
        assert behind == [b"b%d+b%d" % (number, number) for number in range(50)]


# Blobs and transfers.


def share_and_fetch(rank: int) -> tuple[str, bytes, Any, float]:
    same = kept().share_blob(b"same" * (3 << 20))
    digests = kept().meet("digests", kept().share_blob(b"%d" % rank).encode(), deadline_secs=20, decide=joined)
    fetched = b"".join(kept().fetch_blob(digest, deadline_secs=5) for digest in digests.decode().split("+"))
    missing, secs = outcome(lambda: kept().fetch_blob("0" * 32, deadline_secs=0.5))
    assert kept().fetch_blob(same, deadline_secs=5) == b"same" * (3 << 20)
    return same, fetched, missing, secs


def share_with_a_stopped_primary(rank: int, signals: str) -> tuple[Any, float] | None:
    if rank == 0:
        return None
    while not Path(signals, "go").exists():
        time.sleep(0.01)
    return outcome(lambda: kept().share_blob(b"mine", deadline_secs=1.0))


def test_sharing_with_a_stopped_primary_ends_at_the_deadline(pool2: PoolView, tmp_path: Path) -> None:
    pool2.run(open_and_keep)
    run = pool2.start(share_with_a_stopped_primary, str(tmp_path))
    run.outcomes(ranks=[0])
    pool2.pause(0)
    (tmp_path / "go").touch()
    error, secs = run.outcomes(ranks=[1])[1]
    pool2.resume(0)
    assert isinstance(error, RendezvousTimeoutError)
    assert error.absent == (0,)
    assert secs < 2.5


def share_and_fetch_behind(rank: int) -> bytes:
    digest = kept().share_blob(b"ours") if rank == 0 else ""
    told = kept().background().meet("shared", digest.encode(), deadline_secs=20, decide=lambda brought: brought[0])
    return kept().background().fetch_blob(told.decode(), deadline_secs=5)


def test_blobs_are_found_by_digest_and_missing_ones_at_the_deadline(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    results = pool3.run(share_and_fetch)
    assert len({same for same, *_ in results}) == 1
    for _, fetched, missing, secs in results:
        assert fetched == b"012"
        assert type(missing) is RendezvousTimeoutError
        assert secs < longest(0.5)
    assert pool3.run(share_and_fetch_behind) == [b"ours"] * 3


def send_around(rank: int, num_bytes: int) -> bool:
    coordinator = kept()
    transport = coordinator.open_transport(10)
    assert coordinator.open_transport(10) is transport is coordinator.transport()
    after, before = (rank + 1) % 3, (rank - 1) % 3
    received = torch.zeros(num_bytes, dtype=torch.uint8)
    if rank == 0:
        transport.send(torch.full((num_bytes,), rank, dtype=torch.uint8), after, 10)
        transport.receive(received, before, 10)
    else:
        transport.receive(received, before, 10)
        transport.send(torch.full((num_bytes,), rank, dtype=torch.uint8), after, 10)
    return bool((received == before).all())


def receive_in_vain(rank: int) -> tuple[Any, float]:
    if rank == 2:
        kept().open_transport(10)
        return None, 0
    buffer = torch.zeros(8, dtype=torch.uint8)
    transport = kept().open_transport(10)
    return outcome(lambda: transport.receive(buffer, 2, 1))


def receive_from_one_who_closes(rank: int) -> tuple[Any, float]:
    transport = kept().open_transport(10)
    if rank == 2:
        time.sleep(0.5)
        transport.close()
        return None, 0
    return outcome(lambda: transport.receive(torch.zeros(8, dtype=torch.uint8), 2, 20))


def test_transfers_end_at_their_deadline_name_the_other_side_and_work_again(pool3: PoolView) -> None:
    pool3.run(open_and_keep)
    assert pool3.run(send_around, 8 << 20) == [True] * 3
    for error, secs in pool3.run(receive_in_vain)[:2]:
        assert type(error) is RendezvousTimeoutError
        assert error.absent == (2,)
        assert secs < 2.5
    assert pool3.run(send_around, 1000) == [True] * 3
    for error, secs in pool3.run(receive_from_one_who_closes)[:2]:
        assert type(error) is PeerFailedError
        assert error.process_index == 2
        assert secs < 5
    assert pool3.run(send_around, 1) == [True] * 3


# Opening and closing.


def open_at_a_place(rank: int, port: int) -> list[bytes]:
    first = detect_coordinator(store=f"127.0.0.1:{port}", deadline_secs=20)
    second = detect_coordinator(store=f"127.0.0.1:{port}", deadline_secs=20)
    answers = [each.meet("save", b"%d" % rank, deadline_secs=20, decide=joined) for each in (second, first, second)]
    first.close()
    second.close()
    return answers


def free_port(rank: int) -> int:
    del rank
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(store.port)


def test_processes_can_be_told_where_to_meet(pool3: PoolView) -> None:
    (port,) = pool3.run(free_port, ranks=[0])
    assert pool3.run(open_at_a_place, port) == [[b"0+1+2"] * 3] * 3


def open_and_close_often(rank: int) -> tuple[int, int]:
    def open_and_close() -> int:
        with detect_coordinator(deadline_secs=20) as coordinator:
            coordinator.background().meet("save", b"%d" % rank, deadline_secs=20)
            coordinator.open_transport(10)
        coordinator.close()
        until = time.monotonic() + 5
        while (left := [each.name for each in threading.enumerate() if each.name.startswith("safepoint")]) and (
            time.monotonic() < until
        ):
            time.sleep(0.01)
        return len(left)

    return open_and_close(), [open_and_close() for _ in range(5)][-1]


def test_closing_leaves_no_thread_behind_and_is_quick(pool3: PoolView) -> None:
    pool3.run(close_kept)
    assert pool3.run(open_and_close_often) == [(0, 0)] * 3
    pool3.run(open_and_keep)
    pool3.run(meet, "save", 20)
    assert max(pool3.run(close_kept)) < 2
    pool3.run(open_and_keep)
    pool3.pause(0)
    assert max(pool3.run(close_kept, ranks=[1, 2])) < 3
    pool3.resume(0)


LEAVES_WITHOUT_CLOSING = """
import sys
from safepoint.manager.coordination import detect_coordinator
coordinator = detect_coordinator(store=sys.argv[1], deadline_secs=30)
for number in range(20):
    coordinator.meet("save", b"x", deadline_secs=30, decide=lambda brought: brought[1] * (1 << 20))
"""


def test_processes_that_exit_without_closing_do_not_cut_off_the_last_answer(pool2: PoolView) -> None:
    (port,) = pool2.run(free_port, ranks=[0])
    command = [sys.executable, "-c", LEAVES_WITHOUT_CLOSING, f"127.0.0.1:{port}"]
    common = {**os.environ, "WORLD_SIZE": "2", "RES_OPTIONS": "timeout:1 attempts:1"}
    with (
        subprocess.Popen(command, env={**common, "RANK": "0"}, stderr=subprocess.PIPE) as primary,
        subprocess.Popen(command, env={**common, "RANK": "1"}, stderr=subprocess.PIPE) as peer,
    ):
        try:
            told = [process.communicate(timeout=60)[1].decode()[-4000:] for process in (primary, peer)]
        finally:
            primary.kill()
            peer.kill()
    assert (primary.returncode, peer.returncode) == (0, 0), told


def meet_after_the_primary_closed(rank: int) -> tuple[Any, float]:
    if rank == 0:
        close_kept(rank)
        return None, 0
    time.sleep(0.5)
    return meet(rank, "save", 20)


def test_a_primary_that_closed_is_named_at_once(pool2: PoolView) -> None:
    pool2.run(open_and_keep)
    error, secs = pool2.run(meet_after_the_primary_closed)[1]
    assert type(error) is RendezvousTimeoutError
    assert error.absent == (0,)
    assert secs < 5


# The pool itself.


def fail(rank: int) -> None:
    if rank == 1:
        raise UnsupportedValueError("cannot", leaf="a.b")


def all_reduce(rank: int) -> float:
    total = torch.full((1,), float(rank + 1))
    dist.all_reduce(total)
    return total.item()


def test_the_pool_raises_what_a_case_raised_and_goes_on(pool2: PoolView, pool4: PoolView) -> None:
    with pytest.raises(UnsupportedValueError, match="cannot") as caught:
        pool2.run(fail)
    assert caught.value.leaf == "a.b"
    assert "in fail" in str(caught.value.__cause__)
    assert pool2.run(all_reduce) == [3.0] * 2
    assert pool4.run(all_reduce) == [10.0] * 4
    pool4.run(open_and_keep)
    pool4.kill(3)
    assert pool4.run(all_reduce) == [10.0] * 4
