"""Several processes at one piece of work: each is told of the sum, and of its own events."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import CheckpointError
from safepoint.manager.events import Event, SaveCommitted, SaveFailed, WorkProgress
from safepoint.manager.history import read_history
from safepoint.manager.metering import Meter

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import PoolView


def sum_case(rank: int, root: str) -> list[Any]:
    told: list[WorkProgress] = []
    with CheckpointManager(root, deadline_secs=20.0) as manager:
        view = manager._coordinator.background("progress")
        meter = Meter(view, tell=told.append, look_every_secs=0.05)
        with meter.work("save", 1000 + rank, step=1, shared="test") as work:
            work.advance(100 * (rank + 1))
            give_up = time.monotonic() + 20
            while not (told and told[-1].done_bytes == 300 and told[-1].total_bytes == 2001):
                assert time.monotonic() < give_up, told
                time.sleep(0.01)
            manager._coordinator.meet("test", b"", deadline_secs=20.0)
        meter.close()
    return [told[-1].is_sum, told[-1].step]


def test_each_process_learns_how_much_all_have_done(pool2: PoolView, tmp_path: Path) -> None:
    assert pool2.run(sum_case, str(tmp_path)) == [[True, 1]] * 2


def told_case(rank: int, root: str) -> list[Any]:
    seen: list[Event] = []
    with CheckpointManager(root, mode="sharded", deadline_secs=20.0, observers=[seen.append]) as manager:
        manager.save(1, {"w": torch.ones(1000), "v": torch.ones(1000)})
        with pytest.raises(CheckpointError):
            manager.save(2, {"w": torch.ones(1000) if rank == 0 else Broken()})
    committed = next(event for event in seen if isinstance(event, SaveCommitted))
    failed = next(event for event in seen if isinstance(event, SaveFailed))
    return [committed.process_index, committed.process_count, committed.num_bytes, failed.error]


class Broken:
    def state_dict(self) -> dict[str, Any]:
        raise OSError("no state today")

    def load_state_dict(self, state: Any) -> None:
        del state


def test_each_process_is_told_of_what_it_did_and_the_root_remembers_the_failure_of_another(
    pool2: PoolView, tmp_path: Path
) -> None:
    first, second = pool2.run(told_case, str(tmp_path))

    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1] == 2
    assert first[2] + second[2] == 8000
    assert (first[3], second[3]) == ("PeerFailedError", "CheckpointError")
    known = read_history(LocalStorage(tmp_path))
    assert [line["event"] for line in known] == ["SaveCommitted", "SaveFailed"]
    assert "Process 1 failed: CheckpointError: state_dict() of the Broken" in known[1]["message"]
