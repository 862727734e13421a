"""PyTorch/XLA: FSDP by SPMD. One process, all devices of the host; the compiler shards what the mesh says.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python docs/examples/xla_fsdp.py runs/xla

Kill it, and run the line again, with as many devices as you like. On TPUs leave the two variables away; on several
hosts also start torch.distributed (gloo), by which the processes meet.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

from safepoint.manager import CheckpointManager, KeepLast, RNGState

WIDTH = 16


def make_model(mesh: xs.Mesh) -> nn.Module:
    """Return a model whose parameters are sharded over the axis `fsdp`."""
    torch.manual_seed(0)
    torch_xla.manual_seed(0)  # the dropout's
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))

    def shard_output(output: torch.Tensor, mesh: xs.Mesh) -> None:
        xs.mark_sharding(output, mesh, ("fsdp", None))

    return SpmdFullyShardedDataParallel(layers.to(torch_xla.device()), mesh=mesh, shard_output=shard_output)


def train(root: str, *, num_steps: int) -> dict[int, float]:
    """Train, from the latest step if there is one; return the losses by step."""
    num_devices = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(num_devices), (num_devices, 1), ("fsdp", "model"))
    model = make_model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model.module, "optimizer": optimizer, "rng": RNGState()}  # what is inside the wrapper
    losses = {}
    with CheckpointManager(root, mode="sharded", keep=KeepLast(2), save_every=5) as manager:
        start = manager.restore_latest(state)
        for step in range(0 if start is None else start.step + 1, num_steps):
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(torch_xla.device())
            xs.mark_sharding(batch, mesh, ("fsdp", None))
            loss = (model(batch) - batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses[step] = loss.item()
            manager.save(step, state, force=step == num_steps - 1)
    return losses


if __name__ == "__main__":
    xr.use_spmd()
    for step, loss in train(sys.argv[1], num_steps=20).items():
        print(f"step {step}: loss {loss:.4f}")
