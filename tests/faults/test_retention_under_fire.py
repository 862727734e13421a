"""Deleting old steps, while it fails, is slow, races readers, or another manager wants the root."""

from __future__ import annotations

import errno
import os
import signal
import time
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.errors import CheckpointError, RootInUseError, StepNotFoundError, StorageError
from safepoint.manager.process_identity import ProcessIdentity

from support.fault_runner import run_forked
from support.fault_trigger import Trigger, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def make_state(version: int) -> dict[str, Any]:
    return {"w": torch.full((500,), float(version)), "parts": {f"p{i}": torch.arange(7) * version for i in range(4)}}


def version_of(state: dict[str, Any]) -> int:
    version = int(state["w"][0])
    assert torch.equal(state["w"], make_state(version)["w"])
    assert all(torch.equal(part, make_state(version)["parts"]["p0"]) for part in state["parts"].values())
    return version


class _Busy(LocalStorage):
    """Fails to rename what is to be deleted, for a while."""

    refusals = 3

    def rename_dir(self, source: str, target: str) -> bool:
        if type(self).refusals > 0 and ".trash" in target:
            type(self).refusals -= 1
            raise StorageError("injected", path=target, errno=errno.EBUSY)
        return super().rename_dir(source, target)


def test_a_step_that_is_in_use_is_hidden_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = type("_BusyHere", (_Busy,), {"refusals": 3})
    monkeypatch.setattr("safepoint.manager.session.LocalStorage", storage)
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        for step in range(8):
            assert manager.save(step, make_state(step)).saved
    assert storage.refusals == 0
    assert {path.name for path in tmp_path.iterdir()} == {"7", ".safepoint"}


class _Slow(LocalStorage):
    def delete_tree(self, path: str) -> None:
        time.sleep(5.0)
        super().delete_tree(path)


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
def test_slow_deletes_hold_up_neither_the_next_saves_nor_the_end_beyond_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, blocking: bool
) -> None:
    monkeypatch.setattr("safepoint.manager.session.LocalStorage", _Slow)
    manager = CheckpointManager(tmp_path, keep=KeepLast(1), deadline_secs=2.0)
    started = time.monotonic()
    for step in range(6):
        manager.save(step, make_state(step), blocking=blocking)
    manager.wait()
    assert [info.step for info in manager.steps()] == [5]
    assert time.monotonic() - started < 4
    started = time.monotonic()
    manager.close()
    assert time.monotonic() - started < 5  # the deadline; what is left is the next run's
    monkeypatch.undo()
    time.sleep(0.1)
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        manager.save(6, make_state(6))
    assert {path.name for path in tmp_path.iterdir()} == {"6", ".safepoint"}


def test_readers_beside_a_writer_that_keeps_two_never_see_half_a_step(tmp_path: Path) -> None:
    root = tmp_path / "root"
    num_steps = 200

    def write(_rank: int) -> None:
        with CheckpointManager(root, keep=KeepLast(2), deadline_secs=10.0) as manager:
            for step in range(num_steps):
                manager.save(step, make_state(step), blocking=step % 3 == 0)

    def read(rank: int) -> None:
        os.environ.pop("RANK")
        os.environ.pop("WORLD_SIZE")
        seen: list[int] = []
        vanished = 0
        manager = CheckpointManager(root, deadline_secs=10.0)
        while not seen or seen[-1] < num_steps - 1:
            restored = manager.restore_latest()
            if restored is None:
                assert not seen
                continue
            assert restored.state is not None
            assert version_of(restored.state) == restored.step
            seen.append(restored.step)
            for info in manager.steps()[:1]:  # the one that goes next
                try:
                    target = make_state(0)
                    assert version_of(target) == 0
                    assert manager.restore(info.step, target).step == version_of(target)
                except StepNotFoundError:
                    vanished += 1
        assert seen == sorted(seen)
        assert len(seen) > 10
        (tmp_path / f"read{rank}").write_text(f"{len(seen)} {vanished}")

    assert run_forked(lambda rank: (write if rank == 0 else read)(rank), range(3), tmp_path) == []
    assert (tmp_path / "read1").exists()
    assert (tmp_path / "read2").exists()


def test_two_managers_on_one_root_the_second_is_refused_and_may_read(tmp_path: Path) -> None:
    with (
        CheckpointManager(tmp_path, deadline_secs=1.0) as first,
        CheckpointManager(tmp_path, deadline_secs=1.0) as other,
    ):
        first.save(1, make_state(1))
        with pytest.raises(RootInUseError) as caught:
            other.save(2, make_state(2))
        assert str(os.getpid()) in str(caught.value)
        restored = other.restore_latest()
        assert restored is not None
        assert restored.step == 1
        first.save(2, make_state(2))
    with CheckpointManager(tmp_path, deadline_secs=1.0) as manager:
        assert manager.save(3, make_state(3)).saved


def own_and_be_stopped(root: Path, at: int, told: Path) -> None:
    """Save steps 1 and 2, stopped at some call, and write down what became of each."""
    install(Trigger(kind="stop", at=at))
    manager = CheckpointManager(root, deadline_secs=0.5)
    lines = []
    for step in (1, 2):
        try:
            manager.save(step, make_state(10 + step))
            lines.append(f"{step} saved")
        except CheckpointError as error:
            lines.append(f"{step} {type(error).__name__} {error.outcome}")
    manager.close()
    told.write_text("\n".join(lines))


def take_over(root: Path) -> None:
    """Save steps 2 and 3, as from another host: only the heartbeat tells whether the old owner lives."""
    ProcessIdentity.state = lambda _: "unknown"  # type: ignore[method-assign, assignment]
    with CheckpointManager(root, deadline_secs=0.5) as manager:
        manager.restore_latest()
        for step in (2, 3):
            manager.save(step, make_state(20 + step), on_exists="replace")


@contextmanager
def stopped(work: Callable[[], None]) -> Iterator[None]:
    """Run in a fork until it stops itself; let it go on in the end, and wait for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("at", range(6, 44, 3))
def test_an_owner_that_was_stopped_taken_over_and_woken_harms_nobody(tmp_path: Path, at: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    told = tmp_path / "told"
    with stopped(lambda: own_and_be_stopped(root, at, told)):
        assert run_forked(lambda _: take_over(root), [0], tmp_path, count=1) == []
    with CheckpointManager(root, deadline_secs=5.0) as manager:
        assert manager.verify() == []
        versions = {2: 22, 3: 23} | ({1: 11} if "1 saved" in told.read_text() else {})
        for step, version in versions.items():
            state = manager.restore(step).state
            assert state is not None
            assert version_of(state) == version, told.read_text()
        manager.save(4, make_state(4))
    assert {path.name for path in root.iterdir()} <= {"1", "2", "3", "4", ".safepoint"}
