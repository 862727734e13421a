"""Steps that earlier versions of the layout wrote restore bit for bit, for as long as that version is read."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.manager import CheckpointManager

GOLDEN = Path(__file__).parent / "golden"
_spec = importlib.util.spec_from_file_location("make_golden", Path(__file__).parent / "make_golden.py")
assert _spec is not None
assert _spec.loader is not None
make_golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_golden)
ROOTS = sorted(path for version in GOLDEN.iterdir() for path in version.iterdir())


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual, expected), where
    elif isinstance(expected, np.ndarray | np.generic):
        assert type(actual) is type(expected), where
        assert actual.dtype == expected.dtype, where
        assert np.array_equal(actual, expected), where
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert type(actual) is type(expected), where
        assert len(actual) == len(expected), where
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{where}.{index}")
    else:
        assert type(actual) is type(expected), where
        assert repr(actual) == repr(expected), where


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {
        **state,
        "model": dict(state["model"].state_dict()),
        "optimizer": state["optimizer"].state_dict(),
        "own": state["own"].value,
    }


def emptied(state: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.zero_()
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), lr=9.0)
    for name in ("tied", "scalar", "flags"):
        state["arrays"][name].zero_()
    state["numpy"] = {"table": np.zeros((2, 3)), "count": np.int8(0)}
    for name in state["values"]:
        state["values"][name] = None
    state["own"].value = {"position": 0}
    return state


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: f"{root.parent.name}-{root.name}")
def test_a_golden_step_restores_bit_for_bit(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(root, copy)  # opening a root leaves files of its own there
    expected = plain(make_golden.make_state(root.name))
    target = emptied(make_golden.make_state(root.name))
    with CheckpointManager(copy) as manager:
        assert manager.verify() == []
        restored = manager.restore_latest(target)
        host = manager.restore(make_golden.STEP).state
    assert restored is not None
    assert restored.metrics == {"loss": 0.5}
    assert_same(plain(target), expected)
    assert host is not None
    assert_same(host["arrays"], expected["arrays"])
    assert_same(host["values"], expected["values"])


def test_the_current_version_has_golden_steps_of_every_kind() -> None:
    expected = {(f"v{make_golden.version_of(kind)}", kind) for kind in make_golden.KINDS}
    assert expected <= {(root.parent.name, root.name) for root in ROOTS}
