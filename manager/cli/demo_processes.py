"""Starts the demonstration's training processes, hears what they tell, and sees how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from safepoint.manager.cli.demo_plan import Event, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

__all__ = ["DemoError", "Run", "run_training"]

PEERS_END_SECS = 90.0  # more than the deadline of the manager in them


class DemoError(Exception):
    """A training process of the demonstration did not end as it should have."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run told.

    Attributes:
        losses: by step.
        digests: of model and optimizer, by step.
        restored_step: the step it went on from; None from the start.
        description: what it ran on.
        mode: that of its saves; "" without one.
        was_killed: whether all its processes ended by SIGKILL.
    """

    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    restored_step: int | None = None
    description: str = ""
    mode: str = ""
    was_killed: bool = False

    def with_event(self, event: Event) -> Run:
        """Return the run with one more event."""
        if event.kind == "started":
            return replace(self, restored_step=event.step, description=event.text)
        if event.kind == "trained" and event.step is not None and event.loss is not None:
            return replace(self, losses={**self.losses, event.step: event.loss})
        if event.kind == "digest" and event.step is not None:
            return replace(self, digests={**self.digests, event.step: event.text})
        return replace(self, mode=event.text) if event.kind == "saved" else self


def run_training(plan: Plan, log: Path, on_event: Callable[[Event], None]) -> Run:
    """Run all processes of a plan to their end and return what they told.

    Raises:
        DemoError: they ended otherwise than planned; carries the end of the log.
    """
    run = Run()
    with ExitStack() as stack:
        processes, events = _start(plan, log, stack)
        for event in events:
            run = run.with_event(event)
            on_event(event)
        statuses = _wait(processes)
    wanted = 0 if plan.kill_in_step is None else -signal.SIGKILL
    if any(status != wanted for status in statuses):
        told = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise DemoError(
            f"the training processes ended with {statuses} where {wanted} was expected. Their log ends:\n{told}"
        )
    return replace(run, was_killed=plan.kill_in_step is not None)


def _start(plan: Plan, log: Path, stack: ExitStack) -> tuple[list[subprocess.Popen[bytes]], Iterator[Event]]:
    reading, writing = os.pipe()
    lines = stack.enter_context(os.fdopen(reading))
    output = stack.enter_context(log.open("wb"))
    port = _free_port()
    processes: list[subprocess.Popen[bytes]] = []
    stack.callback(_kill, processes)
    for index in range(plan.process_count):
        own = replace(plan, process_index=index, port=port, events=writing)
        processes.append(
            subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-P", "-m", "safepoint.manager.cli.demo_training", own.to_json()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writing,) if index == 0 else (),
                env={"PJRT_DEVICE": "CPU", **os.environ},
            )
        )
    os.close(writing)
    return processes, (Event.from_line(line) for line in lines)


def _wait(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    deadline = time.monotonic() + PEERS_END_SECS
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [process.returncode for process in processes]


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
