"""A part of the fault sweep over whole managers; `sweep.py` is all of it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from support.source_tree import ROOT


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_fault_at_any_call_of_any_process_costs_no_committed_step_and_leaves_nothing_behind() -> None:
    command = [sys.executable, "-m", "tests.faults.sweep", "--one-each", "--jobs", "6"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=380)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    met = re.search(r"^(\d+) faults met in (\d+) points: (.*)$", ended.stdout, re.MULTILINE)
    assert met is not None
    # Two threads of one process may swap two calls, so that a fault falls on one that it cannot make fail.
    assert int(met[1]) > 0.9 * int(met[2]) > 180
    assert all(kind in met[3] for kind in ("EIO", "ENOSPC", "EACCES", "ETIMEDOUT", "lost", "stall", "stop", "kill"))
