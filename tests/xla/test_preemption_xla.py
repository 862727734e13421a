"""torch_xla's own preemption sync point, between real processes on the CPU. A case is a process of its own."""

# ruff: noqa: PLC0415 - a case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.slow,
    pytest.mark.timeout(150),
]

CASE_SECS = 60
DEADLINE_SECS = 40


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def start(case: str, root: Path, rank: int, ports: tuple[int, int], *, count: int = 2) -> subprocess.Popen[str]:
    settings = {
        "PJRT_DEVICE": "CPU",
        "RES_OPTIONS": "timeout:1 attempts:1",
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "XLA_PORT": str(ports[0]),
        "STORE_PORT": str(ports[1]),
    }
    return subprocess.Popen(
        [sys.executable, __file__, case, str(root)],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(case: str, root: Path, *, count: int = 2) -> list[dict[str, Any]]:
    """Return what the case printed last on each process."""
    ports = free_port(), free_port()
    processes = [start(case, root, rank, ports, count=count) for rank in range(count)]
    try:
        told = [process.communicate(timeout=CASE_SECS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for stdout, stderr in told:
        assert stdout, stderr[-4000:]
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in told]


# What runs in a case.


def activate(rank: int, count: int) -> Any:
    import torch_xla

    extension = torch_xla._XLAC
    extension._ensure_xla_coordinator_initialized(rank, count, "127.0.0.1", os.environ["XLA_PORT"])
    extension._activate_preemption_sync_manager()
    return extension


def loop(root: str, rank: int, count: int, *, signalled: int, before: bool = False) -> dict[str, Any]:
    import torch

    from safepoint.manager import CheckpointManager
    from safepoint.manager.signal_watch import NativeAction

    native = NativeAction.of(signal.SIGTERM).address
    store = f"127.0.0.1:{os.environ['STORE_PORT']}" if count > 1 else None
    with CheckpointManager(root, save_every=1000, deadline_secs=DEADLINE_SECS, store=store) as manager:
        with manager.preemption() as preemption:
            if before and rank == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(3.0)
            for step in range(2000):
                time.sleep(0.01 if rank else 0.02)  # nothing but the decision keeps them together
                if step == 30 and rank == signalled and not before:
                    os.kill(os.getpid(), signal.SIGTERM)
                stop = preemption.should_stop(step)
                manager.save(step, {"x": torch.ones(3)}, force=stop)
                if stop:
                    break
        latest = manager.latest_step()
    return {
        "step": step,
        "latest": latest,
        "way": type(preemption._agreement).__name__,
        "reason": preemption.reason,
        "native_is_back": NativeAction.of(signal.SIGTERM).address == native,
    }


def case_active(root: str, rank: int, count: int) -> Any:
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))  # lost to torch_xla, were it not for us
    activate(rank, count)
    return {**loop(root, rank, count, signalled=1), "handled": len(handled)}


def case_before(root: str, rank: int, count: int) -> Any:
    activate(rank, count)
    return loop(root, rank, count, signalled=1, before=True)


def case_displaced(root: str, rank: int, count: int) -> Any:
    """A handler that was installed after the activation has taken the signal from torch_xla."""
    handled: list[int] = []
    activate(rank, count)
    signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    return {**loop(root, rank, count, signalled=1), "handled": len(handled)}


def case_inactive(root: str, rank: int, count: int) -> Any:
    import torch
    import torch_xla

    torch.ones(1, device=torch_xla.device()).item()
    return loop(root, rank, count, signalled=0)


def case_mixed(root: str, rank: int, count: int) -> Any:
    if rank == 0:
        activate(0, 1)
    return loop(root, rank, count, signalled=1)


# The tests.


def test_where_the_sync_point_is_active_it_decides_and_the_users_handler_still_runs(tmp_path: Path) -> None:
    results = run("active", tmp_path)

    assert {result["way"] for result in results} == {"_XlaSyncPoint"}
    assert results[0]["step"] == results[1]["step"] > 30
    assert {result["latest"] for result in results} == {results[0]["step"]}
    assert [result["handled"] for result in results] == [0, 1]
    assert [result["reason"] for result in results] == ["a signal on another process", "SIGTERM"]
    assert all(result["native_is_back"] for result in results)


def test_a_signal_before_the_first_step_reaches_the_sync_point_at_it(tmp_path: Path) -> None:
    results = run("before", tmp_path)

    assert {result["way"] for result in results} == {"_XlaSyncPoint"}
    assert results[0]["step"] == results[1]["step"]
    assert {result["latest"] for result in results} == {results[0]["step"]}


def test_a_sync_point_that_lost_its_signal_is_not_relied_on(tmp_path: Path) -> None:
    results = run("displaced", tmp_path)

    assert {result["way"] for result in results} == {"StopWatcher"}
    assert results[0]["step"] == results[1]["step"] > 30
    assert [result["handled"] for result in results] == [0, 1]


def test_where_it_is_active_on_some_processes_only_the_store_decides(tmp_path: Path) -> None:
    results = run("mixed", tmp_path)

    assert {result["way"] for result in results} == {"StopWatcher"}
    assert results[0]["step"] == results[1]["step"] > 30


def test_a_running_runtime_without_the_sync_point_stops_through_the_manager(tmp_path: Path) -> None:
    (result,) = run("inactive", tmp_path, count=1)

    assert result["way"] == "StopWatcher"
    assert result["step"] == result["latest"] in (30, 31)


def main() -> None:
    case, root = sys.argv[1:]
    result = globals()[f"case_{case}"](root, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    print(json.dumps(result), flush=True)  # noqa: T201 - this is how a case returns
    # XLA's coordination service ends every process whose peers are gone first: without a word from here on.
    os._exit(0)


if __name__ == "__main__":
    main()
