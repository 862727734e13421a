"""The manager on one process, with what only a directory can show: times, the umask, a quota, a file in its place.

What it promises on a root of any kind is in tests/contract/test_root_*.py.
"""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from safepoint.manager import CheckpointManager
from safepoint.manager.errors import InvalidArgumentError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_copying_or_renaming_the_root_with_other_times_changes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "a") as manager:
        for step in (5, 7, 6):
            manager.save(step, {"x": torch.full((4,), step)})
    shutil.copytree(tmp_path / "a", tmp_path / "实验 é", copy_function=shutil.copy)
    for age, step in enumerate((6, 7, 5)):
        for path in [tmp_path / "实验 é" / str(step), *(tmp_path / "实验 é" / str(step)).rglob("*")]:
            os.utime(path, (1_000_000 + age, 1_000_000 + age))
    with CheckpointManager(tmp_path / "实验 é") as manager:
        target = {"x": torch.zeros(4, dtype=torch.int64)}
        restored = manager.restore_latest(target)
    assert restored is not None
    assert restored.step == 6
    assert target["x"].tolist() == [6, 6, 6, 6]


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="directory"):
        CheckpointManager(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("root", [None, 3, b"bytes", "", "nul\0"])
def test_a_root_that_is_no_path_is_refused(root: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="root must be"):
        CheckpointManager(root)


@contextmanager
def small_files_only(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse larger files, as a quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_save_above_a_quota_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.ones(10)})
        with small_files_only(100_000), pytest.raises(StorageError) as caught:
            manager.save(2, {"x": torch.ones(100_000)})
        assert caught.value.outcome == "not_committed"
        assert caught.value.step == 2
        assert {path.name for path in tmp_path.iterdir()} == {"1", ".safepoint"}
        assert manager.save(2, {"x": torch.ones(100_000)}).saved


def test_files_follow_the_umask_and_are_read_by_safetensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    before = os.umask(0o027)
    try:
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, {"model": model})
    finally:
        os.umask(before)
    path = tmp_path / "run" / "1" / "model" / "model.safetensors"
    assert path.stat().st_mode & 0o777 == 0o640
    loaded = load_file(path)
    assert torch.equal(loaded["weight"], model.weight)
