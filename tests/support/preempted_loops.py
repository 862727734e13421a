"""Loops that are preempted: a plan of who is signalled and killed when, and what became of each process.

Each step of a loop is a gloo all_reduce, so that processes are held by each other as in training, and one that stopped
at another step than the rest would leave them waiting.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from safepoint.manager import CheckpointManager
from safepoint.manager.errors import CheckpointError

__all__ = ["DEADLINE_SECS", "Ended", "Plan", "loop_case", "outlived_case"]

DEADLINE_SECS = 20.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run of the loop, the same on all processes.

    Attributes:
        signals_at: by rank, after how many seconds of the loop signals come; negative: before the manager is asked.
        step_secs: by rank, how long its part of a step takes.
        save_every: which steps are saved anyway.
        blocking: whether those saves block.
        num_elements: size of the state.
        num_steps: of the loop, if nothing stops it.
        collective: whether each step is one.
        killed_at: by rank, when it dies without notice.
        paused_at: by rank, when it is stopped (SIGSTOP), until the test lets it go on.
        deadline_secs: of the decision.
    """

    root: str
    signals_at: dict[int, list[float]] = field(default_factory=dict)
    step_secs: dict[int, float] = field(default_factory=dict)
    save_every: int = 1_000_000
    blocking: bool = True
    num_elements: int = 1000
    num_steps: int = 3000
    collective: bool = True
    killed_at: dict[int, float] = field(default_factory=dict)
    paused_at: dict[int, float] = field(default_factory=dict)
    deadline_secs: float = DEADLINE_SECS


@dataclass(frozen=True, kw_only=True)
class Ended:
    step: int
    stop_step: int | None
    reason: str | None
    latest: int | None
    num_signals: int
    longest_check_secs: float
    median_check_secs: float
    held_secs: float
    secs: float
    """From the first signal here, or the start, to the end of the loop."""


def signals_itself(plan: Plan, rank: int) -> list[threading.Timer]:
    timers = [
        threading.Timer(secs, os.kill, (os.getpid(), signal.SIGTERM))
        for secs in plan.signals_at.get(rank, [])
        if secs >= 0
    ]
    for number, when in ((signal.SIGKILL, plan.killed_at), (signal.SIGSTOP, plan.paused_at)):
        if rank in when:
            timers.append(threading.Timer(when[rank], os.kill, (os.getpid(), number)))
    for timer in timers:
        timer.start()
    return timers


def loop_case(rank: int, plan: Plan) -> Ended:
    came: list[float] = []
    former = signal.signal(signal.SIGTERM, lambda *_: came.append(time.monotonic()))
    timers: list[threading.Timer] = []
    checks: list[float] = []
    started = time.monotonic()
    state = {"x": torch.zeros(plan.num_elements), "tokens": 0}
    try:
        with (
            CheckpointManager(plan.root, save_every=plan.save_every, deadline_secs=DEADLINE_SECS) as manager,
            manager.preemption(deadline_secs=plan.deadline_secs) as preemption,
        ):
            for secs in plan.signals_at.get(rank, []):
                if secs < 0:
                    os.kill(os.getpid(), signal.SIGTERM)
            timers += signals_itself(plan, rank)
            for step in range(plan.num_steps):
                train(plan, rank, step)
                state["tokens"] = step
                began = time.perf_counter()
                stop = preemption.should_stop(step)
                checks.append(time.perf_counter() - began)
                manager.save(step, state, force=stop, blocking=plan.blocking)
                if stop:
                    break
            ended = time.monotonic()
            manager.wait()
            return Ended(
                step=step,
                stop_step=preemption.stop_step,
                reason=preemption.reason,
                latest=manager.latest_step(),
                num_signals=len(came),
                longest_check_secs=max(checks),
                median_check_secs=sorted(checks)[len(checks) // 2],
                held_secs=preemption._agreement.held_secs,  # type: ignore[attr-defined]  # here it is the store's
                secs=ended - (came[0] if came else started),
            )
    finally:
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGTERM, former)


def train(plan: Plan, rank: int, step: int) -> None:
    time.sleep(plan.step_secs.get(rank, 0.0))
    if plan.collective:
        told = torch.tensor([float(step)])
        dist.all_reduce(told)
        assert told.item() == step * dist.get_world_size(), "the processes are not in the same step"


def outlived_case(rank: int, plan: Plan) -> tuple[str, float, float]:
    """Return the error that ended the loop, or the save after it, when it came, and the longest check."""
    came: list[float] = []
    former = signal.signal(signal.SIGTERM, lambda *_: came.append(time.monotonic()))
    longest = 0.0
    timers: list[threading.Timer] = []
    started = time.monotonic()
    try:
        manager = CheckpointManager(plan.root, save_every=plan.save_every, deadline_secs=3.0)
        with manager, manager.preemption(deadline_secs=plan.deadline_secs) as preemption:
            timers += signals_itself(plan, rank)
            started = time.monotonic()
            for step in range(plan.num_steps):
                train(plan, rank, step)
                began = time.perf_counter()
                stop = preemption.should_stop(step)
                longest = max(longest, time.perf_counter() - began)
                manager.save(step, {"x": 1}, force=stop)
                if stop:
                    return "saved", time.monotonic() - started, longest
    except (CheckpointError, RuntimeError) as error:
        dist.destroy_process_group()  # as if this process had ended: the others' collectives fail at once
        return type(error).__name__, time.monotonic() - started, longest
    finally:
        for timer in timers:
            timer.join()
        signal.signal(signal.SIGTERM, former)
    return "the loop ended by itself", time.monotonic() - started, longest
