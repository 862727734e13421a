from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from support.demo import run_demo

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch_xla")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_killed_in_a_save_ends_on_xla_as_if_it_had_not_been(tmp_path: Path) -> None:
    told = run_demo(tmp_path, "--steps", "9", "--save-every", "3", "--folder", "kept", "--json")
    claims = json.loads(told)["claims"]

    assert [claim["holds"] for claim in claims] == [True] * 6
    assert "restored bit for bit" in told
    assert "the processes died by SIGKILL while writing step 9" in told
    assert "after the restart, all 3 losses are those of the uninterrupted run, bit for bit" in told
    assert sorted(path.name for path in (tmp_path / "kept" / "run").iterdir() if path.name.isdigit()) == ["6", "9"]
