from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.demo import run_demo

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_sharded_training_killed_in_a_save_goes_on_with_fewer_processes(tmp_path: Path) -> None:
    told = run_demo(
        tmp_path,
        "--processes",
        "4",
        "--restore-processes",
        "2",
        "--steps",
        "6",
        "--save-every",
        "2",
        "--folder",
        "kept",
    )

    assert "4 processes with FSDP2" in told
    assert "model and optimizer were restored bit for bit" in told
    assert "after the restart on 2 processes, all 2 losses are those of the uninterrupted run to" in told
    assert sorted(path.name for path in (tmp_path / "kept" / "run").iterdir() if path.name.isdigit()) == ["4", "6"]
