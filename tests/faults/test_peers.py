"""A process that dies, hangs, is stopped or leaves: the others say who, in time, and the next run goes on."""

from __future__ import annotations

import time
import zlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist  # noqa: TID251 - a training's own group

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager

from support.fault_runner import Point, Workshop, free_port, run_forked

if TYPE_CHECKING:
    from pathlib import Path

CASES = [
    (scenario, kind, process)
    for scenario in ("save-sharded-blocking", "save-consolidated-async", "restore-sharded")
    for kind, process in (("kill", 0), ("kill", 2), ("stop", 0), ("stop", 1), ("stall", 1), ("exit", 0), ("exit", 2))
]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("peers"), count=3)


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "kind", "process"), CASES, ids=str)
def test_of_three_processes_two_say_which_one_was_lost_and_the_next_run_goes_on(
    workshop: Workshop, scenario: str, kind: str, process: int
) -> None:
    calls = workshop.count_calls(scenario)[process]
    at = 2 + zlib.crc32(f"{scenario} {kind} {process}".encode()) % (len(calls) - 2)
    verdict = workshop.run(Point(scenario=scenario, kind=kind, process=process, at=at))
    assert verdict.problems == (), verdict
    assert verdict.fired


class _SlowStorage(LocalStorage):
    def sync_dir(self, path: str) -> None:
        if ".tmp-" in path:
            time.sleep(6.0)
        super().sync_dir(path)


def test_a_save_outlasts_the_timeout_of_the_training_group(tmp_path: Path) -> None:
    port = free_port()

    def train(rank: int) -> None:
        from safepoint.manager import session  # noqa: PLC0415 - in the fork only

        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=3))
        if rank == 1:
            session.LocalStorage = _SlowStorage  # type: ignore[misc]
        state: dict[str, Any] = {"own": {f"p{rank}": torch.full((4,), float(rank))}, "all": torch.arange(3)}
        with CheckpointManager(tmp_path / "root", mode="sharded", deadline_secs=30.0) as manager:
            started = time.monotonic()
            assert manager.save(1, state).saved
            assert time.monotonic() - started > 6
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2

    assert run_forked(train, range(2), tmp_path) == []
