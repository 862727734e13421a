"""Whatever is changed in a committed step, it is not restored, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.checksum import digest
from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.fields import canonical_json
from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import (
    CheckpointError,
    CorruptDataError,
    NoRestorableStepError,
    StepNotFoundError,
    UnsupportedVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def make_state(version: int) -> dict[str, Any]:
    model = {"weight": torch.arange(60, dtype=torch.float32) + version, "bias": torch.full((7,), float(version))}
    return {"model": model, "other": {"weight": torch.arange(60, dtype=torch.float32) * version}, "step": version}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, make_state(1))
        manager.save(2, make_state(2))
    return tmp_path / "root"


def files_of(step: Path) -> list[str]:
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


def assert_refused(root: Path, *, names: str, kind: type[CheckpointError] = CorruptDataError) -> None:
    """Assert that step 2 is refused and named, that step 1 is what there is, and that nothing was deleted."""
    with CheckpointManager(root) as manager:
        problems = manager.verify()
        assert {problem.step for problem in problems} == {2}
        assert any(names in str(problem) for problem in problems), problems
        with pytest.raises(CheckpointError) as caught:
            manager.restore(2)
        assert isinstance(caught.value, kind), caught.value
        assert names in str(caught.value)
        target = make_state(0)
        restored = manager.restore_latest(target)
        assert restored is not None
        assert restored.step == 1
        assert torch.equal(target["model"]["weight"], make_state(1)["model"]["weight"])
        assert any(names in text for text in restored.skipped)
    assert (root / "2").is_dir()


def test_a_sound_root_has_no_problems(root: Path) -> None:
    with CheckpointManager(root) as manager:
        assert manager.verify() == manager.verify(1) == []
        with pytest.raises(StepNotFoundError) as caught:
            manager.verify(3)
    assert caught.value.available == (1, 2)


def test_any_flipped_bit_anywhere_is_found_and_its_file_named(root: Path) -> None:
    manager = CheckpointManager(root)
    tried = 0
    for name in files_of(root / "2"):
        path = root / "2" / name
        original = path.read_bytes()
        # Every byte of the record and of tensors; of the manifest one in three, of the padding of headers one in 31.
        last = len(original) if name.endswith(".json") else original.find(b"   ")
        positions = [
            i
            for i in range(len(original))
            if i % 31 == 0 or name == "commit.json" or i >= 4096 or (i % 3 == 0 and i < last)
        ]
        for position in positions:
            changed = bytearray(original)
            changed[position] ^= 1 << position % 8
            path.write_bytes(changed)
            problems = manager.verify(2)
            assert problems, (name, position)
            assert all(isinstance(problem, CheckpointError) for problem in problems)
            assert any(name in str(problem) for problem in problems), (name, position, problems)
            tried += 1
        path.write_bytes(original)
    assert manager.verify() == []
    manager.close()
    assert tried > 1200


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


DATA = "model/model.safetensors"


def truncate(step: Path) -> None:
    data = (step / DATA).read_bytes()
    (step / DATA).write_bytes(data[:-1])


def swap(step: Path) -> None:
    first, second = step / DATA, step / "swapped"
    other = step.parent / "1" / DATA  # of the same size
    assert first.stat().st_size == other.stat().st_size
    shutil.copyfile(other, second)
    second.replace(first)


def grow(step: Path) -> None:
    with (step / DATA).open("ab") as file:
        file.write(b"\0")


def replace_by_directory(step: Path) -> None:
    (step / DATA).unlink()
    (step / DATA).mkdir()


def edit_manifest(step: Path) -> None:
    path = step / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"float32"', b'"float64"', 1))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "flipped in the data": (lambda step: flip(step / DATA, -3), "model.safetensors"),
    "flipped in the header": (lambda step: flip(step / DATA, 11), "model.safetensors"),
    "flipped in the padding": (lambda step: flip(step / DATA, 4000), "model.safetensors"),
    "flipped in the manifest": (lambda step: flip(step / "manifest.json", 200), "manifest.json"),
    "flipped in the record": (lambda step: flip(step / "commit.json", 60), "commit.json"),
    "truncated": (truncate, "model.safetensors"),
    "grown": (grow, "model.safetensors"),
    "another step's file of the same size": (swap, "model.safetensors"),
    "missing file": (lambda step: (step / DATA).unlink(), "model.safetensors"),
    "missing manifest": (lambda step: (step / "manifest.json").unlink(), "manifest.json"),
    "empty record": (lambda step: (step / "commit.json").write_bytes(b""), "commit.json"),
    "directory in place of a file": (replace_by_directory, "model.safetensors"),
    "edited manifest": (edit_manifest, "manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name_and_the_step_before_is_restored(root: Path, damage: str) -> None:
    act, names = DAMAGES[damage]
    act(root / "2")
    assert_refused(root, names=names)


def test_equal_sized_files_of_one_step_cannot_be_swapped(root: Path) -> None:
    with CheckpointManager(root) as manager:
        manager.save(3, {"a": {"x": torch.arange(9)}, "b": {"x": torch.arange(9) + 1}})
    a, b = root / "3" / "a" / "a.safetensors", root / "3" / "b" / "b.safetensors"
    assert a.stat().st_size == b.stat().st_size
    content = a.read_bytes(), b.read_bytes()
    a.write_bytes(content[1])
    b.write_bytes(content[0])
    with CheckpointManager(root) as manager:
        assert {problem.path for problem in manager.verify(3)} == {str(a), str(b)}
        with pytest.raises(CorruptDataError):
            manager.restore(3)


def rewrite_record(folder: Path, **changes: Any) -> None:
    """Change fields of a record and give it a digest that fits, as somebody would who means it."""
    value = json.loads((folder / "commit.json").read_bytes())
    value.update(changes)
    value.pop("digest")
    value["digest"] = digest(canonical_json(value))
    (folder / "commit.json").write_bytes(canonical_json(value))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"version": 3}, UnsupportedVersionError),
        ({"version": 10**30}, CheckpointError),
        ({"version": "1"}, CheckpointError),
        ({"step": 3}, CorruptDataError),
        ({"attempt": "../../../etc"}, CorruptDataError),
        ({"manifest_bytes": 1 << 62}, CorruptDataError),
        ({"manifest_digest": "0" * 32}, CorruptDataError),
        ({"num_leaves": -1}, CorruptDataError),
        ({"sequence": 2.5}, CorruptDataError),
    ],
)
def test_an_edited_record_with_a_fitting_digest_is_refused(
    root: Path, changes: dict[str, Any], kind: type[CheckpointError]
) -> None:
    rewrite_record(root / "2", **changes)
    with CheckpointManager(root) as manager:
        (problem,) = manager.verify(2)
        assert isinstance(problem, kind), problem
        with pytest.raises(kind):
            manager.restore(2)
        restored = manager.restore_latest()
        assert restored is not None
        assert restored.step == 1


def test_a_file_that_the_manifest_does_not_name_is_reported_and_never_read(root: Path) -> None:
    (root / "2" / "model" / "more.safetensors").write_bytes(b"x")
    (root / "2" / "pickle.pt").write_bytes(b"x")
    with CheckpointManager(root) as manager:
        problems = manager.verify(2)
        assert sorted(str(problem.path).rsplit("/", maxsplit=1)[-1] for problem in problems) == [
            "more.safetensors",
            "pickle.pt",
        ]
        restored = manager.restore(2)
    assert restored.state is not None
    assert set(restored.state) == {"model", "other", "step"}


def test_when_no_step_is_sound_all_are_named_and_none_is_deleted(root: Path) -> None:
    flip(root / "1" / DATA, -1)
    (root / "2" / "manifest.json").unlink()
    before = sorted(path for path in root.rglob("*") if path.name != "lock")
    with CheckpointManager(root) as manager, pytest.raises(NoRestorableStepError) as caught:
        manager.restore_latest(make_state(0))
    assert caught.value.problems is not None
    assert len(caught.value.problems) == 2
    assert sorted(path for path in root.rglob("*") if path.name != "lock") == before


class _Meddler(LocalStorage):
    """Changes a data file behind its writer's back, when the writer has finished."""

    def __init__(self, root: Any, meddle: Callable[[Path], None]) -> None:
        super().__init__(root)
        self._meddle = meddle

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        data = self.root / path / "model.safetensors"
        if data.exists():
            self._meddle(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip_header(path: Path) -> None:
    flip(path, 5)


def flip_data(path: Path) -> None:
    flip(path, path.stat().st_size - 1)


@pytest.mark.parametrize("meddle", [cut, lambda path: path.unlink(), flip_header, flip_data])
def test_a_save_whose_files_are_not_as_planned_does_not_commit(
    root: Path, meddle: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safepoint.manager.session.LocalStorage", lambda path: _Meddler(path, meddle))
    with CheckpointManager(root) as manager:
        with pytest.raises(CorruptDataError) as caught:
            manager.save(3, make_state(3))
        assert caught.value.outcome == "not_committed"
        assert "model.safetensors" in str(caught.value)
        assert manager.latest_step() == 2
    assert {path.name for path in root.iterdir()} == {"1", "2", ".safepoint"}


def test_passing_over_a_damaged_record_is_logged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(root / "2" / "commit.json", 60)
    with CheckpointManager(root) as manager:
        restored = manager.restore_latest()
    assert restored is not None
    assert restored.step == 1
    (told,) = [record.getMessage() for record in caplog.records if "passing over" in record.getMessage()]
    assert "commit.json" in told


def test_a_record_never_speaks_for_another_step(root: Path) -> None:
    record = CommitRecord.from_bytes((root / "2" / "commit.json").read_bytes(), path="")
    assert record.step == 2
    shutil.copytree(root / "2", root / "9")
    with CheckpointManager(root) as manager:
        (problem,) = manager.verify(9)
        assert "named 9" in str(problem)
        assert manager.latest_step() == 2
