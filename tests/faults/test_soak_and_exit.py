"""Many saves leave nothing behind in the process, and a program may end right after one, in whatever way."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from safepoint.manager import CheckpointManager

from support.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_two_hundred_async_saves_level_off(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "support" / "soak.py"), str(tmp_path / "root"), "200"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    *seen, last = json.loads(ended.stdout)
    for name in ("threads", "descriptors"):
        values = [look[name] for look in seen]
        assert max(values) <= min(values) + 6, values  # some come and go with a deletion
        assert last[name] <= min(values), values
    assert max(look["entries"] for look in seen) <= 3 + 1 + 3  # kept, control directory, and what is being deleted
    assert last["entries"] == 4
    assert last["control_entries"] <= 3
    assert seen[-1]["rss_bytes"] - seen[2]["rss_bytes"] < 16 << 20


PROGRAM = """
import sys, torch
from safepoint.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1], deadline_secs=20.0)
state = {{"w": torch.arange(200_000), "step": 7}}
{body}
"""

ENDS = {
    "last statement": ("manager.save(7, state, blocking=False)", 0),
    "last statement, blocking": ("manager.save(7, state)", 0),
    "sys.exit": ("manager.save(7, state, blocking=False); sys.exit(5)", 5),
    "exception": ("manager.save(7, state, blocking=False); raise KeyError('training went wrong')", 1),
    "exception inside with": ("with manager:\n    manager.save(7, state, blocking=False)\n    raise KeyError('x')", 1),
    "the state is changed at once": ("manager.save(7, state, blocking=False); state['w'].zero_()", 0),
    "manager is deleted": ("manager.save(7, state, blocking=False); del manager", 0),
    "in a function": ("def f(m):\n    m.save(7, state, blocking=False)\nf(manager); del manager, f", 0),
    "in a thread": (
        "import threading; threading.Thread(target=lambda: manager.save(7, state, blocking=False)).start()",
        0,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_with_a_save_has_saved(tmp_path: Path, end: str) -> None:
    body, status = ENDS[end]
    command = [sys.executable, "-W", "error", "-c", PROGRAM.format(body=body), str(tmp_path / "root")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == status, ended.stderr
    with CheckpointManager(tmp_path / "root") as manager:
        state = manager.restore(7).state
        assert state is not None
        assert state["step"] == 7
        assert int(state["w"][-1]) == 199_999
        assert manager.verify() == []
        manager.save(8, {"x": 1})  # nobody owns the root any more
    assert {path.name for path in (tmp_path / "root").iterdir()} == {"7", "8", ".safepoint"}
