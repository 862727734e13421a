"""Processes of torch_xla on one host that restore the same from an object store: it is fetched once for all of them."""

# ruff: noqa: PLC0415 - a case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager import CheckpointManager

from support.fault_runner import free_port

if TYPE_CHECKING:
    from support.object_servers import ObjectServer

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.timeout(240),
]

CASE_SECS = 150
NUM_ITEMS = 1 << 20
NUM_LEAVES = 5  # of four MiB: two share a block


def wanted(number: int) -> torch.Tensor:
    return (torch.arange(NUM_ITEMS, dtype=torch.int32) * (number + 1)).reshape(1024, -1)


def restore(root: str) -> int:
    """Restore leaves that are sharded over this process's own mesh, and leaves that are not; return the bytes read."""
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(2), (2, 1), ("a", "b"))
    target = {}
    for number in range(NUM_LEAVES):
        leaf = target[str(number)] = torch.zeros_like(wanted(number)).to(torch_xla.device())
        xs.mark_sharding(leaf, mesh, ("a", None) if number % 2 else (None, None))
    with CheckpointManager(root, store=os.environ["MEETING"], deadline_secs=100.0) as manager:
        restored = manager.restore(1, target)
    for number in range(NUM_LEAVES):
        assert torch.equal(target[str(number)].cpu(), wanted(number))
    return restored.num_bytes


def test_xla_processes_of_one_host_fetch_the_same_once(s3: ObjectServer, unused_prefix: str) -> None:
    root = s3.url(unused_prefix)
    with CheckpointManager(root) as manager:
        manager.save(1, {str(number): wanted(number) for number in range(NUM_LEAVES)})
    settings = {**os.environ, **s3.environment, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "WORLD_SIZE": "2"}
    settings |= {"MEETING": f"127.0.0.1:{free_port()}", "RES_OPTIONS": "timeout:1 attempts:1"}
    settings["PYTHONPATH"] = os.pathsep.join(sys.path)  # where this file's own imports were found
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, root],
            env={**settings, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    read = []
    try:
        for process in processes:
            stdout, stderr = process.communicate(timeout=CASE_SECS)
            assert process.returncode == 0, f"{stdout[-1000:]}\n{stderr[-4000:]}"
            read.append(json.loads(stdout.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    data_bytes = 4 * NUM_ITEMS * NUM_LEAVES
    assert data_bytes <= sum(read) < 1.2 * data_bytes
    assert min(read) > data_bytes // 4


if __name__ == "__main__":
    print(json.dumps(restore(sys.argv[1])))  # noqa: T201 - read by the test
