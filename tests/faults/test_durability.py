"""A power cut at any moment leaves whole steps, and the newest that a save has returned for.

First a model: calls of the storage are recorded, and everything is tried that a disk may hold after any of them. Then
the kernel's own word: strace shows that the calls do sync what the model takes for synced, and in which order.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import LocalStorage, Storage
from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.commit import Committer
from safepoint.manager.verifying import verify_steps

from support.power_cut import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def make_state(version: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50,), float(version)), "b": torch.arange(3) + version}, "version": version}


def version_of(storage: Storage) -> int:
    """Return the version of the newest step; every listed step is read through."""
    assert verify_steps(storage) == []
    steps = Committer(storage).list_steps()
    if not steps:
        return 0
    manifest = Committer(storage).load_manifest(steps[-1])
    (version,) = [node.data for path, node in manifest.structure.items() if path == ("version",)]
    assert isinstance(version, int)
    return version


def record(root: Path, monkeypatch: pytest.MonkeyPatch, *, blocking: bool) -> tuple[Recorder, list[tuple[int, int]]]:
    """Save, replace and delete; return the recorder, and after how many of its calls which version was promised."""
    recorders: list[Recorder] = []

    def make(path: str) -> Recorder:
        recorders.append(Recorder(LocalStorage(path)))
        return recorders[-1]

    monkeypatch.setattr("safepoint.manager.session.LocalStorage", make)
    promised = []
    with CheckpointManager(root, keep=KeepLast(1)) as manager:
        (recorder,) = recorders
        for version, step in enumerate([1, 2, 2, 3, 4], start=1):
            manager.save(step, make_state(version), blocking=blocking, on_exists="replace")
            manager.wait()
            promised.append((len(recorder.events), version))
    return recorder, promised


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
def test_a_power_cut_after_any_call_leaves_whole_steps_and_the_newest_promised_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, blocking: bool
) -> None:
    recorder, promises = record(tmp_path, monkeypatch, blocking=blocking)
    tried: list[int] = []
    newest = 0
    for number in range(len(recorder.events) + 1):
        promised = max((version for after, version in promises if after <= number), default=0)
        tried.append(0)
        for disk in recorder.disks_after(number, samples=12):
            version = version_of(disk)
            assert version >= promised, (number, recorder.names[:number])
            newest = max(newest, version)
            committer = Committer(disk)
            committer.recover()
            committer.delete_hidden()
            assert version_of(disk) == version
            tried[-1] += 1
    assert newest == 5
    unsettled = [recorder.unsettled_after(number) for number in range(len(tried))]
    for changes, disks in zip(unsettled, tried, strict=True):  # none lasts, all, each alone, all but each; and chance
        assert disks >= min(2**changes, 2 + 2 * changes)
    assert sum(changes > 0 for changes in unsettled) > 5 * len(promises)  # five files and directories a save


def test_the_model_tells_a_wrong_order(tmp_path: Path) -> None:
    recorder = Recorder(LocalStorage(tmp_path))
    recorder.make_dir("")
    recorder.make_dir("1.tmp")
    recorder.put("1.tmp/data", b"x")
    recorder.rename_dir("1.tmp", "1")  # before the directory was synced
    recorder.sync_dir("")
    found = {tuple(sorted(entry.name for entry in disk.list("1"))) for disk in recorder.disks_after(99, samples=0)}
    assert found == {(), ("data",)}


needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")

SCRIPT = """
import sys, torch
from safepoint.manager import CheckpointManager, KeepLast
state = {"model": {"w": torch.ones(600_000)}, "other": {"b": torch.ones(3)}}
with CheckpointManager(sys.argv[1], keep=KeepLast(1)) as manager:
    manager.save(1, state)
    manager.save(2, state)
"""
CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += 0$")


def whole_calls(log: str) -> Iterator[str]:
    """Yield the calls in the order in which they ended; one that another thread's came between is told in two parts."""
    begun: dict[str, str] = {}
    for line in log.splitlines():
        process, _, rest = line.partition(" ")
        if line.endswith("<unfinished ...>"):
            begun[process] = line.removesuffix("<unfinished ...>").rstrip()
        elif rest.lstrip().startswith("<... ") and process in begun:
            yield begun.pop(process) + rest.partition("resumed>")[2]
        else:
            yield line


@needs_strace
def test_the_kernel_sees_data_manifest_record_and_directories_synced_before_the_rename(tmp_path: Path) -> None:
    root, log = tmp_path / "root", tmp_path / "log"
    calls = "fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir"
    command = ["strace", "-f", "-y", "-s", "999", "-e", f"trace={calls}", "-o", str(log)]
    ended = subprocess.run([*command, sys.executable, "-c", SCRIPT, str(root)], capture_output=True, check=False)
    if b"ptrace" in ended.stderr.lower() and ended.returncode:
        pytest.skip("processes cannot be traced here")
    assert ended.returncode == 0, ended.stderr
    seen: list[str] = []
    for line in whole_calls(log.read_text()):
        match = CALL.match(line)
        if match is None or str(root) not in line or "/.safepoint" in line:
            continue
        text = re.sub(r"[0-9a-f]{16}", "ATTEMPT", match[2].replace(str(root), "ROOT"))
        seen.append(f"{match[1]} {text}")
    order = [
        r"fsync .*<ROOT/2.tmp-ATTEMPT/model/model.safetensors>",
        r"fsync .*<ROOT/2.tmp-ATTEMPT/other/other.safetensors>",
        r"fsync .*<ROOT/2.tmp-ATTEMPT/other>",
        r"fsync .*<ROOT/2.tmp-ATTEMPT>",
        r"fsync .*<ROOT/2.tmp-ATTEMPT/manifest.json>",
        r"fsync .*<ROOT/2.tmp-ATTEMPT/commit.json>",
        r"fsync .*<ROOT/2.tmp-ATTEMPT>",
        r'rename\w* .*"2.tmp-ATTEMPT".*"2"',
        r"fsync .*<ROOT>",
        r'rename\w* .*"1".*".trash-ATTEMPT"',
        r"fsync .*<ROOT>",
        r"unlinkat .*",
    ]
    position = 0
    for pattern in order:
        while position < len(seen) and re.match(pattern, seen[position]) is None:
            position += 1
        assert position < len(seen), f"no {pattern} in its place:\n" + "\n".join(seen)
        position += 1
    first_unlink = next(index for index, call in enumerate(seen) if call.startswith(("unlink", "rmdir")))
    assert first_unlink > max(index for index, call in enumerate(seen) if '"1"' in call and call.startswith("rename"))
