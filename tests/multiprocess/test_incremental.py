"""Saves that link what did not change, by several processes: each its own files, gathered ones, and other counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager, KeepLast, PerProcess
from safepoint.manager.verifying import verify_steps

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import PoolView, ProcessPool

ROWS = 480
SHARDED = ("a", "b", "c", "d")
REPLICATED = ("r0", "r1", "r2", "r3", "r4", "r5")


def whole(name: str, version: int) -> torch.Tensor:
    """Return a leaf: only `a` and `r0` change with the version."""
    base = torch.arange(ROWS * 32, dtype=torch.float32).reshape(ROWS, 32) + 1000 * (*SHARDED, *REPLICATED).index(name)
    return base + version if name in ("a", "r0") else base


def make(count: int, rank: int, version: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (count,))
    model: dict[str, Any] = {name: distribute_tensor(whole(name, version), mesh, [Shard(0)]) for name in SHARDED}
    model |= {name: whole(name, version) for name in REPLICATED}
    noise = torch.full((4096,), float(rank))
    return {"model": model, "rank": PerProcess({"noise": noise}, merge=lambda parts, *_: parts[0]), "step": version}


def check(state: Any, version: int) -> None:
    for name in (*SHARDED, *REPLICATED):
        leaf = state["model"][name]
        local = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
        assert torch.equal(local, whole(name, version)), (name, version)
    assert state["step"] == version


def open_manager(root: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"deadline_secs": 20.0, "unchanged": "link", **options})


def save_case(rank: int, root: str, count: int, mode: Any, how: str) -> list[int]:
    with open_manager(root, mode=mode, keep=KeepLast(2)) as manager:
        written = []
        for version in (1, 2, 3):
            result = manager.save(version, make(count, rank, version), blocking=how == "blocking")
            manager.wait()
            written.append(result.num_bytes)
        for version in (2, 3):
            host = manager.restore(version).state
            assert host is not None
            check(host, version)
        return written


def linked(root: Path, step: int) -> list[dict[str, Any]]:
    manifest = json.loads((root / str(step) / "manifest.json").read_bytes())
    return [file for file in manifest["files"] if file.get("links")]


@pytest.mark.parametrize(("mode", "how"), [("sharded", "blocking"), ("consolidated", "blocking"), ("sharded", "async")])
def test_each_process_writes_what_changed_and_links_the_rest(
    pool3: PoolView, tmp_path: Path, mode: str, how: str
) -> None:
    written = pool3.run(save_case, str(tmp_path), 3, mode, how)
    assert len(linked(tmp_path, 3)) == (3 if mode == "sharded" else 2)  # consolidated: an item each
    if how == "blocking":
        leaf = 4 * 32 * ROWS
        assert sum(sizes[0] for sizes in written) == 10 * leaf + 3 * 4 * 4096
        assert [sum(sizes[k] for sizes in written) for k in (1, 2)] == [2 * leaf, 2 * leaf]
    assert verify_steps(LocalStorage(tmp_path)) == []


def go_on_case(rank: int, root: str, count: int, mode: Any, version: int) -> int:
    state = make(count, rank, 0)
    with open_manager(root, mode=mode) as manager:
        restored = manager.restore_latest(state)
        assert restored is not None
        check(state, restored.step)
        return manager.save(version, make(count, rank, version)).num_bytes


def test_other_numbers_of_processes_and_other_modes_link_what_they_find_and_restore_it_all(
    process_pool: ProcessPool, tmp_path: Path
) -> None:
    process_pool.run(save_case, str(tmp_path), 3, "sharded", "blocking", num_processes=3)
    runs = [(2, "consolidated"), (3, "consolidated"), (1, "consolidated"), (2, "sharded"), (2, "sharded")]
    for version, (count, mode) in enumerate(runs, start=4):
        process_pool.run(go_on_case, str(tmp_path), count, mode, version, num_processes=count)
    assert verify_steps(LocalStorage(tmp_path)) == []
    # Whole leaves are in other regions than those of three processes; from there on the files fit again.
    assert [bool(linked(tmp_path, version)) for version in (5, 6, 8)] == [True] * 3
    with CheckpointManager(tmp_path) as manager:
        for version in range(4, 9):
            host = manager.restore(version).state
            assert host is not None
            check(host, version)


def split_case(_rank: int, root: str, version: int, mode: Any) -> int:
    state = {f"r{i}": torch.arange(4096, dtype=torch.float32) + i for i in range(8)}
    with open_manager(root, mode=mode) as manager:
        manager.restore_latest({"model": {name: torch.zeros(4096) for name in state}})
        return manager.save(version, {"model": state}).num_bytes


def test_a_file_whose_leaves_go_to_two_processes_is_written_anew(pool2: PoolView, tmp_path: Path) -> None:
    pool2.run(split_case, str(tmp_path), 1, "consolidated")
    assert pool2.run(split_case, str(tmp_path), 2, "sharded") == [4 * 4 * 4096] * 2  # neither wants half of it
    assert linked(tmp_path, 2) == []
    assert pool2.run(split_case, str(tmp_path), 3, "sharded") == [0, 0]
    assert verify_steps(LocalStorage(tmp_path)) == []


def private_case(rank: int, root: str) -> int:
    with open_manager(f"{root}/disk{rank}", root_scope="per_process", keep=KeepLast(1)) as manager:
        for version in (1, 2, 3):
            result = manager.save(version, make(2, rank, version))
        state = make(2, rank, 0)
        manager.restore(3, state)
        check(state, 3)
        assert manager.verify() == []
        return result.num_bytes


def test_roots_of_one_process_each_link_within_themselves(pool2: PoolView, tmp_path: Path) -> None:
    leaf = 4 * 32 * ROWS
    assert pool2.run(private_case, str(tmp_path)) == [leaf // 2 + leaf] * 2
    assert [len(linked(tmp_path / f"disk{rank}", 3)) for rank in (0, 1)] == [1, 1]


def disagree_case(rank: int, root: str) -> str:
    try:
        open_manager(root, unchanged="link" if rank else "write")
    except Exception as error:  # noqa: BLE001 - told to the test
        return type(error).__name__
    return ""


def test_processes_that_disagree_about_linking_are_told_when_they_open(pool2: PoolView, tmp_path: Path) -> None:
    assert pool2.run(disagree_case, str(tmp_path)) == ["DisagreementError"] * 2
