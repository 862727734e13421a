"""Which steps a root of any kind has: in which order, which of them stay, and what becomes of one that is there."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager import KeepAll, KeepBest, KeepEvery, KeepLast, session
from safepoint.manager.errors import StepExistsError, StepNotFoundError, UnsupportedValueError
from safepoint.manager.pins import pin

from support.faulty_storage import Fail, FaultyStorage, Stall
from support.retention_threads import retention_threads, wait_until_gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.faulty_storage import Fault
    from support.roots import Root


def test_steps_sort_as_integers_by_commit(root: Root) -> None:
    with root.manager() as manager:
        for step in (1, 2, 10, 900000, 1080000):
            manager.save(step, {"x": step})
        assert [info.step for info in manager.steps()] == [1, 2, 10, 900000, 1080000]
        assert manager.latest_step() == 1080000


def test_save_every_skips_locally_and_force_saves(root: Root) -> None:
    with root.manager(save_every=10) as manager:
        skipped = manager.save(7, {"x": 1})
        assert not skipped.saved
        assert "10" in skipped.reason
        assert manager.save(7, {"x": 1}, force=True).saved
        assert manager.save(20, {"x": 1}).saved
        assert [info.step for info in manager.steps()] == [7, 20]


def test_policies_combine_and_nan_is_worst(root: Root) -> None:
    keep = KeepLast(1) | KeepEvery(10) | KeepBest(1, metric="loss", order="min")
    losses = {0: 5.0, 3: 1.0, 10: 4.0, 12: float("nan"), 13: 2.0}
    with root.manager(keep=keep) as manager:
        for step, loss in losses.items():
            manager.save(step, {"x": step}, metrics={"loss": loss})
        assert [info.step for info in manager.steps()] == [0, 3, 10, 13]
    root.check_holds(0, 3, 10, 13)


def test_keep_last_deletes_only_after_the_next_commit(root: Root) -> None:
    with root.manager(keep=KeepLast(1)) as manager:
        manager.save(1, {"x": torch.ones(3)})
        with pytest.raises(UnsupportedValueError):
            manager.save(2, {"x": lambda: None})
        assert [info.step for info in manager.steps()] == [1]
        manager.save(3, {"x": torch.ones(3)}, blocking=False)
        manager.wait()
        assert [info.step for info in manager.steps()] == [3]
    root.check_holds(3)


def test_a_pinned_step_stays(root: Root) -> None:
    with root.manager(keep=KeepLast(2)) as manager:
        for step in range(5):
            manager.save(step, {"x": step})
            if step == 1:
                pin(root.storage, 1)
        assert [info.step for info in manager.steps()] == [1, 3, 4]
    root.check_holds(1, 3, 4)


def test_the_thread_that_deletes_ends_when_there_is_nothing_left_and_a_new_one_deletes_what_comes_then(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("safepoint.manager.retention._IDLE_SECS", 0.05)
    before = retention_threads()
    with root.manager(keep=KeepLast(1)) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.ones(3)})
            wait_until_gone(retention_threads() - before)
            assert root.names() == {str(step)}, caplog.text
    root.check_holds(2)


@pytest.fixture
def deleting(root: Root, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FaultyStorage]:
    """Have the next manager meet a fault when it deletes."""

    def meet(fault: Fault, *, times: int) -> FaultyStorage:
        storage = FaultyStorage(root.storage, at=1, times=times, fault=fault, only={"delete_tree"})
        monkeypatch.setattr(session, "_open_root", lambda _: storage)
        return storage

    return meet


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
def test_saves_go_on_while_a_deletion_stalls(
    root: Root, deleting: Callable[..., FaultyStorage], *, blocking: bool
) -> None:
    stall = Stall()
    deleting(stall, times=1)
    with root.manager(keep=KeepLast(1)) as manager:
        try:
            for step in range(4):
                manager.save(step, {"x": step}, blocking=blocking)
            manager.wait()
            assert stall.reached.wait(20)
            assert [info.step for info in manager.steps()] == [3]
            assert len(root.names()) > 1
        finally:
            stall.resume.set()
    root.check_holds(3)


def test_what_cannot_be_deleted_now_is_deleted_later(
    root: Root, deleting: Callable[..., FaultyStorage], caplog: pytest.LogCaptureFixture
) -> None:
    storage = deleting(Fail(errno.EBUSY), times=2)
    with root.manager(keep=KeepLast(1)) as manager:
        for step in range(4):
            assert manager.save(step, {"x": step}).saved
        give_up = time.monotonic() + 20
        while storage.fired < 2 and time.monotonic() < give_up:
            time.sleep(0.01)
        assert manager.save(4, {"x": 4}).saved
    assert storage.fired == 2
    assert "cannot delete" in caplog.text
    root.check_holds(4)


def test_the_step_restored_from_stays_until_a_newer_commit_of_this_run(root: Root) -> None:
    with root.manager(keep=KeepAll()) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"x": step})
    with root.manager(keep=KeepLast(1)) as manager:
        manager.restore(1, {"x": 0})
        manager.save(4, {"x": 4})
        assert 4 in [info.step for info in manager.steps()]
        manager.save(5, {"x": 5})
        assert [info.step for info in manager.steps()] == [5]


def test_going_back_makes_the_new_branch_the_latest(root: Root) -> None:
    with root.manager() as manager:
        for step in (500, 600, 700):
            manager.save(step, {"x": step})
    with root.manager() as manager:
        manager.restore(500, {"x": 0})
        manager.save(510, {"x": 510})
        assert manager.latest_step() == 510
        restored = manager.restore_latest({"x": 0})
        assert restored is not None
        assert (restored.step, restored.abandoned) == (510, (600, 700))
        manager.save(600, {"x": -600})  # of the branch that was left: replaced
        target = {"x": 0}
        manager.restore(600, target)
        assert target["x"] == -600
    root.check_holds(500, 510, 600, 700)


def test_going_back_within_one_run_replaces_its_own_later_steps(root: Root) -> None:
    with root.manager() as manager:
        manager.save(1, {"x": 1})
        manager.save(2, {"x": 2})
        manager.restore(1, {"x": 0})
        assert manager.save(2, {"x": 22}).saved
        assert not manager.save(2, {"x": 222}).saved
        target = {"x": 0}
        manager.restore_latest(target)
        assert target["x"] == 22


def test_on_exists_modes(root: Root) -> None:
    with root.manager() as manager:
        manager.save(5, {"x": 1})
        assert manager.save(5, {"x": 2}).reason
        with pytest.raises(StepExistsError, match="committed by this run") as caught:
            manager.save(5, {"x": 2}, on_exists="error")
        assert caught.value.outcome == "not_committed"
        assert caught.value.path == root.storage.describe("5")
        assert manager.save(5, {"x": 3}, on_exists="replace").saved
    with root.manager() as manager:
        with pytest.raises(StepExistsError, match="committed by another run"):
            manager.save(5, {"x": 4})
        assert not manager.save(5, {"x": 4}, on_exists="skip").saved
        target = {"x": 0}
        manager.restore(5, target)
        assert target["x"] == 3
    root.check_holds(5)


def test_a_missing_step_lists_those_that_are_there(root: Root) -> None:
    with root.manager() as manager:
        manager.save(5, {"x": 1})
        manager.save(10, {"x": 1})
        with pytest.raises(StepNotFoundError, match="5, 10") as caught:
            manager.restore(7, {"x": 0})
        assert caught.value.available == (5, 10)
        assert isinstance(caught.value, FileNotFoundError)
