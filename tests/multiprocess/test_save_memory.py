"""A consolidated save gathers leaf by leaf: no process has the whole state in memory twice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from safepoint.manager import CheckpointManager

if TYPE_CHECKING:
    from support.process_pool import PoolView

MIB = 1 << 20
NUM_LEAVES = 24
LEAF_BYTES = 16 * MIB


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def gather_case(rank: int, root: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((LEAF_BYTES // 8, 1), float(rank))  # float32: half of a leaf
    state = {f"leaf{i}": DTensor.from_local(local + i, mesh, [Shard(0)]) for i in range(NUM_LEAVES)}
    with CheckpointManager(root, mode="consolidated", deadline_secs=60) as manager:
        manager.save(0, {"small": torch.ones(1)})  # what is set up once is not counted
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts at what is resident now
        before = resident_bytes()
        result = manager.save(1, state)
        extra = peak_bytes() - before
    return result.num_bytes, extra


def test_a_consolidated_save_gathers_one_leaf_at_a_time(pool2: PoolView, tmp_path: Path) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this kernel does not let the peak of a process be reset")
    (written, primary_extra), (nothing, peer_extra) = pool2.run(gather_case, str(tmp_path))
    assert written == NUM_LEAVES * LEAF_BYTES  # 384 MiB, of which the primary holds half
    assert nothing == 0
    assert primary_extra < 128 * MIB, primary_extra / MIB
    assert peer_extra < 64 * MIB, peer_extra / MIB
