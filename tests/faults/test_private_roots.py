"""Roots of one process each: whose step is whose, and which one all can restore."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.errors import CheckpointError

from support.sharded_states import check_state, make_state

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import PoolView


def open_own(root: str, rank: int, **options: Any) -> CheckpointManager:
    return CheckpointManager(f"{root}/disk{rank}", root_scope="per_process", deadline_secs=20.0, **options)


def save_case(rank: int, root: str, steps: list[int]) -> None:
    with open_own(root, rank, keep=KeepLast(2)) as manager:
        for step in steps:
            manager.save(step, make_state((2,), seed=step))


def restore_case(rank: int, root: str) -> tuple[int | None, str]:
    state = make_state((2,), zeros=True)
    with open_own(root, rank) as manager:
        try:
            restored = manager.restore_latest(state)
        except CheckpointError as error:
            return None, f"{type(error).__name__}: {error}"
    assert restored is not None
    check_state(state, seed=restored.step)
    return restored.step, " ".join(restored.skipped)


def test_a_root_that_another_process_saved_to_is_refused_by_name(pool2: PoolView, tmp_path: Path) -> None:
    pool2.run(save_case, str(tmp_path), [1, 2])
    (tmp_path / "disk0").rename(tmp_path / "was0")
    (tmp_path / "disk1").rename(tmp_path / "disk0")
    (tmp_path / "was0").rename(tmp_path / "disk1")
    for step, text in pool2.run(restore_case, str(tmp_path)):
        assert step is None
        assert "NoRestorableStepError" in text
        assert "root of process 0" in text
        assert "committed here by process 1" in text


def test_steps_of_another_process_are_never_deleted_or_replaced(pool2: PoolView, tmp_path: Path) -> None:
    pool2.run(save_case, str(tmp_path), [1, 2])
    foreign = {}
    for disk, other in ((0, 1), (1, 0)):
        shutil.copytree(tmp_path / f"disk{other}" / "1", tmp_path / f"stolen{disk}")
    for disk in (0, 1):
        shutil.rmtree(tmp_path / f"disk{disk}" / "1")
        (tmp_path / f"stolen{disk}").rename(tmp_path / f"disk{disk}" / "1")
        foreign[disk] = {path.name: path.read_bytes() for path in (tmp_path / f"disk{disk}" / "1").iterdir()}
    pool2.run(save_case, str(tmp_path), [3, 4, 5])  # keeps two
    for disk, files in foreign.items():
        root = tmp_path / f"disk{disk}"
        assert {path.name for path in root.iterdir() if path.name[0].isdigit()} == {"1", "4", "5"}
        assert {path.name: path.read_bytes() for path in (root / "1").iterdir()} == files


def test_the_newest_step_that_is_sound_on_every_disk_is_restored(pool2: PoolView, tmp_path: Path) -> None:
    pool2.run(save_case, str(tmp_path), [1, 2])
    (shard,) = (tmp_path / "disk1" / "2").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for step, skipped in pool2.run(restore_case, str(tmp_path)):
        assert step == 1
        assert "step 2" in skipped
    (tmp_path / "disk0" / "1" / "commit.json").unlink()
    for step, text in pool2.run(restore_case, str(tmp_path)):
        assert step is None
        assert "step 1 is not committed in the root of every process" in text
