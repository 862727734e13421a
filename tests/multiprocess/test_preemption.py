"""A signal to any one of several real processes: all save the same step, and every loop ends.

The loops are in `support.preempted_loops`. A process that stopped at another step than the rest would leave them in a
collective, whose timeout would end the test.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from safepoint.manager import CheckpointManager
from safepoint.manager.errors import RendezvousTimeoutError

from support.preempted_loops import DEADLINE_SECS, Ended, Plan, loop_case, outlived_case

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import PoolView


def run(pool: PoolView, plan: Plan) -> list[Ended]:
    """Run the loop and check what every run owes: one step on all processes, saved, and never a wait worth a word."""
    ended: list[Ended] = pool.run(loop_case, plan)
    assert len({one.step for one in ended}) == 1
    assert {one.latest for one in ended} == {ended[0].step}
    assert {one.reason for one in ended} != {None}
    assert max(one.longest_check_secs for one in ended) < 2.0
    assert all(one.stop_step is not None and one.stop_step <= one.step for one in ended)
    return ended


# -- one of three ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signalled", [0, 1, 2])
@pytest.mark.parametrize("slow", [0, 2, None])
def test_a_signal_to_one_of_three_saves_the_same_step_on_all(
    pool3: PoolView, tmp_path: Path, signalled: int, slow: int | None
) -> None:
    step_secs = {} if slow is None else {slow: 0.05}
    ended = run(pool3, Plan(root=str(tmp_path), signals_at={signalled: [0.3]}, step_secs=step_secs))

    assert {one.reason for one in ended} == {f"SIGTERM on process {signalled}"}
    assert [one.num_signals for one in ended] == [int(rank == signalled) for rank in range(3)]
    assert {one.stop_step for one in ended} == {ended[0].step}


def test_processes_that_run_ahead_of_each_other_stop_at_the_highest_step_plus_one(
    pool3: PoolView, tmp_path: Path
) -> None:
    """Without a collective in the step, one is many steps behind; the others are not kept, and it catches up."""
    step_secs = {0: 0.01, 1: 0.012, 2: 0.04}
    ended = run(pool3, Plan(root=str(tmp_path), signals_at={1: [0.6]}, step_secs=step_secs, collective=False))
    assert len({one.stop_step for one in ended}) == 1


def test_a_signal_before_the_first_step_stops_all_after_it(pool3: PoolView, tmp_path: Path) -> None:
    ended = run(pool3, Plan(root=str(tmp_path), signals_at={2: [-1]}, step_secs={0: 1.0}))
    assert ended[0].step == 0


# -- more than one signal -------------------------------------------------------------------------------------------


def test_signals_to_two_processes_make_one_stop(pool3: PoolView, tmp_path: Path) -> None:
    ended = run(pool3, Plan(root=str(tmp_path), signals_at={1: [0.3], 2: [0.31]}, step_secs={0: 0.02}))
    assert len({one.reason for one in ended}) == 1
    assert len({one.stop_step for one in ended}) == 1


def test_a_signal_to_every_process_makes_one_stop(pool3: PoolView, tmp_path: Path) -> None:
    run(pool3, Plan(root=str(tmp_path), signals_at={0: [0.3], 1: [0.3], 2: [0.3]}, step_secs={1: 0.01}))


def test_further_signals_to_the_same_process_change_nothing(pool3: PoolView, tmp_path: Path) -> None:
    ended = run(pool3, Plan(root=str(tmp_path), signals_at={1: [0.3, 0.32, 0.4, 0.5]}, step_secs={0: 0.3}))
    assert ended[1].num_signals >= 2


# -- during a save --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocking", [True, False])
def test_a_signal_while_saves_are_under_way_loses_none(pool3: PoolView, tmp_path: Path, *, blocking: bool) -> None:
    """Every step is saved, and a save takes longer than a step, so there is always one under way."""
    plan = Plan(root=str(tmp_path), signals_at={1: [0.5]}, save_every=1, blocking=blocking, num_elements=2_000_000)
    ended = run(pool3, plan)

    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()) == list(
        range(ended[0].step + 1)
    )
    assert not list(tmp_path.glob("*.tmp-*"))


# -- processes that die ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 2])
def test_a_process_killed_without_notice_hangs_neither_decision_nor_loop(
    pool3: PoolView, tmp_path: Path, killed: int
) -> None:
    """Steps without a collective, which would end the loops at once: nothing but the decision could hang here."""
    plan = Plan(
        root=str(tmp_path),
        signals_at={1: [0.5]},
        killed_at={killed: 0.3},
        step_secs=dict.fromkeys(range(3), 0.01),
        num_steps=400,
        collective=False,
        deadline_secs=2.0,
    )
    survivors = [rank for rank in range(3) if rank != killed]
    outcomes = pool3.start(outlived_case, plan).outcomes(timeout_secs=40)

    # Process 1 stops, and its save says who is missing. Where process 0 was killed its store is gone, so that nobody
    # else hears of the signal: the loop goes on, and ends by itself, or with the save that it would come to.
    assert outcomes[1][0] == RendezvousTimeoutError.__name__
    assert outcomes[1][1] < 0.5 + 2.0 + 2 * 3.0 + 2.0
    assert all(outcomes[rank][2] < 2.0 for rank in survivors)
    assert outcomes[3 - killed if killed else 2][0] in (RendezvousTimeoutError.__name__, "the loop ended by itself")
    pool3.replace()


@pytest.mark.slow
def test_a_process_killed_while_the_others_decide_ends_their_loops_with_an_error_that_names_the_cause(
    pool3: PoolView, tmp_path: Path
) -> None:
    """With collectives: whatever the moment, the survivors get an error of the collective, or of the save."""
    for killed_at in (0.3, 0.32, 0.45):
        plan = Plan(
            root=str(tmp_path / str(killed_at)),
            signals_at={1: [0.3]},
            killed_at={2: killed_at},
            step_secs={0: 0.01},
            deadline_secs=2.0,
        )
        outcomes = pool3.start(outlived_case, plan).outcomes(ranks=[0, 1], timeout_secs=40)
        for what, secs, longest in outcomes.values():
            assert what in ("saved", "RuntimeError", "RendezvousTimeoutError", "PeerFailedError", "DistBackendError")
            assert secs < 15
            assert longest < 6.0
        pool3.replace()


@pytest.mark.slow
def test_a_process_that_is_stopped_keeps_nobody_from_stopping(pool3: PoolView, tmp_path: Path) -> None:
    """It is process 0: the store, with all that is asked of it, stops too."""
    plan = Plan(
        root=str(tmp_path),
        signals_at={1: [0.5]},
        paused_at={0: 0.4},
        step_secs=dict.fromkeys(range(3), 0.01),
        num_steps=1500,
        collective=False,
        deadline_secs=2.0,
    )
    running = pool3.start(outlived_case, plan)
    try:
        outcomes = running.outcomes(ranks=[1, 2], timeout_secs=40)
    finally:
        pool3.resume(0)

    what, secs, _ = outcomes[1]
    assert what == RendezvousTimeoutError.__name__
    assert secs < 0.5 + 3 * 2.0 + 3.0 + 4.0
    assert all(longest < 2.0 for _, _, longest in outcomes.values())
    pool3.replace()


# -- what it costs, and what stays ----------------------------------------------------------------------------------


def cost_case(rank: int, root: str) -> tuple[float, float, int, int]:
    with CheckpointManager(root, deadline_secs=DEADLINE_SECS) as manager:
        values = manager._coordinator._meetings  # type: ignore[attr-defined]
        before = num_keys(values) if rank == 0 else 0
        for _ in range(20):
            with manager.preemption():
                pass
        with manager.preemption() as preemption:
            dist.barrier()
            busy, began = time.process_time(), time.monotonic()
            time.sleep(2.0)
            share = (time.process_time() - busy) / (time.monotonic() - began)
            checks = []
            for step in range(2000):
                at = time.perf_counter()
                preemption.should_stop(step)
                checks.append(time.perf_counter() - at)
            dist.barrier()
            after = num_keys(values) if rank == 0 else 0
            dist.barrier()
    return sorted(checks)[1000], share, before, after


def num_keys(meetings: Any) -> int:
    return int(meetings.ask(lambda values: values._store.num_keys(), deadline_secs=5))


def test_a_check_takes_microseconds_watching_next_to_nothing_and_few_keys_stay(pool3: PoolView, tmp_path: Path) -> None:
    results = pool3.run(cost_case, str(tmp_path))

    for median_secs, share, _, _ in results:
        assert median_secs < 20e-6
        assert share < 0.05
    _, _, before, after = results[0]
    assert after - before <= 21 * 6  # a few a block, none a step or a look


# -- one that does not take part ------------------------------------------------------------------------------------


def lonely_case(rank: int, root: str) -> tuple[str, bool]:
    with CheckpointManager(root, deadline_secs=2.0) as manager:
        told = "absent"
        if rank == 1:
            time.sleep(2.5)
        else:
            try:
                manager.preemption()
            except RendezvousTimeoutError as error:
                told = str(error.absent)
        put_back = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with manager.preemption() as preemption:
            assert not preemption.should_stop(0)
    return told, put_back


def test_a_process_that_watches_for_no_preemption_is_named_when_the_others_begin_and_can_come_later(
    pool3: PoolView, tmp_path: Path
) -> None:
    assert pool3.run(lonely_case, str(tmp_path)) == [("(1,)", True), ("absent", True), ("(1,)", True)]


def latecomer_case(rank: int, root: str) -> tuple[float, float]:
    """Return how long leaving the block took, and closing the manager."""
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with CheckpointManager(root, deadline_secs=DEADLINE_SECS) as manager:
            with manager.preemption() as preemption:
                assert not preemption.should_stop(0)
                if rank == 1:
                    dist.barrier()
                    signal.raise_signal(signal.SIGTERM)
                    time.sleep(0.3)
                began = time.monotonic()
            left = time.monotonic()
            if rank != 1:
                dist.barrier()
            dist.barrier()
            began_to_close = time.monotonic()
        return left - began, time.monotonic() - began_to_close
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_signal_when_the_others_have_left_the_loop_holds_nobody_up(pool3: PoolView, tmp_path: Path) -> None:
    for leaving_secs, closing_secs in pool3.run(latecomer_case, str(tmp_path)):
        assert leaving_secs < 2.5
        assert closing_secs < 4.0
