"""Every format, saved by some number of processes: restored by any other, and read whole by its own readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager

from support.matrix import cases
from support.sharded_states import LEAVES, check_state, expected, make_state

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import ProcessPool

MESHES = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2)}


def save_case(_rank: int, root: str, file_format: str, mode: Any, mesh: tuple[int, ...], how: str) -> str:
    with CheckpointManager(root, format=file_format, mode=mode, deadline_secs=20.0) as manager:
        result = manager.save(7, make_state(mesh), blocking=how == "blocking")
    return str(result.mode)


def restore_case(_rank: int, root: str, file_format: str, mesh: tuple[int, ...]) -> None:
    state = make_state(mesh, zeros=True)
    with CheckpointManager(root, format=file_format, deadline_secs=20.0) as manager:
        assert manager.restore_latest(state) is not None
    check_state(state)


@pytest.mark.parametrize(
    ("file_format", "mode", "count"),
    cases("tests/multiprocess/test_formats.py::test_what_some_processes_saved_any_other_number_restores"),
)
def test_what_some_processes_saved_any_other_number_restores(
    process_pool: ProcessPool, tmp_path: Path, file_format: str, mode: str, count: int
) -> None:
    how = "behind" if count == 2 else "blocking"
    args = (str(tmp_path), file_format, mode, MESHES[count], how)
    assert set(process_pool.run(save_case, *args, num_processes=count)) == {mode}
    for others in (1, 3):
        process_pool.run(restore_case, str(tmp_path), file_format, MESHES[others], num_processes=others)


@pytest.mark.parametrize(
    ("file_format", "mode", "count"),
    cases("tests/multiprocess/test_formats.py::test_torch_loads_what_some_processes_held_in_parts"),
)
def test_torch_loads_what_some_processes_held_in_parts(
    process_pool: ProcessPool, tmp_path: Path, file_format: str, mode: str, count: int
) -> None:
    saved = process_pool.run(
        save_case, str(tmp_path), file_format, "auto", MESHES[count], "blocking", num_processes=count
    )
    assert set(saved) == {mode}
    found = torch.load(tmp_path / "7" / "leaves" / "leaves.pt", weights_only=True)
    assert sorted(found) == sorted(LEAVES)
    for name, leaf in found.items():
        assert leaf.dtype == LEAVES[name][1]
        assert torch.equal(leaf, expected(name)), name
    assert torch.load(tmp_path / "7" / "step_count" / "step_count.pt", weights_only=True) == 17
