"""Runs one point of the fault sweep: two forked processes, one of which meets a fault at its k-th call, then the check.

Everything that runs safepoint is a fork of a process that only imported it, so a point costs tenths of a second and
the process that judges has no threads. What is judged stands in `judge`.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from safepoint.manager.coordination import distributed

from support.fault_scenarios import SCENARIOS, Report, check_aftermath, operate, prepare
from support.fault_trigger import Trigger, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["Point", "Verdict", "Workshop"]

COUNT = 2
DEADLINE_SECS = 2.0
WITHOUT_FAULT_SECS = 20.0
"""Where nothing is to fail, nobody need hurry."""
SLACK_SECS = 4.0
"""How much longer than its deadline a phase may take: the agreed grace, closing (2 s), and a busy machine."""

HUNG_SECS = 30.0

NO_LOOKUPS = "timeout:1 attempts:0"
"""For the C library: torch looks up the name of whatever it connects to, for longer than these deadlines where no name
server answers."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A fault: its kind, on which process, at which of its calls, in which scenario."""

    scenario: str
    kind: str
    process: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of a point.

    Attributes:
        fired: the call that met the fault; "" when there were fewer calls.
        problems: what should not have happened.
        found: the version that the next run restored.
        reports: of the processes that lived to make one.
    """

    point: Point
    fired: str
    problems: tuple[str, ...]
    found: int | None
    reports: dict[int, dict[str, Any]]


class Workshop:
    """A directory in which points are run, with a prepared root for each scenario.

    Args:
        directory: empty.
        count: how many processes take part.
    """

    def __init__(self, directory: Path, *, count: int = COUNT) -> None:
        self._directory = directory
        self._count = count
        self._calls: dict[str, list[list[str]]] = {}
        self._points = 0

    def count_calls(self, scenario: str) -> list[list[str]]:
        """Return the calls that each process makes without a fault."""
        if scenario not in self._calls:
            verdict = self.run(Point(scenario=scenario, kind="EIO", process=0, at=0))
            assert not verdict.problems, verdict
            self._calls[scenario] = [verdict.reports[process]["calls"] for process in range(self._count)]
        return self._calls[scenario]

    def run(self, point: Point) -> Verdict:
        """Run one point."""
        while True:
            verdict = self._run(point)
            # Another program may take the port between its choice and its use.
            if not any("EADDRINUSE" in problem for problem in verdict.problems):
                return verdict

    def _run(self, point: Point) -> Verdict:
        self._points += 1
        work = self._directory / f"point{self._points}"
        work.mkdir()
        root = work / "root"
        copy_tree(self._template(point.scenario), root)
        scenario = SCENARIOS[point.scenario]
        store = f"127.0.0.1:{free_port()}"

        def process(rank: int) -> None:
            trigger = Trigger(kind=point.kind, at=None, stall_secs=1.5 * DEADLINE_SECS)
            trigger.process = rank
            trigger.on_fire = (work / "fired").write_text
            if rank == point.process:
                trigger.at = point.at
            install(trigger)
            deadline_secs = DEADLINE_SECS if point.at else WITHOUT_FAULT_SECS
            report = operate(scenario, str(root), rank, self._count, store, deadline_secs)
            report.calls = trigger.log
            (work / f"report{rank}").write_text(json.dumps(asdict(report)))

        problems = run_forked(
            process,
            range(self._count),
            work,
            count=self._count,
            stopped=point.process if point.kind == "stop" else None,
        )
        reports = {
            rank: json.loads((work / f"report{rank}").read_text())
            for rank in range(self._count)
            if (work / f"report{rank}").exists()
        }
        fired = (work / "fired").read_text() if (work / "fired").exists() else ""

        def check(_rank: int) -> None:
            os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
            (work / "found").write_text(str(check_aftermath(scenario, str(root), self._count)))

        after = run_forked(check, [0], work)
        problems += [f"the next run: {problem}" for problem in after]
        found = int((work / "found").read_text()) if (work / "found").exists() else None
        problems += judge(
            point, fired, found, self._count, {rank: Report(**report) for rank, report in reports.items()}
        )
        if not problems:
            shutil.rmtree(work)
        return Verdict(point=point, fired=fired, problems=tuple(problems), found=found, reports=reports)

    def _template(self, name: str) -> Path:
        scenario = SCENARIOS[name]
        template = self._directory / f"template-{scenario.mode}-{scenario.unchanged}"
        if not template.exists():
            partial = template.with_suffix(".partial")
            store = f"127.0.0.1:{free_port()}"
            problems = run_forked(
                lambda rank: prepare(scenario, str(partial), rank, self._count, store),
                range(self._count),
                self._directory,
                count=self._count,
            )
            assert not problems, problems
            partial.rename(template)
        return template


def judge(point: Point, fired: str, found: int | None, count: int, reports: dict[int, Report]) -> list[str]:
    """Return what should not have come of a point."""
    saves = SCENARIOS[point.scenario].saves
    new = None if saves is None else saves[1]
    problems = []
    if found is not None and found not in (2, new):
        problems.append(f"version {found} was restored")
    for rank, report in reports.items():
        outcome = None if report.error is None else report.error[2]
        committed = new is not None and found == new
        if report.did == "saved" and not committed:
            problems.append(f"process {rank} believed that the step was saved")
        if (outcome == "committed" and not committed) or (outcome == "not_committed" and committed and new is not None):
            problems.append(f"process {rank} was told {outcome}, and the version found is {found}: {report.error}")
        late = {phase: secs for phase, secs in report.secs.items() if secs > allowed_secs(point, rank)}
        if late:
            problems.append(f"process {rank} took {late}")
        if rank != point.process and report.error is not None and not names(report, point.process):
            problems.append(f"process {rank} did not name process {point.process}: {report.error}")
        if not fired and report.error is not None:
            problems.append(f"process {rank} failed without a fault: {report.error}")
    left = {point.process} if point.kind in ("kill", "exit") and fired else set()
    silent = set(range(count)) - set(reports) - left
    return [*problems, *(f"process {rank} made no report" for rank in sorted(silent))]


def allowed_secs(point: Point, rank: int) -> float:
    """Return how long a phase may take: one deadline, and what the fault itself takes on its own process."""
    if not point.at:
        return WITHOUT_FAULT_SECS
    own = rank == point.process
    if own and point.kind == "stop":
        return HUNG_SECS
    stall = 1.5 * DEADLINE_SECS if own and point.kind == "stall" else 0.0
    # A restore that falls back meets again for the older step; a manager that opens meets twice before it is open.
    return 2 * DEADLINE_SECS + stall + SLACK_SECS


def names(report: Report, process: int) -> bool:
    """Say whether the error names the process, or is one that no process is to blame for."""
    assert report.error is not None
    kind, text, _, named = report.error
    return process in named or f"rocess {process}" in text or kind in ("StorageError", "AttemptLostError")


def copy_tree(source: Path, target: Path) -> None:
    """Copy a root; a file that has two names there has two here."""
    made: dict[int, str] = {}

    def copy(old: str, new: str) -> None:
        inode = os.stat(old).st_ino
        if inode in made:
            os.link(made[inode], new)
        else:
            shutil.copy2(old, new)
            made[inode] = new

    shutil.copytree(source, target, symlinks=True, copy_function=copy)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def run_forked(
    work: Callable[[int], None],
    ranks: Iterable[int],
    directory: Path,
    *,
    count: int = COUNT,
    stopped: int | None = None,
) -> list[str]:
    """Run `work` in a fork for each rank and return what went wrong; a stopped one goes on when all others ended."""
    children = {_fork(work, rank, directory, count): rank for rank in ranks}
    until = time.monotonic() + HUNG_SECS
    problems: list[str] = []
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in children and not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            rank = children[pid]
            if status != 0:
                text = (directory / f"traceback{rank}").read_text() if os.WIFEXITED(status) else f"status {status}"
                problems.append(f"process {rank} crashed: {text}")
        children.pop(pid, None)
        if pid == 0 and stopped is not None and set(children.values()) == {stopped}:
            os.kill(next(iter(children)), signal.SIGCONT)
        if pid == 0 and time.monotonic() > until:
            for child, rank in children.items():
                problems.append(f"process {rank} hung: {_stack(child, directory, rank)}")
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            break
        if pid == 0:
            time.sleep(0.01)
    return problems


def _stack(child: int, directory: Path, rank: int) -> str:
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.5)
        return (directory / f"stack{rank}").read_text()[-3000:]
    return ""


def _fork(work: Callable[[int], None], rank: int, directory: Path, count: int) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _forget_exit_handlers()
        _quiet(directory, rank)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), RES_OPTIONS=NO_LOOKUPS)
        with contextlib.suppress(SystemExit):
            work(rank)
        atexit._run_exitfuncs()
        threading._shutdown()  # type: ignore[attr-defined]
        status = 0
    except BaseException:  # noqa: BLE001 - told to the parent
        (directory / f"traceback{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _forget_exit_handlers() -> None:
    """Keep a child that leaves from cleaning up what its parent made, such as temporary directories."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(distributed._close_all)


def _quiet(directory: Path, rank: int) -> None:
    import faulthandler  # noqa: PLC0415 - in a child only

    out = os.open(directory / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(out, sys.stdout.fileno())
    os.dup2(out, sys.stderr.fileno())
    stack = (directory / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack)
