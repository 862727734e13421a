"""The guide's example of a tracker, with real TensorBoard: its snippets run, and the curves are in its log."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.snippets import run_snippets

if TYPE_CHECKING:
    from pathlib import Path


def test_the_curves_of_the_guide_are_in_tensorboards_log(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_snippets("docs/tensorboard.md", tmp_path)

    log = accumulator.EventAccumulator(str(tmp_path / "empty" / "logs"))
    log.Reload()
    assert set(log.Tags()["scalars"]) == {"checkpoint/blocked_secs", "checkpoint/secs", "checkpoint/bytes"}
    assert [scalar.step for scalar in log.Scalars("checkpoint/secs")] == [0, 10, 20]
    assert all(scalar.value > 0 for scalar in log.Scalars("checkpoint/blocked_secs"))
