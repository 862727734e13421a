"""The format that docs/formats.md shows, as a package of its own: registered, under the contract, and used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

USED = """
import torch
from safepoint.manager import CheckpointManager, convert
from safepoint.manager.cli.converting import target_formats

state = {"model": {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3, dtype=torch.bfloat16)}, "n": 5}
for mode in ("consolidated", "sharded"):
    with CheckpointManager(mode, format="raw", mode=mode) as manager:
        manager.save(1, state)
        assert str(manager.restore(1).state) == str(state)
        assert manager.verify() == []
convert("sharded", "other", format="torch")
convert("other", "back", format="raw")
with CheckpointManager("back") as manager:
    assert str(manager.restore(1).state) == str(state)
assert "raw" in target_formats()
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    section = (ROOT / "docs" / "formats.md").read_text().partition("## A format of your own")[2].partition("\n## ")[0]
    module, contract = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (entry,) = re.findall(r"```toml\n.*\n(.*)\n```", section)
    site = tmp_path / "site"
    info = site / "raw_format-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "raw_format.py").write_text(module)
    (site / "test_raw_format.py").write_text(f"from raw_format import RAW\n{contract}")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raw-format\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[safepoint.formats]\n{entry.replace(chr(34), '')}\n")
    return site


def test_the_documents_format_passes_the_contract_and_the_manager_writes_it(package: Path, tmp_path: Path) -> None:
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    commands = (
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(package), str(package)],
        [sys.executable, "-c", USED],
    )
    (tmp_path / "runs").mkdir()
    started = [
        subprocess.Popen(
            command,
            cwd=tmp_path / "runs",
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    outputs = [process.communicate(timeout=90)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert "6 passed" in outputs[0]


def test_importing_the_contract_does_not_import_pytest() -> None:
    code = "import sys, safepoint.formats.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
