"""`safepoint report` on a root in a bucket: what it says of one in a directory, from the same records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.formats.storage import open_storage
from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.errors import UnsupportedValueError

from support.command import run
from support.page_elements import Elements

if TYPE_CHECKING:
    from pathlib import Path

    from support.object_servers import ObjectServer


def train(root: str) -> None:
    """Two runs: one fails to save a step; the other passes over a damaged step, restores, and saves once."""
    state = {"model": {"layer": torch.zeros(100)}, "step": 3}
    with CheckpointManager(root, keep=KeepLast(3)) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state, metrics={"loss": 1 / step})
        with pytest.raises(UnsupportedValueError):
            manager.save(5, {"model": print})
    storage = open_storage(root)
    attempt = next(entry.name for entry in storage.list("4") if entry.is_dir)
    storage.replace(f"4/{attempt}/manifest.json", b"{")
    with CheckpointManager(root, keep=KeepLast(3)) as manager:
        restored = manager.restore_latest()
        assert restored is not None
        assert restored.step == 3
        manager.save(6, state)


def test_the_report_of_a_bucket_has_timeline_restores_and_faults(
    object_server: ObjectServer, unused_prefix: str, tmp_path: Path
) -> None:
    root = object_server.url(unused_prefix)
    train(root)
    keys = {entry.name for entry in open_storage(root).list("")}

    done = run("report", root, "-o", tmp_path / "page.html")
    listed = run("report", root, "-o", tmp_path / "again.html", "--json").json
    page = Elements((tmp_path / "page.html").read_text())

    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("page.html: 3 steps, 1 restore, 3 faults")
    assert root in page.text
    for save in listed["saves"]:  # the timeline: also of what was removed since
        assert f"step {save['step']} · " in page.text
    assert [(save["step"], save["is_there"], save["kept"]) for save in listed["saves"]] == [
        (1, False, []),
        (2, False, []),
        (3, True, ["last 3"]),
        (4, True, ["last 3"]),
        (6, True, ["latest", "last 3"]),
    ]
    assert all(save["write_secs"] > 0 and save["commit_secs"] > 0 for save in listed["saves"])
    assert [(one["step"], one["passed_over"]) for one in listed["restores"]] == [(3, 1)]
    assert [(fault["kind"], fault["step"]) for fault in listed["faults"]] == [
        ("save failed", 5),
        ("passed over by a restore", 4),
        ("unreadable now", 4),
    ]
    assert "The policy: KeepLast(3)." in page.text
    assert "UnsupportedValueError" in page.text
    assert "Restores, the newest first" in page.text
    assert "model.layer" in page.text  # of the latest step's manifest
    assert "process 0" in page.text
    assert {entry.name for entry in open_storage(root).list("")} == keys  # nothing was changed
