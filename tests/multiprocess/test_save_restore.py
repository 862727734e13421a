"""Saving with some number of real processes and restoring with another, bit for bit, in both modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

from safepoint.manager import KeepLast, PerProcess
from safepoint.manager.errors import (
    CheckpointError,
    StructureMismatchError,
)
from safepoint.manager.staging import HostSlab

from support.matrix import cases
from support.sharded_states import LEAVES, check_state, expected, make_state

if TYPE_CHECKING:
    from support.process_pool import PoolView, ProcessPool
    from support.roots import Root

SAVED_DTYPES = {torch.int64, *(dtype for _, dtype in LEAVES.values())}

# What takes many saves and is about processes alone, or about files that other tools open.
in_a_directory = pytest.mark.parametrize("root", ["directory"], indirect=True)


def mesh_for(count: int) -> tuple[int, ...]:
    return {1: (1,), 2: (2,), 3: (3,), 4: (2, 2)}[count]


def save_case(rank: int, root: Root, mode: Any, mesh: tuple[int, ...], how: str = "blocking") -> tuple[str, int]:
    with root.manager(mode=mode) as manager:
        if how == f"async without memory on {rank}":
            manager._slab = HostSlab(lambda: 0)
        result = manager.save(7, make_state(mesh), blocking=how == "blocking")
        manager.wait()
        assert manager.latest_step() == 7
    assert result.mode is not None
    return result.mode, result.num_bytes


def restore_case(_rank: int, root: Root, mesh: tuple[int, ...]) -> int:
    state = make_state(mesh, zeros=True)
    with root.manager() as manager:
        restored = manager.restore_latest(state)
        check_state(state)
        assert restored is not None
        host = manager.restore(7).state
    assert host is not None
    for name, leaf in host["leaves"].items():
        assert torch.equal(leaf, expected(name)), name
    return restored.step


@in_a_directory
@pytest.mark.parametrize(
    ("file_format", "mode", "count"),
    cases("tests/multiprocess/test_save_restore.py::test_any_number_of_processes_restores_what_any_other_saved"),
)
def test_any_number_of_processes_restores_what_any_other_saved(
    process_pool: ProcessPool, root: Root, file_format: str, mode: str, count: int
) -> None:
    assert file_format == "safetensors"  # by default
    saved = process_pool.run(save_case, root, mode, mesh_for(count), num_processes=count)
    assert {used for used, _ in saved} == {mode}
    if mode == "consolidated":
        assert all(num_bytes == 0 for _, num_bytes in saved[1:])
        with safe_open(root.path / "7" / "leaves" / "leaves.safetensors", framework="pt") as opened:
            assert all(torch.equal(opened.get_tensor(name), expected(name)) for name in opened.keys())  # noqa: SIM118
    shards = list(root.path.glob("7/shard-*.safetensors"))
    assert len(shards) == (count if mode == "sharded" else 0)
    for shard in shards:
        with safe_open(shard, framework="pt") as opened:
            assert {opened.get_tensor(name).dtype for name in opened.keys()} <= SAVED_DTYPES  # noqa: SIM118
    for others in (1, 2, 3, 4):
        restored = process_pool.run(restore_case, root, mesh_for(others), num_processes=others)
        assert restored == [7] * others


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_async_saves_of_several_processes_restore(process_pool: ProcessPool, root: Root, mode: str) -> None:
    process_pool.run(save_case, root, mode, (2, 2), "async", num_processes=4)
    assert process_pool.run(restore_case, root, (3,), num_processes=3) == [7] * 3
    root.check_holds(7)


@in_a_directory
@pytest.mark.parametrize("how", ["async without memory on 0", "async without memory on 2"])
@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_async_saves_restore_where_a_process_has_no_memory_for_a_copy(
    process_pool: ProcessPool, root: Root, mode: str, how: str
) -> None:
    process_pool.run(save_case, root, mode, (2, 2), how, num_processes=4)
    assert process_pool.run(restore_case, root, (3,), num_processes=3) == [7] * 3


def replicated_case(_rank: int, root: Root, mode: Any) -> tuple[str, str, int]:
    state = {f"leaf{i}": torch.full((1000 + i,), float(i)) for i in range(20)}
    with root.manager(mode=mode) as manager:
        result = manager.save(1, state)
    return str(result.mode), result.mode_reason, result.num_bytes


def test_replicas_are_spread_evenly_over_the_writers(pool4: PoolView, root: Root) -> None:
    sizes = [num_bytes for _, _, num_bytes in pool4.run(replicated_case, root, "sharded")]
    assert sum(sizes) == sum(4 * (1000 + i) for i in range(20))
    assert max(sizes) - min(sizes) <= 4 * 1019
    assert {path.rpartition("/")[2] for path in root.files("1") if path.endswith(".safetensors")} == {
        f"shard-{i:05d}-of-00004.safetensors" for i in range(4)
    }


def test_auto_takes_consolidated_for_a_small_replicated_state_and_says_why(pool2: PoolView, root: Root) -> None:
    for mode, reason, _ in pool2.run(replicated_case, root, "auto"):
        assert mode == "consolidated"
        assert "small" in reason


def auto_sharded_case(_rank: int, root: Root) -> tuple[str, str]:
    with root.manager() as manager:
        result = manager.save(1, make_state((2,)))
    return str(result.mode), result.mode_reason


def test_auto_takes_sharded_where_the_primary_lacks_a_part(pool2: PoolView, root: Root) -> None:
    for mode, reason in pool2.run(auto_sharded_case, root):
        assert mode == "sharded"
        assert "process 0" in reason


# -- state that differs ---------------------------------------------------------------------------------------------


def per_process_case(rank: int, root: Root, what: str) -> Any:
    state = {
        "cursor": PerProcess(
            {"position": 0 if what == "restore" else 10 + rank, "noise": torch.full((3,), float(rank))}
        )
    }
    with root.manager() as manager:
        if what == "save":
            manager.save(1, state)
            return None
        try:
            manager.restore_latest(state)
        except CheckpointError as error:
            return str(error)
    return state["cursor"].value["position"], state["cursor"].value["noise"].tolist()


def test_state_per_process_comes_back_to_each_and_another_count_is_refused(
    process_pool: ProcessPool, root: Root
) -> None:
    process_pool.run(per_process_case, root, "save", num_processes=3)
    same = process_pool.run(per_process_case, root, "restore", num_processes=3)
    assert same == [(10 + rank, [float(rank)] * 3) for rank in range(3)]
    for text in process_pool.run(per_process_case, root, "restore", num_processes=2):
        assert "merge" in text


def expert_case(rank: int, root: Root, mode: Any) -> None:
    own = {f"expert{rank}": {"weight": torch.full((4, 2), float(rank)), "bias": torch.full((2,), float(-rank))}}
    with root.manager(mode=mode) as manager:
        manager.save(1, {"experts": own, "shared": torch.arange(5)})
        target = {
            "experts": {f"expert{rank}": {"weight": torch.zeros(4, 2), "bias": torch.zeros(2)}},
            "shared": torch.zeros(5, dtype=torch.int64),
        }
        keys = [f"experts.expert{rank}", "shared"]
        manager.restore_latest(target, keys=keys)
        assert torch.equal(target["experts"][f"expert{rank}"]["weight"], own[f"expert{rank}"]["weight"])
        again = {
            "experts": {f"expert{rank}": {"weight": torch.ones(4, 2), "bias": torch.ones(2)}},
            "shared": torch.zeros(5, dtype=torch.int64),
        }
        manager.restore_latest(again)
        assert torch.equal(again["experts"][f"expert{rank}"]["bias"], own[f"expert{rank}"]["bias"])
        nobody_has = {"experts": {"expert0": {"weight": torch.ones(4, 2)}}} if rank else {}
        with pytest.raises(StructureMismatchError) as caught:
            manager.restore_latest(nobody_has)
        assert [line.split(":")[0] for line in caught.value.mismatches or ()] == [
            "shared",
            "experts.expert0.bias",
            "experts.expert1",
            "experts.expert2",
        ]
        assert rank == 0 or nobody_has["experts"]["expert0"]["weight"].tolist() == [[1.0, 1.0]] * 4
        whole = manager.restore(1).state
        assert whole is not None
        assert sorted(whole["experts"]) == ["expert0", "expert1", "expert2"]
        assert whole["experts"]["expert2"]["weight"].tolist() == [[2.0, 2.0]] * 4


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_processes_that_hold_different_leaves_save_their_union_and_get_their_own_back(
    pool3: PoolView, root: Root, mode: str
) -> None:
    pool3.run(expert_case, root, mode)


# -- roots of their own ---------------------------------------------------------------------------------------------


def private_save_case(rank: int, root: Root, steps: list[int]) -> None:
    with root.beside(f"disk{rank}").manager(root_scope="per_process", keep=KeepLast(2)) as manager:
        for step in steps:
            result = manager.save(step, make_state((2,), seed=step))
            assert result.mode == "sharded"
        manager.save(steps[-1], make_state((2,), seed=steps[-1]), on_exists="replace")
        assert [info.step for info in manager.steps()] == steps[-2:]


def private_restore_case(rank: int, root: Root) -> int:
    state = make_state((2,), zeros=True)
    with root.beside(f"disk{rank}").manager(root_scope="per_process") as manager:
        restored = manager.restore_latest(state)
    assert restored is not None
    check_state(state, seed=restored.step)
    return restored.step


def test_private_roots_restore_the_newest_step_that_is_whole_everywhere(pool2: PoolView, root: Root) -> None:
    pool2.run(private_save_case, root, [1, 2, 3])
    assert pool2.run(private_restore_case, root) == [3, 3]
    for disk in ("disk0", "disk1"):
        root.beside(disk).check_holds(2, 3)
    root.beside("disk1").storage.delete("3/commit.json")
    assert pool2.run(private_restore_case, root) == [2, 2]


def twice_case(_rank: int, root: Root) -> list[bool]:
    with root.manager() as manager:
        return [manager.save(5, {"x": 1}).saved, manager.save(5, {"x": 1}).saved]


def test_a_final_save_that_repeats_the_last_one_is_skipped_everywhere(pool2: PoolView, root: Root) -> None:
    assert pool2.run(twice_case, root) == [[True, False]] * 2
