"""docs/examples/xla_fsdp.py on four CPU devices: stopped and gone on with."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.source_tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.timeout(240),
]

SCRIPT = f"""
import json, runpy
import torch_xla.runtime as xr

xr.use_spmd()
train = runpy.run_path({str(ROOT / "docs" / "examples" / "xla_fsdp.py")!r})["train"]
whole = train("whole", num_steps=8)
train("run", num_steps=4)
print(json.dumps([whole, train("run", num_steps=8)]))
"""


def test_the_example_goes_on_bit_for_bit(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        cwd=tmp_path,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    whole, again = json.loads(ended.stdout.splitlines()[-1])

    assert list(again) == ["4", "5", "6", "7"]
    assert again == {step: whole[step] for step in again}
