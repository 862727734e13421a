"""Faults from outside: system calls fail or kill (strace), the disk is full or read-only, kills at any time.

None of our own wrappers takes part. A child is a fork of this process, so that it starts in no time.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def make_state(version: int, size: int = 400) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), float(version)), "b": torch.arange(9) * version}, "version": version}


def check_newest(root: Path, *, at_least: int) -> int:
    """Open the root as the next run does, restore bit-exact, save again, and see that nothing else is left."""
    target = make_state(0)
    with CheckpointManager(root, deadline_secs=5.0) as manager:
        restored = manager.restore_latest(target)
        if restored is None:
            version = 0
        else:
            version = target["version"]
            assert torch.equal(target["model"]["w"], make_state(version)["model"]["w"])
            assert torch.equal(target["model"]["b"], make_state(version)["model"]["b"])
        assert version >= at_least
        assert manager.verify() == []
        steps = {info.step for info in manager.steps()}
        manager.save(10**6, make_state(10**6), on_exists="replace")
        manager.wait()
    present = {path.name for path in root.iterdir()}
    assert present == {".safepoint", *map(str, steps | {10**6})}
    shutil.rmtree(root / str(10**6))
    return version


@contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def acknowledged(root: Path) -> int:
    path = root.with_name(root.name + "-told")
    return int(path.read_text() or 0) if path.exists() else 0


def train(root: Path, steps: int, *, blocking: bool) -> None:
    """Resume, then save step after step, and write down which step a save has returned for."""
    told = os.open(root.with_name(root.name + "-told"), os.O_WRONLY | os.O_CREAT, 0o666)
    with CheckpointManager(root, keep=KeepLast(2), deadline_secs=5.0) as manager:
        state = make_state(0)
        restored = manager.restore_latest(state)
        first = 1 if restored is None else restored.step + 1
        for step in range(first, first + steps):
            manager.save(step, make_state(step), blocking=blocking)
            manager.wait()
            os.lseek(told, 0, os.SEEK_SET)  # no pwrite: that is what a test makes fail
            os.write(told, str(step).encode())


# -- kills at any time ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_that_is_killed_at_sixty_random_moments_never_loses_a_saved_step(tmp_path: Path) -> None:
    root = tmp_path / "root"
    chance = random.Random(5)  # noqa: S311 - moments, no secret
    killed = 0
    newest = 0
    for number in range(60):
        with forked(lambda: train(root, 10**6, blocking=number % 2 == 0)) as pid:  # noqa: B023 - called at once
            time.sleep(chance.uniform(0.02, 0.35))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            killed += os.WIFSIGNALED(status)
        if root.exists():
            newest = check_newest(root, at_least=max(acknowledged(root), newest))
    assert killed == 60
    assert newest > 60


# -- system calls ---------------------------------------------------------------------------------------------------

INJECTIONS = [
    *(f"fsync:error=EIO:when={n}" for n in (3, 4, 5, 6, 7, 8, 9)),
    *(f"fsync:signal=SIGKILL:when={n}" for n in (3, 4, 5, 6, 7, 8, 9)),
    "renameat2:error=EIO:when=2",
    "renameat2:error=EACCES:when=3",
    "renameat2:error=ENOSYS",  # no such call: the plain rename has to do
    *(f"renameat2:signal=SIGKILL:when={n}" for n in (2, 3, 4)),
    *(f"pwrite64:error=ENOSPC:when={n}" for n in (2, 3, 5, 7)),
    "pwrite64:error=EIO:when=3",  # tried again
    *(f"pwrite64:signal=SIGKILL:when={n}" for n in (2, 3, 5, 7)),
    "unlinkat:error=EBUSY",
    "unlinkat:signal=SIGKILL:when=2",
    "rmdir,unlinkat:error=EACCES:when=1+3",
    "openat:error=EMFILE:when=40+7",
]


def injected(root: Path, injection: str) -> int:
    """Run a training of four steps under strace; return its wait status."""
    go = root.with_name("go")

    def work() -> None:
        while not go.exists():
            time.sleep(0.005)
        try:
            train(root, 4, blocking=True)
        except CheckpointError:
            os._exit(7)

    calls = injection.split(":", maxsplit=1)[0]
    with forked(work) as pid:
        command = [
            "strace",
            "-f",
            "-p",
            str(pid),
            "-e",
            f"trace={calls}",
            "-e",
            f"inject={injection}",
            "-o",
            "/dev/null",
        ]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            line = tracer.stderr.readline()
            if "attached" not in line:
                pytest.skip(f"processes cannot be traced here: {line}")
            go.touch()
            _, status = os.waitpid(pid, 0)
            tracer.wait(10)
    return status


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize("injection", INJECTIONS)
def test_a_system_call_that_fails_or_kills_costs_no_saved_step(tmp_path: Path, injection: str) -> None:
    root = tmp_path / "root"
    status = injected(root, injection)
    if "SIGKILL" in injection:
        assert os.WIFSIGNALED(status)
    else:
        assert os.waitstatus_to_exitcode(status) in (0, 7)
    for path in (root / ".safepoint").glob(".tmp-*"):
        os.utime(path, (0, 0))
    check_newest(root, at_least=acknowledged(root))


# -- disks ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB, which root may mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["/bin/mount", "-t", "tmpfs", "-o", "size=8m", "none", str(disk)]
    if not Path("/bin/mount").exists() or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["/bin/umount", "-l", str(disk)], check=True)


def save_and_wait(manager: CheckpointManager, step: int, state: dict[str, Any], *, blocking: bool) -> None:
    manager.save(step, state, blocking=blocking)
    manager.wait()


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
def test_a_full_disk_is_told_with_its_numbers_and_leaves_nothing(small_disk: Path, *, blocking: bool) -> None:
    root = small_disk / "root"
    big = {"w": torch.ones(3_000_000)}
    with CheckpointManager(root) as manager:
        manager.save(1, make_state(1))
        before = shutil.disk_usage(small_disk).used
        for step in (2, 3):
            with pytest.raises(CheckpointError) as caught:
                save_and_wait(manager, step, big, blocking=blocking)
            cause: Any = caught.value.__cause__ if not blocking else caught.value
            assert isinstance(cause, StorageError)
            assert "needs 12,00" in str(cause)
            assert "free" in str(cause)
            assert cause.outcome == "not_committed"
            assert {path.name for path in root.iterdir()} == {"1", ".safepoint"}
            assert shutil.disk_usage(small_disk).used <= before + 8192
        assert manager.save(4, make_state(4)).saved
    check_newest(root, at_least=4)


def test_a_read_only_disk_refuses_saves_and_still_restores(small_disk: Path) -> None:
    root = small_disk / "root"
    with CheckpointManager(root) as manager:
        manager.save(1, make_state(1))
    subprocess.run(["/bin/mount", "-o", "remount,ro", str(small_disk)], check=True)
    with CheckpointManager(root) as manager:
        target = make_state(0)
        assert manager.restore(1, target).step == 1
        assert target["version"] == 1
        with pytest.raises(StorageError) as caught:
            manager.save(2, make_state(2))
        assert caught.value.outcome == "not_committed"
        assert "read-only" in str(caught.value)
        assert [info.step for info in manager.steps()] == [1]
        assert manager.verify() == []
    subprocess.run(["/bin/mount", "-o", "remount,rw", str(small_disk)], check=True)
    assert check_newest(root, at_least=1) == 1


def test_a_directory_without_permission_is_told(tmp_path: Path) -> None:
    def work() -> None:
        os.setgid(65534)
        os.setuid(65534)
        try:
            CheckpointManager(tmp_path / "root")
        except StorageError as error:
            out.write_text(json.dumps([error.errno, str(error)]))

    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    out = Path("/tmp") / f"denied-{os.getpid()}"  # noqa: S108 - nobody else can write where tests write
    out.touch()
    out.chmod(0o666)
    tmp_path.chmod(0o755)
    with forked(work) as pid:
        os.waitpid(pid, 0)
    text = out.read_text()
    out.unlink()
    assert "Permission denied" in text
