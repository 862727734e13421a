"""What a manager promises on any root: saved, restored, retained, pinned, owned, copied, refused in the same way."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import open_storage
from safepoint.manager import CheckpointManager, KeepLast, convert
from safepoint.manager.copying import copy_steps
from safepoint.manager.errors import (
    AsyncSaveError,
    CorruptDataError,
    NoRestorableStepError,
    RootInUseError,
    StepExistsError,
    StepNotFoundError,
    UnsupportedValueError,
)
from safepoint.manager.opened import list_checkpoints
from safepoint.manager.pins import pin
from safepoint.manager.removing import plan_sweep, remove_step, sweep
from safepoint.manager.unsettled import read_marks

from support.interrupting import Interrupting

if TYPE_CHECKING:
    from pathlib import Path

    from safepoint.formats.storage import Storage

__all__ = ["RootContract", "make_state", "version_of"]


def make_state(version: int) -> dict[str, Any]:
    """Return a state that tells by each of its parts which one it is."""
    model = torch.nn.Linear(4, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float(version))
    return {"model": model, "half": torch.full((33, 9), float(version), dtype=torch.bfloat16), "notes": {"n": version}}


def version_of(state: Any) -> int:
    """Return which state this is, every part of it."""
    version = state["notes"]["n"]
    model = state["model"]
    values = model.state_dict() if isinstance(model, torch.nn.Module) else model
    assert all((tensor == version).all() for tensor in (*values.values(), state["half"]))
    return int(version)


class RootContract:
    """Inherit, and give a fixture `root`: a path or URL where nothing is yet; `options` are the manager's there."""

    options: dict[str, Any] = {}  # noqa: RUF012 - never changed

    def open(self, root: str, **options: Any) -> CheckpointManager:
        return CheckpointManager(root, deadline_secs=30.0, **self.options, **options)

    def save(self, root: str, *steps: int, **options: Any) -> None:
        with self.open(root, **options) as manager:
            for step in steps:
                manager.save(step, make_state(step))

    def clean(self, root: str, steps: set[int]) -> Storage:
        """Check that the root holds these steps, and nothing of any other attempt."""
        storage = open_storage(root)
        assert {entry.name for entry in storage.list("")} - {".safepoint"} == set(map(str, steps))
        assert read_marks(storage) == []
        for step in steps:
            attempts = [
                entry.name for entry in storage.list(str(step)) if entry.name.isalnum() and len(entry.name) == 16
            ]
            assert len(attempts) <= 1
        return storage

    @pytest.mark.parametrize("mode", ["consolidated", "sharded"])
    def test_what_was_saved_comes_back_in_place_and_without_a_target(self, root: str, mode: Any) -> None:
        with self.open(root, mode=mode) as manager:
            assert manager.restore_latest(make_state(9)) is None
            result = manager.save(0, make_state(7))
            assert result.path == f"{manager.root}/0"
            manager.save(10, make_state(3), blocking=False)
            manager.wait()
            assert manager.latest_step() == 10
            assert manager.verify() == []
        with self.open(root) as manager:
            target = make_state(9)
            restored = manager.restore_latest(target)
            assert restored is not None
            assert (restored.step, version_of(target)) == (10, 3)
            assert version_of(manager.restore(0).state) == 7
        self.clean(root, {0, 10})

    def test_retention_keeps_what_it_is_to_keep_and_what_is_pinned(self, root: str) -> None:
        with self.open(root, keep=KeepLast(2)) as manager:
            for step in range(5):
                manager.save(step, make_state(step), blocking=step % 2 == 0)
                manager.wait()
                if step == 1:
                    pin(open_storage(root), 1)
            assert [info.step for info in manager.steps()] == [1, 3, 4]
        self.clean(root, {1, 3, 4})

    def test_a_run_that_goes_back_replaces_its_branch_and_has_the_latest_step(self, root: str) -> None:
        self.save(root, 1, 2, 3)
        with self.open(root) as manager:
            assert manager.restore(1).step == 1
            manager.save(2, make_state(20))
            assert manager.latest_step() == 2
        with self.open(root) as manager:
            restored = manager.restore_latest()
            assert restored is not None
            assert (restored.step, version_of(restored.state)) == (2, 20)
        self.clean(root, {1, 2, 3})

    def test_a_committed_step_is_skipped_refused_or_replaced_as_was_asked(self, root: str) -> None:
        self.save(root, 1)
        with self.open(root) as manager:
            with pytest.raises(StepExistsError) as caught:
                manager.save(1, make_state(2))
            assert caught.value.outcome == "not_committed"
            assert not manager.save(1, make_state(2), on_exists="skip").saved
            assert version_of(manager.restore(1).state) == 1
            manager.save(1, make_state(2), on_exists="replace")
            assert version_of(manager.restore(1).state) == 2
        self.clean(root, {1})

    def test_a_missing_step_lists_those_that_are_there(self, root: str) -> None:
        self.save(root, 3)
        with self.open(root) as manager, pytest.raises(StepNotFoundError) as caught:
            manager.restore(4)
        assert caught.value.available == (3,)

    def test_a_second_manager_may_read_but_not_save_until_the_first_is_closed(self, root: str) -> None:
        with self.open(root) as first, self.open(root) as second:
            first.save(1, make_state(1))
            assert version_of(second.restore(1).state) == 1
            with pytest.raises(RootInUseError) as caught:
                second.save(2, make_state(2))
            assert caught.value.outcome == "not_committed"
            first.close()
            second.save(2, make_state(2))
        self.clean(root, {1, 2})

    def test_a_save_that_fails_leaves_nothing_and_the_next_one_works(self, root: str) -> None:
        with self.open(root) as manager:
            with pytest.raises(UnsupportedValueError):
                manager.save(1, {"x": object()})
            manager.save(2, {"x": torch.ones(2)}, blocking=False)
            manager.wait()
            with pytest.raises((UnsupportedValueError, AsyncSaveError)):
                manager.save(3, {"x": lambda: 0}, blocking=False)
            manager.save(4, make_state(4))
            assert [info.step for info in manager.steps()] == [2, 4]
        self.clean(root, {2, 4})

    def test_the_next_owner_clears_up_after_one_that_died_in_the_middle(self, root: str) -> None:
        manager = self.open(root)
        manager.save(1, make_state(1))
        session = manager._session
        for step, attempt in ((1, "a" * 16), (2, "b" * 16)):
            prefix = session.committer.begin(step, attempt)
            session.storage.put(f"{prefix}/half", b"written")
        session.owner.release()  # as when its process is gone
        self.save(root, 3)
        self.clean(root, {1, 3})
        with self.open(root) as after:
            assert version_of(after.restore(1).state) == 1

    def test_a_damaged_step_is_passed_over_and_named_and_deleted_by_nobody(
        self, root: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.save(root, 1, 2)
        storage = open_storage(root)
        with self.open(root, keep=KeepLast(1)) as manager:
            (step,) = [known for known in manager._session.committer.list_steps() if known.record.step == 2]
            manifest = manager._session.committer.load_manifest(step)
            (path,) = [f"{step.files_prefix}/{file.path}" for file in manifest.files if "model" in file.path]
            data = bytearray(storage.get(path, max_bytes=1 << 20))
            data[-1] ^= 1
            storage.replace(path, bytes(data))
            restored = manager.restore_latest(make_state(0))
            assert restored is not None
            assert restored.step == 1
            assert "step 2 is not sound" in caplog.text
            with pytest.raises(CorruptDataError):
                manager.restore(2)
            (error,) = manager.verify()
            assert error.path == storage.describe(path)
            storage.delete(path)
            with pytest.raises(CorruptDataError, match="missing"):
                manager.restore(2)
            storage.delete("1/commit.json")
            with pytest.raises(NoRestorableStepError):
                manager.restore_latest()

    def test_steps_are_copied_to_a_file_system_and_back_and_verified(self, root: str, tmp_path: Path) -> None:
        self.save(root, 1, 2)
        local = tmp_path / "copied"
        result = copy_steps(open_storage(root), local)
        assert (result.copied, result.errors) == ((1, 2), ())
        assert copy_steps(open_storage(root), local).present == (1, 2)
        back = f"{root}-back"
        assert copy_steps(open_storage(local), back).copied == (1, 2)
        with CheckpointManager(local) as manager, self.open(back) as other:
            assert [version_of(manager.restore(step).state) for step in (1, 2)] == [1, 2]
            assert [version_of(other.restore(step).state) for step in (1, 2)] == [1, 2]
            assert other.latest_step() == 2

    def test_a_step_is_converted_to_it_and_from_it_and_an_interrupted_conversion_goes_on(
        self, root: str, tmp_path: Path
    ) -> None:
        items = {f"item{n}": {"w": torch.full((300,), float(n))} for n in range(3)}
        local, back = str(tmp_path / "local"), str(tmp_path / "back")
        with CheckpointManager(local) as manager:
            manager.save(5, items, metrics={"loss": 1.0})
        with self.open(root) as manager:
            manager.save(1, items)
        with pytest.raises(KeyboardInterrupt):
            convert(local, root, format="torch", progress=Interrupting(2))
        assert list_checkpoints(root) == [1]
        assert convert(local, root, format="torch").steps[0].outcome == "resumed"
        assert convert(local, root, format="torch").steps[0].outcome == "present"
        assert list_checkpoints(root) == [1, 5]
        assert [made.step for made in convert(root, back, step="all").steps] == [1, 5]
        with CheckpointManager(back) as manager:
            assert str(manager.restore(5).state) == str(items)

    def test_a_step_is_removed_on_request_and_leftovers_are_swept(self, root: str) -> None:
        self.save(root, 1, 2, 3)
        storage = open_storage(root)
        assert remove_step(storage, 2) == ()
        self.clean(root, {1, 3})
        manager = self.open(root)
        manager.save(4, make_state(4))
        prefix = manager._session.committer.begin(5, "c" * 16)
        manager._session.storage.put(f"{prefix}/half", b"written")
        manager._session.owner.release()
        plan = plan_sweep(storage, KeepLast(1))
        assert {(left.kind, left.step) for left in plan.leftovers} == {("unfinished", 5), ("unkept", 1), ("unkept", 3)}
        assert {left.num_bytes > 0 for left in plan.leftovers} == {True}
        gone, remaining = sweep(storage, KeepLast(1))
        assert {(left.kind, left.step) for left in gone} == {("unfinished", 5), ("unkept", 1), ("unkept", 3)}
        assert remaining == ()
        self.clean(root, {4})

    def test_a_reader_beside_a_writer_never_sees_half_a_step(self, root: str) -> None:
        done = threading.Event()
        failures: list[BaseException] = []

        def read() -> None:
            try:
                with self.open(root) as manager:
                    while not done.is_set():
                        restored = manager.restore_latest()
                        assert restored is None or version_of(restored.state) == restored.step
            except BaseException as error:  # noqa: BLE001 - told to the test
                failures.append(error)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            self.save(root, *range(6), keep=KeepLast(2))
        finally:
            done.set()
            reader.join()
        assert failures == []
