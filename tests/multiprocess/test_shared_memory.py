"""Shared memory, ties, casts and state per process across several real processes."""

# ruff: noqa: PLC0415 - a case imports torch.distributed in its own process

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import Cast, CheckpointManager, Partial, PerProcess, Rename, RNGState
from safepoint.manager.errors import CheckpointError, PeerFailedError, StructureMismatchError

from support.strategies import same_content

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import ProcessPool

DEADLINE_SECS = 20.0


def open_manager(root: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, deadline_secs=DEADLINE_SECS, **options)


def make(value: float) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    buffer = torch.arange(24.0) * value
    sharded = distribute_tensor(torch.arange(35.0).reshape(7, 5) * value, mesh, [Shard(0)])
    return {
        "buffer": buffer,
        "views": {"part": buffer[4:10].view(2, 3), "row": buffer[8], "same": buffer},
        "ends": [torch.arange(10.0)[:7] * value, 0],
        "pool": (buffer[:5].clone(), buffer[3:].clone()),
        "sharded": sharded,
        "tied": sharded,
    }


def overlapping(value: float) -> dict[str, Any]:
    state = make(value)
    memory = torch.arange(16.0) * value
    state["pool"] = (memory[:10], memory[6:], memory[7:9])
    return state


def shared_case(_rank: int, root: str, mode: Any, action: str) -> int:
    state = overlapping(1 if action == "save" else 0)
    with open_manager(root, mode=mode) as manager:
        if action == "save":
            return manager.save(1, state).num_bytes
        manager.restore(1, state)
        wanted = overlapping(1)
        for name in ("buffer", "views", "ends", "pool"):
            assert same_content(state[name], wanted[name]), name
        assert torch.equal(state["sharded"].to_local(), wanted["sharded"].to_local())
        assert state["tied"] is state["sharded"]
        found = manager.restore(1).state
        assert found is not None
        assert same_content(found["pool"], wanted["pool"])
        assert len({part.untyped_storage().data_ptr() for part in found["pool"]}) == 1
        assert found["tied"] is found["sharded"]
        assert found["views"]["part"].untyped_storage().data_ptr() == found["buffer"].untyped_storage().data_ptr()
    return 0


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_shared_memory_is_stored_once_by_all_together(process_pool: ProcessPool, tmp_path: Path, mode: str) -> None:
    written = process_pool.run(shared_case, str(tmp_path), mode, "save", num_processes=2)
    assert sum(written) == 4 * (24 + 7 + 16 + 35)
    for count in (1, 2, 3):
        process_pool.run(shared_case, str(tmp_path), mode, "restore", num_processes=count)


def conflict_case(rank: int, root: str) -> str:
    with open_manager(root) as manager:
        manager.save(1, {"a": torch.ones(4), "b": torch.full((4,), 2.0)})
        memory = torch.zeros(8)
        shared = {"a": memory[:4], "b": memory[2:6]} if rank == 1 else {"a": memory[:4], "b": memory[4:]}
        try:
            manager.restore(1, shared)
        except CheckpointError as error:
            assert not memory.any()
            return type(error).__name__
    return ""


def test_a_target_of_one_process_that_cannot_hold_both_leaves_all_targets_untouched(
    process_pool: ProcessPool, tmp_path: Path
) -> None:
    names = process_pool.run(conflict_case, str(tmp_path), num_processes=3)
    assert names == [PeerFailedError.__name__, StructureMismatchError.__name__, PeerFailedError.__name__]


def adapt_case(_rank: int, root: str, count: int) -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (count,))
    whole = torch.arange(33.0).reshape(11, 3)
    live = distribute_tensor(torch.zeros(11, 3, dtype=torch.bfloat16), mesh, [Shard(0)])
    with open_manager(root, mode="sharded") as manager:
        manager.save(1, {"old": distribute_tensor(whole, mesh, [Shard(1)]), "gone": 3})
        result = manager.restore(
            1, {"new": live, "here": 4}, adapt=[Rename({"old": "new"}), Cast(), Partial("gone", "here")]
        )
    wanted = distribute_tensor(whole.bfloat16(), mesh, [Shard(0)])
    assert torch.equal(live.to_local(), wanted.to_local())
    return [result.adapted.cast, result.adapted.missing, result.adapted.extra, result.adapted.renamed]


def test_sharded_leaves_are_cast_and_renamed(process_pool: ProcessPool, tmp_path: Path) -> None:
    for report in process_pool.run(adapt_case, str(tmp_path), 2, num_processes=2):
        assert report == [(("new", "float32", "bfloat16"),), ("here",), ("gone",), (("old", "new"),)]


def random_case(rank: int, root: str, mode: Any, action: str) -> list[float]:
    random.seed(rank)
    torch.manual_seed(rank)
    marked = PerProcess([rank, torch.full((2,), float(rank))], merge=lambda parts, *_: [sum(p[0] for p in parts), None])
    with open_manager(root, mode=mode) as manager:
        state = {"rng": PerProcess(RNGState()), "position": marked}
        if action == "save":
            manager.save(1, state)
        else:
            random.seed(77)
            torch.manual_seed(77)
            marked.value = [-1, torch.zeros(2)]
            manager.restore(1, state)
            assert marked.value[0] == rank
            assert marked.value[1].tolist() == [rank, rank]
    return [random.random(), float(torch.rand(()))]  # noqa: S311 - no secret


def merged_case(_rank: int, root: str) -> tuple[str, int]:
    marked = PerProcess([-1, torch.zeros(2)], merge=lambda parts, *_: [sum(part[0] for part in parts), None])
    with open_manager(root) as manager:
        try:
            manager.restore(1, {"rng": PerProcess(RNGState()), "position": marked})
        except StructureMismatchError as error:
            told = str(error)
        manager.restore(1, {"position": marked}, items=["position"])
    return told, marked.value[0]


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_each_process_gets_its_own_random_state_back(process_pool: ProcessPool, tmp_path: Path, mode: str) -> None:
    drawn = process_pool.run(random_case, str(tmp_path), mode, "save", num_processes=3)
    assert len({numbers[0] for numbers in drawn}) == 3
    assert process_pool.run(random_case, str(tmp_path), mode, "restore", num_processes=3) == drawn
    for told, merged in process_pool.run(merged_case, str(tmp_path), num_processes=2):
        assert "3 processes each saved their own, and 2 restore" in told
        assert "merge=function" in told
        assert merged == 0 + 1 + 2
