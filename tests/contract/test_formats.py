"""Every format keeps the contract, and others can register theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from safepoint.formats.orbax.layout import ORBAX, ORBAX_ZSTD
from safepoint.formats.registry import format_names, get_format
from safepoint.formats.safetensors import SafetensorsFormat
from safepoint.formats.testing import FormatContract
from safepoint.formats.torch_file import TorchFormat
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path


class TestSafetensors(FormatContract):
    file_format = SafetensorsFormat()


class TestOrbax(FormatContract):
    file_format = ORBAX


class TestOrbaxZstd(FormatContract):
    file_format = ORBAX_ZSTD


class TestTorch(FormatContract):
    file_format = TorchFormat()


def register(folder: Path, name: str, target: str) -> None:
    """Make an installed package that registers a format."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[safepoint.formats]\n{name} = {target}\n")


def test_a_package_registers_a_format_that_the_manager_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_formats.py").write_text(
        "from safepoint.formats.safetensors import SafetensorsFormat\n"
        "class Mine(SafetensorsFormat):\n    name = 'mine'\n    suffix = '.mine'\n"
        "made = Mine()\n"
    )
    register(tmp_path, "mine", "mine_formats:made")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "mine" in format_names()
    with CheckpointManager(tmp_path / "root", format="mine") as manager:
        manager.save(1, {"x": 5, "y": {}})
        assert manager.restore(1).state == {"x": 5, "y": {}}


@pytest.mark.parametrize("target", ["not_there:made", "json:dumps"])
def test_a_broken_registration_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    name = f"broken{abs(hash(target))}"
    register(tmp_path, name, target)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidArgumentError, match=name):
        get_format(name)


def test_an_unknown_format_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(InvalidArgumentError, match=r"Formats: orbax, orbax_zstd, safetensors, torch\."):
        get_format("nope")
