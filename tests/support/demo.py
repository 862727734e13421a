"""Runs the demonstration as a person would, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run_demo"]


def run_demo(folder: Path, *arguments: str) -> str:
    """Run `safepoint demo` and return what it printed, after a check that it ended well."""
    ended = subprocess.run(
        [sys.executable, "-P", "-c", "from safepoint.manager.cli import main; main()", "demo", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return " ".join(ended.stdout.split())  # as if the terminal were wide
