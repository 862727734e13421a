"""Saves that link what did not change, of leaves on an SPMD mesh of real torch_xla on the CPU.

The case is a process of its own: the number of devices is fixed when XLA starts.
"""

# ruff: noqa: PLC0415 - the case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.timeout(240),
]

ROWS = 128
NAMES = ("sharded", "replicated", "changes")


def expected(name: str, version: int) -> torch.Tensor:
    base = torch.arange(ROWS * 32, dtype=torch.float32).reshape(ROWS, 32) - len(name)
    return base + version if name == "changes" else base


def save_and_restore(root: str, mode: Any, *, blocking: bool) -> list[int]:
    import numpy as np
    import torch_xla
    import torch_xla.distributed.spmd as xs

    from safepoint.manager import CheckpointManager

    mesh = xs.Mesh(np.arange(4), (2, 2), ("a", "b"))

    def make(version: int) -> dict[str, Any]:
        leaves = {name: expected(name, version).to(torch_xla.device()) for name in NAMES}
        for name, leaf in leaves.items():
            xs.mark_sharding(leaf, mesh, (None, None) if name == "replicated" else ("a", "b"))
        return {"model": leaves, "step": version}

    written = []
    with CheckpointManager(root, mode=mode, unchanged="link") as manager:
        for version in (1, 2, 3):
            result = manager.save(version, make(version), blocking=blocking)
            manager.wait()
            written.append(result.num_bytes)
        for version in (1, 2, 3):
            target = make(0)
            manager.restore(version, target)
            for name in NAMES:
                assert torch.equal(target["model"][name].cpu(), expected(name, version)), (name, version)
        assert manager.verify() == []
    assert any(path.stat().st_nlink == 3 for path in Path(root, "3").glob("shard-*"))
    return written


def case(root: str) -> list[list[int]]:
    import torch_xla.runtime as xr

    xr.use_spmd()
    kinds = [("consolidated", True), ("sharded", True), ("sharded", False)]
    return [save_and_restore(f"{root}/{mode}-{how}", mode, blocking=how) for mode, how in kinds]


def test_leaves_on_a_mesh_are_linked_where_they_did_not_change_and_restore(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout[-1000:]}\n{ended.stderr[-4000:]}"
    leaf = 4 * ROWS * 32
    assert json.loads(ended.stdout.splitlines()[-1])[:2] == [[3 * leaf, leaf, leaf]] * 2


if __name__ == "__main__":
    print(json.dumps(case(sys.argv[1])))  # noqa: T201 - read by the test
