"""Optimizers on real torch_xla: a fresh one goes on as the saved one would have, with and without sharded parameters.

A case is a process of its own: the number of devices is fixed when XLA starts.
"""

# ruff: noqa: PLC0415 - a case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.timeout(240),
]

CASE_SECS = 110


def make_optimizer(name: str, model: torch.nn.Module) -> Any:
    from torch_xla.amp import syncfree

    named = list(model.named_parameters())
    plain = [parameter for _, parameter in named]
    return {
        "adam": lambda: torch.optim.Adam(named, lr=0.02),
        "adamw, capturable": lambda: torch.optim.AdamW(named, lr=0.02, capturable=True),
        "sgd": lambda: torch.optim.SGD(named, lr=0.02, momentum=0.9),
        "syncfree adamw": lambda: syncfree.AdamW(plain, lr=0.02),
        "syncfree sgd": lambda: syncfree.SGD(plain, lr=0.02, momentum=0.9),
    }[name]()


def train(model: torch.nn.Module, optimizer: Any, steps: range) -> list[float]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    losses = []
    for n in steps:
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(n)).to(torch_xla.device())
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        losses.append(loss.item())
    return losses


def case(action: str, root: str, name: str, layout: str, mode: str) -> list[float]:
    import torch_xla

    from safepoint.manager import CheckpointManager

    if layout != "one device":
        import torch_xla.runtime as xr

        xr.use_spmd()  # before there is any tensor
    torch.manual_seed(0 if action == "save" else 7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4))
    model = model.to(torch_xla.device())
    if layout != "one device":
        import numpy as np
        import torch_xla.distributed.spmd as xs

        mesh = xs.Mesh(np.arange(4), (2, 2) if layout == "2x2" else (4, 1), ("a", "b"))
        xs.mark_sharding(model[0].weight, mesh, ("a", "b"))
        xs.mark_sharding(model[2].weight, mesh, ("b", "a"))
    optimizer = make_optimizer(name, model)
    with CheckpointManager(root, mode=mode) as manager:  # type: ignore[arg-type]
        if action == "save":
            train(model, optimizer, range(3))
            manager.save(3, {"model": model, "optimizer": optimizer})
        else:
            assert manager.restore_latest({"model": model, "optimizer": optimizer}) is not None
            assert all(
                value.device.type == "xla"
                for state in optimizer.state.values()
                for key, value in state.items()
                if key != "step" and isinstance(value, torch.Tensor)
            )
    return train(model, optimizer, range(3, 6))


def run(*args: str) -> list[float]:
    settings = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1" if args[3] == "one device" else "4"}
    ended = subprocess.run(
        [sys.executable, __file__, *args],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=CASE_SECS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    losses: list[float] = json.loads(ended.stdout.splitlines()[-1])
    return losses


@pytest.mark.parametrize(
    ("name", "saved", "restored", "mode"),
    [
        ("adam", "one device", "one device", "consolidated"),
        ("adamw, capturable", "one device", "one device", "consolidated"),
        ("syncfree adamw", "one device", "one device", "sharded"),
        ("syncfree sgd", "one device", "one device", "consolidated"),
        ("adam", "2x2", "2x2", "sharded"),
        ("sgd", "2x2", "4x1", "sharded"),
        ("adam", "4x1", "one device", "consolidated"),
    ],
)
def test_a_fresh_optimizer_goes_on(tmp_path: Path, name: str, saved: str, restored: str, mode: str) -> None:
    expected = run("save", str(tmp_path), name, saved, mode)
    got = run("restore", str(tmp_path), name, restored, mode)
    if saved == restored:
        assert got == expected
    else:  # another layout adds up in another order
        assert got == pytest.approx(expected, rel=1e-5)


if __name__ == "__main__":
    print(json.dumps(case(*sys.argv[1:])))  # noqa: T201 - what the test reads
