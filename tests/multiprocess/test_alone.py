"""`store="alone"`: processes of one job that save by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import PoolView


def test_a_process_that_is_alone_on_purpose_meets_nobody(pool2: PoolView, tmp_path: Path) -> None:
    assert pool2.run(case_alone, str(tmp_path), ranks=[1]) == [("consolidated", [3], {"x": 1})]


def case_alone(rank: int, root: str) -> tuple[str | None, list[int], object]:
    with CheckpointManager(f"{root}/{rank}", store="alone") as manager:
        result = manager.save(3, {"x": rank}, blocking=False)
        manager.wait()
        return result.mode, [info.step for info in manager.steps()], manager.restore(3).state
