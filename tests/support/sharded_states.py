"""States whose every element is known from its position, so that any shard of any restore can be checked alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

LEAVES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 6), torch.float32),
    "uneven": ((7, 5), torch.bfloat16),
    "thin": ((2, 9), torch.float64),  # fewer rows than processes: some shards are empty
    "columns": ((5, 11), torch.int32),
    "vector": ((13,), torch.float16),
    "scalar": ((), torch.float32),
    "nothing": ((0, 3), torch.float32),
    "flags": ((9,), torch.bool),
    "replicated": ((6, 6), torch.float32),
}


def expected(name: str, seed: int = 0) -> torch.Tensor:
    """Return the whole of a leaf."""
    shape, dtype = LEAVES[name]
    values = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 100 * sorted(LEAVES).index(name)
    return ((values + seed) % 2 == 0) if dtype == torch.bool else (values + seed).to(dtype)


def placements(name: str, num_dims: int) -> list[Any]:
    """Return how a leaf lies on a mesh of one or two dimensions."""
    shard = {"columns": 1}.get(name, 0)
    if name in ("scalar", "nothing", "replicated"):
        return [Replicate()] * num_dims
    if num_dims == 1:
        return [Shard(shard)]
    return {"even": [Shard(0), Shard(1)], "uneven": [Shard(0), Shard(0)], "thin": [Replicate(), Shard(1)]}.get(
        name, [Shard(shard), Replicate()]
    )


def make_state(mesh_shape: tuple[int, ...], *, zeros: bool = False, seed: int = 0) -> dict[str, Any]:
    """Return the state of this process on a mesh; with `zeros`, a target of the same geometry."""
    mesh = init_device_mesh("cpu", mesh_shape) if mesh_shape else None
    leaves: dict[str, Any] = {}
    for name in LEAVES:
        whole = expected(name, seed)
        if mesh is None or name == "scalar":
            leaves[name] = whole.clone()
        else:
            leaves[name] = distribute_tensor(whole, mesh, placements(name, mesh.ndim))
        if zeros:
            (leaves[name].to_local() if isinstance(leaves[name], DTensor) else leaves[name]).zero_()
    return {"leaves": leaves, "plain": torch.arange(20) + seed, "step_count": 0 if zeros else 17 + seed}


def check_state(state: dict[str, Any], seed: int = 0) -> None:
    """Assert that every local element is the expected one."""
    for name, leaf in state["leaves"].items():
        whole = expected(name, seed)
        if isinstance(leaf, DTensor):
            wanted = distribute_tensor(whole, leaf.device_mesh, leaf.placements).to_local()
            actual = leaf.to_local()
        else:
            wanted, actual = whole, leaf
        assert actual.dtype == wanted.dtype, name
        assert torch.equal(actual, wanted), (name, dist.get_rank() if dist.is_initialized() else 0, actual, wanted)
    assert torch.equal(state["plain"], torch.arange(20) + seed)
    assert state["step_count"] == 17 + seed
