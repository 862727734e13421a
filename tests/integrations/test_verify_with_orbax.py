"""`verify(reader="orbax")`: the real Orbax as a second opinion on our steps, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.orbax import metadata
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import (
    CorruptDataError,
    InvalidArgumentError,
    MissingPackageError,
    ReaderFailedError,
    StepNotFoundError,
)

from support.command import flip_byte, run
from support.orbax_process import needs_orbax

if TYPE_CHECKING:
    from collections.abc import Callable


def state() -> dict[str, Any]:
    tied = torch.randn(4, 3)
    many = {f"w{index}": torch.randn(3, 2) for index in range(20)}
    plain = {"i": 5, "f": 2.5, "flag": True, "text": "实验", "empty text": "", "none": None, "t": (1, 2), "e": {}}
    return {
        "model": torch.nn.Linear(3, 2),
        "many": {**many, "tied": tied, "low": torch.ones(5, dtype=torch.float8_e4m3fn)},
        "few": {
            "w": tied,
            "odd": torch.arange(8, dtype=torch.uint8).view(torch.complex32),
            "no": torch.zeros(0, 3),
            **plain,
        },
        "single": torch.arange(9),
        "json": {**plain, "nan": float("nan")},
    }


def save(root: Path, step: int = 3, file_format: str = "orbax", **changes: Any) -> None:
    with CheckpointManager(root, format=file_format) as manager:
        manager.save(step, {**state(), **changes}, metrics={"loss": float("nan"), "accuracy": 0.5})


def save_badly(root: Path, step: int) -> None:
    """Save as a writer with errors in it would, whose digests are all right."""
    described: Callable[..., bytes] = metadata.array_json
    listed: Callable[..., bytes] = metadata.item_metadata

    def misdescribed(dtype: str, shape: Any, grid: Any, codec: Any = None) -> bytes:
        return described("int32" if list(shape) == [3, 3] else dtype, shape, grid, codec)

    def forgetful(entries: Any, *, use_ocdbt: bool) -> bytes:
        return listed([entry for entry in entries if entry.name != "w7"], use_ocdbt=use_ocdbt)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "array_json", misdescribed)
        patch.setattr(metadata, "item_metadata", forgetful)
        save(root, step, other={"square": torch.ones(3, 3), "fine": torch.ones(2)})


@needs_orbax
def test_orbax_and_we_agree_about_sound_steps_and_every_leaf_that_it_restores_otherwise_is_named(
    tmp_path: Path,
) -> None:
    save(tmp_path, 3)
    save(tmp_path, 4, "orbax_zstd")
    save_badly(tmp_path, 5)
    save(tmp_path, 6)
    data_file = "many/ocdbt.process_0/d/" + "0" * 32
    flip_byte(tmp_path / "6" / "few/w/c/0/0", 5)
    flip_byte(tmp_path / "6" / data_file, 30)
    (tmp_path / "6" / "json" / "metadata").write_text("{}")
    (tmp_path / "6" / "model" / "_METADATA").unlink()
    save(tmp_path, 7)
    (tmp_path / "7" / "metrics" / "metrics").write_text('{"loss": 7.0}')
    save(tmp_path, 8)
    (tmp_path / "8" / "manifest.json").write_text("{}")
    save(tmp_path, 9)
    (tmp_path / "9" / "commit.json").write_text("{}")
    with CheckpointManager(tmp_path) as manager:
        errors = manager.verify(reader="orbax")
    assert [error.step for error in errors] == sorted(error.step or 0 for error in errors)
    assert all(isinstance(error, CorruptDataError) and error.path for error in errors)
    found = {(error.step, error.leaf): error.message for error in errors}
    assert set(found) == {
        *((5, "other.square"), (5, "many.w7")),
        *((6, "few.w"), (6, "many.w1"), (6, "json"), (6, "model"), (6, None)),
        *((7, None), (8, None), (9, None)),
    }
    assert found[5, "other.square"].startswith("Orbax restores int32 [3, 3] with the digest")
    assert found[5, "many.w7"] == "Orbax does not know it"
    assert "Digest mismatch" in found[6, "few.w"]
    assert [error.path for error in errors if error.leaf is None][:2] == [
        str(tmp_path / "6" / data_file),
        str(tmp_path / "7"),
    ]
    assert "metrics" in found[7, None]
    assert not {"jax", "orbax"} & set(sys.modules)


@needs_orbax
def test_the_command_asks_orbax_too(tmp_path: Path) -> None:
    save(tmp_path)
    ended = run("verify", tmp_path / "3", "--reader", "orbax", "--json")
    assert (ended.code, ended.json["steps"]) == (0, [{"step": 3, "sound": True}])


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str | None) -> None:
    """Put something else in the place of Orbax, for the processes that are started from now on."""
    package = tmp_path / "packages" / "orbax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    if source is not None:
        (package / "checkpoint.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))


def ask(root: Path, deadline_secs: float = 30.0) -> None:
    with CheckpointManager(root, deadline_secs=deadline_secs) as manager:
        manager.verify(reader="orbax")


def test_without_orbax_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "root")
    stand_in(tmp_path, monkeypatch, None)
    with pytest.raises(MissingPackageError, match="Orbax is not installed") as caught:
        ask(tmp_path / "root")
    assert caught.value.hint == "pip install 'safepoint[orbax]'"
    assert isinstance(caught.value, ModuleNotFoundError)


def test_a_reader_that_says_nothing_is_ended_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "root")
    note = tmp_path / "pid"
    stand_in(
        tmp_path, monkeypatch, f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(90)"
    )
    with pytest.raises(ReaderFailedError, match=r"no answer for 1\.5 s"):
        ask(tmp_path / "root", deadline_secs=1.5)
    assert not note.exists() or not Path(f"/proc/{note.read_text()}").exists()


def test_the_last_words_of_a_reader_that_ends_are_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "root")
    stand_in(tmp_path, monkeypatch, "raise ValueError('no such device')")
    with pytest.raises(ReaderFailedError, match=r"(?s)ended: .*no such device"):
        ask(tmp_path / "root")


def test_only_steps_that_orbax_reads_are_asked_about(tmp_path: Path) -> None:
    save(tmp_path)
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, {"x": 1})
        with pytest.raises(InvalidArgumentError, match="safetensors, which Orbax does not read") as caught:
            manager.verify(reader="orbax")
        assert caught.value.step == 5
        with pytest.raises(StepNotFoundError):
            manager.verify(4, reader="orbax")
        with pytest.raises(InvalidArgumentError, match="reader"):
            manager.verify(reader="jax")  # type: ignore[arg-type]
