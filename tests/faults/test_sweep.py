"""A part of the fault sweep over whole managers; `sweep.py` is all of it."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "used"], "--keep: used is not an empty directory"),
        (["--keep", "used/job0.log"], "--keep: used/job0.log is not an empty directory"),
        (["--kinds", "EIO,typhoon"], "--kinds: there is no typhoon"),
        (["--only", "nothing-like-it"], "--only: no scenario's name contains 'nothing-like-it'"),
        (["--jobs", "0"], "--every and --jobs count from 1"),
    ],
)
def test_a_sweep_refuses_a_directory_with_something_in_it_and_what_it_does_not_know(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "job0.log").write_text('{"problems": []}\n')
    monkeypatch.setattr(sys, "path", list(sys.path))
    sweep = runpy.run_path(str(ROOT / "tests" / "faults" / "sweep.py"), run_name="sweep")

    with pytest.raises(SystemExit) as ended:
        sweep["main"](arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["job0.log"]
