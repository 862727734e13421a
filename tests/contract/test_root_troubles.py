"""What goes wrong in a root of any kind: saves that fail or are killed, owners, damage, and others' things."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager import KeepLast, session
from safepoint.manager.errors import (
    AsyncSaveError,
    CorruptDataError,
    NoRestorableStepError,
    RootInUseError,
    StepExistsError,
    StorageError,
    StructureMismatchError,
    UnsupportedValueError,
)

from support.faulty_storage import FaultyStorage

if TYPE_CHECKING:
    from support.roots import Root

DATA = "x/x.safetensors"


def test_an_unsupported_value_is_named_before_anything_is_written(root: Root) -> None:
    with root.manager() as manager:
        with pytest.raises(UnsupportedValueError, match="callback") as caught:
            manager.save(1, {"model": torch.ones(2), "hooks": {"callback": lambda: None}})
        assert caught.value.outcome == "not_committed"
        assert manager.steps() == []
    root.check_holds()


@pytest.fixture
def refusing(root: Root, monkeypatch: pytest.MonkeyPatch) -> FaultyStorage:
    """The storage of the next manager: it refuses one more file after `refuse_next`."""
    storage = FaultyStorage(root.storage, only={"writer.finish"})
    monkeypatch.setattr(session, "_open_root", lambda _: storage)
    return storage


def refuse_next(storage: FaultyStorage) -> None:
    storage._at = storage.num_calls + 1


def test_a_save_that_the_storage_refuses_leaves_nothing_and_the_next_one_works(
    root: Root, refusing: FaultyStorage
) -> None:
    with root.manager() as manager:
        manager.save(1, {"x": torch.ones(10)})
        refuse_next(refusing)
        with pytest.raises(StorageError, match="injected") as caught:
            manager.save(2, {"x": torch.ones(10)})
        assert (caught.value.outcome, caught.value.step) == ("not_committed", 2)
        root.check_holds(1)
        assert manager.save(2, {"x": torch.ones(10)}).saved
    root.check_holds(1, 2)


def test_a_failed_async_save_surfaces_once_at_the_next_save(root: Root, refusing: FaultyStorage) -> None:
    with root.manager() as manager:
        manager.save(5, {"x": 1})
        refuse_next(refusing)
        manager.save(10, {"x": torch.ones(10)}, blocking=False)
        manager._wait_in_flight()
        with pytest.raises(AsyncSaveError, match="step 10") as caught:
            manager.save(20, {"x": 1})
        assert caught.value.step == 10
        assert caught.value.outcome == "not_committed"
        assert isinstance(caught.value.__cause__, StorageError)
        assert [info.step for info in manager.steps()] == [5]
        with pytest.raises((UnsupportedValueError, AsyncSaveError)):
            manager.save(20, {"x": lambda: 0}, blocking=False)
        assert manager.save(30, {"x": 1}).saved
    root.check_holds(5, 30)


def test_debris_of_a_killed_save_is_swept_by_the_next_owner(root: Root) -> None:
    with root.manager() as manager:
        manager.save(1, {"x": 1})
    killed = [f"{root.committer.begin(step, attempt)}/half" for step, attempt in ((1, "a" * 16), (3, "b" * 16))]
    for path in killed:
        root.storage.put(path, b"half")
    root.write(f".trash-{'c' * 16}/half", b"deleted")
    with root.manager() as manager:
        restored = manager.restore_latest({"x": 0})
        assert restored is not None
        assert restored.step == 1
        assert set(killed) <= root.files()  # reading owns nothing and sweeps nothing
        manager.save(3, {"x": 3})
    root.check_holds(1, 3)


def test_a_second_manager_on_the_same_root_may_read_but_not_save(root: Root) -> None:
    with root.manager() as first, root.manager() as second:
        first.save(1, {"x": 1})
        target = {"x": 0}
        assert second.restore_latest(target) is not None
        assert target["x"] == 1
        with pytest.raises(RootInUseError, match=str(os.getpid())) as caught:
            second.save(2, {"x": 2})
        assert caught.value.outcome == "not_committed"
        first.save(3, {"x": 3})
        first.close()
        assert second.save(4, {"x": 4}).saved
    root.check_holds(1, 3, 4)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_restore_latest_falls_back_past_a_damaged_step_and_names_it(
    root: Root, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with root.manager() as manager:
        manager.save(1, {"x": torch.arange(1000)})
        manager.save(2, {"x": torch.arange(1000) + 1})
    files = root.files_of(2)
    data, manifest = f"{files}/{DATA}", f"{files}/manifest.json"
    if damage == "flip":
        root.flip(data)
    elif damage == "truncate":
        root.storage.replace(data, root.read(data)[:-1])
    elif damage == "remove":
        root.storage.delete(data)
    else:
        root.storage.replace(manifest, root.read(manifest).replace(b"int64", b"int32"))
    with root.manager(keep=KeepLast(1)) as manager:
        target = {"x": torch.zeros(1000, dtype=torch.int64)}
        restored = manager.restore_latest(target)
        assert restored is not None
        assert restored.step == 1
        assert torch.equal(target["x"], torch.arange(1000))
        assert "step 2" in restored.skipped[0]
        assert "step 2" in caplog.text
        with pytest.raises(CorruptDataError) as caught:
            manager.restore(2, {"x": torch.zeros(1000, dtype=torch.int64)})
        assert caught.value.step == 2 or "2/" in str(caught.value.path)
        assert bool(caught.value.target_modified) == (damage == "flip")
        (error,) = manager.verify()
        assert error.path == root.storage.describe(manifest if damage == "manifest" else data)
    root.check_holds(1, 2)  # a damaged step is deleted by nobody


def test_committed_but_none_sound_is_an_error_and_nothing_is_deleted(root: Root) -> None:
    with root.manager() as manager:
        manager.save(1, {"x": torch.arange(10)})
    root.storage.delete(f"{root.files_of(1)}/{DATA}")
    before = root.contents()
    with root.manager() as manager, pytest.raises(NoRestorableStepError, match="step 1"):
        manager.restore_latest({"x": torch.zeros(10, dtype=torch.int64)})
    assert root.contents() == before


def test_a_fallback_to_a_step_that_does_not_fit_says_that_the_target_was_written_to(root: Root) -> None:
    with root.manager() as manager:
        manager.save(1, {"x": torch.arange(7)})
        manager.save(2, {"x": torch.arange(1000)})
    root.flip(f"{root.files_of(2)}/{DATA}")
    with root.manager() as manager, pytest.raises(StructureMismatchError) as caught:
        manager.restore_latest({"x": torch.zeros(1000, dtype=torch.int64)})
    assert any("damaged" in note for note in caught.value.__notes__)


def test_junk_foreign_and_half_written_directories_are_neither_listed_nor_touched(root: Root) -> None:
    for name in ("007", "+5", "-1", "5 ", "notes", "12", "٣", "9.tmp-short", "checkpoint-100"):
        root.write(f"{name}/keep.me", name.encode())
    root.write("8", b"a file with the name of a step")
    before = root.contents()
    with root.manager(keep=KeepLast(1)) as manager:
        assert manager.restore_latest({"x": 0}) is None
        manager.save(1, {"x": 1})
        manager.save(2, {"x": 2})
        assert [info.step for info in manager.steps()] == [2]
        for step in (8, 12):
            with pytest.raises(StepExistsError):
                manager.save(step, {"x": 3})
    after = root.contents()
    assert {name: after.get(name) for name in before} == before
    assert root.names() - {path.partition("/")[0] for path in before} == {"2"}
