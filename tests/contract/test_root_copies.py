"""Steps that go from root to root, are converted, removed, swept, or read while others are saved: on any kind."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.formats.storage import open_storage
from safepoint.manager import CheckpointManager, KeepLast, convert
from safepoint.manager.copying import copy_steps
from safepoint.manager.opened import list_checkpoints
from safepoint.manager.removing import plan_sweep, remove_step, sweep

from support.interrupting import Interrupting

if TYPE_CHECKING:
    from pathlib import Path

    from safepoint.manager import RestoreResult

    from support.roots import Root


def save(root: Root, *steps: int, **options: object) -> None:
    """Save states that are known from the step, in two items."""
    with root.manager(**options) as manager:
        for step in steps:
            manager.save(step, {"x": torch.full((33, 9), float(step)), "n": step})


def check(restored: RestoreResult | None, *steps: int) -> None:
    """Check that what was restored is one of these steps, whole."""
    assert restored is not None
    assert restored.state is not None
    assert restored.step in steps
    assert (restored.state["x"] == restored.step).all()
    assert restored.state["n"] == restored.step


def test_a_copied_root_is_the_same_whatever_copied_its_files(root: Root) -> None:
    save(root, 5, 7, 6)
    copied = root.beside("copied 实验")
    copied.copy_from(root)
    with copied.manager() as manager:
        check(manager.restore_latest(), 6)
        assert manager.verify() == []
        manager.save(8, {"n": 8})
    copied.check_holds(5, 6, 7, 8)


def test_steps_are_copied_to_a_file_system_and_back_and_verified(root: Root, tmp_path: Path) -> None:
    save(root, 1, 2)
    local = tmp_path / "copied"
    result = copy_steps(root.storage, local)
    assert (result.copied, result.errors) == ((1, 2), ())
    assert copy_steps(root.storage, local).present == (1, 2)
    back = root.beside("back")
    assert copy_steps(open_storage(local), back.url).copied == (1, 2)
    with CheckpointManager(local) as manager, back.manager() as other:
        for step in (1, 2):
            check(manager.restore(step), step)
            check(other.restore(step), step)
        assert other.latest_step() == 2


def test_a_step_is_converted_to_it_and_from_it_and_an_interrupted_conversion_goes_on(
    root: Root, tmp_path: Path
) -> None:
    items = {f"item{n}": {"w": torch.full((300,), float(n))} for n in range(3)}
    local, back = str(tmp_path / "local"), str(tmp_path / "back")
    with CheckpointManager(local) as manager:
        manager.save(5, items, metrics={"loss": 1.0})
    with root.manager() as manager:
        manager.save(1, items)
    with pytest.raises(KeyboardInterrupt):
        convert(local, root.url, format="torch", progress=Interrupting(2))
    assert list_checkpoints(root.url) == [1]
    assert convert(local, root.url, format="torch").steps[0].outcome == "resumed"
    assert convert(local, root.url, format="torch").steps[0].outcome == "present"
    assert list_checkpoints(root.url) == [1, 5]
    assert [made.step for made in convert(root.url, back, step="all").steps] == [1, 5]
    with CheckpointManager(back) as manager:
        assert str(manager.restore(5).state) == str(items)


def test_a_step_is_removed_on_request_and_leftovers_are_swept(root: Root) -> None:
    save(root, 1, 2, 3)
    assert remove_step(root.storage, 2) == ()
    root.check_holds(1, 3)
    manager = root.manager()
    manager.save(4, {"n": 4})
    prefix = manager._session.committer.begin(5, "c" * 16)
    manager._session.storage.put(f"{prefix}/half", b"written")
    manager._session.owner.release()  # as when its process is gone
    plan = plan_sweep(root.storage, KeepLast(1))
    assert {(left.kind, left.step) for left in plan.leftovers} == {("unfinished", 5), ("unkept", 1), ("unkept", 3)}
    assert {left.num_bytes > 0 for left in plan.leftovers} == {True}
    gone, remaining = sweep(root.storage, KeepLast(1))
    assert {(left.kind, left.step) for left in gone} == {("unfinished", 5), ("unkept", 1), ("unkept", 3)}
    assert remaining == ()
    root.check_holds(4)


def test_a_reader_beside_a_writer_never_sees_half_a_step(root: Root) -> None:
    done = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            with root.manager() as manager:
                while not done.is_set():
                    restored = manager.restore_latest()
                    if restored is not None:
                        check(restored, restored.step)
        except BaseException as error:  # noqa: BLE001 - told to the test
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        save(root, *range(6), keep=KeepLast(2))
    finally:
        done.set()
        reader.join()
    assert failures == []
