"""What a run would find on this machine and in this root, looked up before it starts.

Starts no device runtime, and leaves nothing behind in the root. Whether a save works is tried by the caller.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from safepoint.formats.registry import format_names
from safepoint.formats.storage import LocalStorage, open_storage
from safepoint.formats.storage.conditions import require_conditional_writes
from safepoint.formats.storage.local_file import allows_direct
from safepoint.manager.errors import CheckpointError
from safepoint.manager.owner import current_holder
from safepoint.manager.root_overview import overview
from safepoint.manager.step_paths import refuse_step

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from safepoint.formats.storage import Storage

__all__ = ["Finding", "diagnose_machine", "diagnose_root", "diagnose_url"]

_PACKAGES = ("safepoint", "torch", "torch_xla", "numpy", "xxhash", "safetensors", "tensorstore")
_OPTIONAL = ("torch_xla", "safetensors")
_PROBE_BYTES = 64 << 20
_PROBE_PIECE = 8 << 20

Level = Literal["ok", "note", "problem"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked up.

    Attributes:
        name: of what.
        level: "problem" where a save would fail or data be at risk.
        text: what was found, for people.
        data: the same, for programs.
    """

    name: str
    level: Level
    text: str
    data: Any = None


def diagnose_machine() -> Iterator[Finding]:
    """Yield what is installed and what a save here would run on."""
    yield Finding(name="python", level="ok", text=platform.python_version(), data=platform.python_version())
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            optional = package in _OPTIONAL or importlib.util.find_spec(package) is not None
            yield Finding(name=package, level="note" if optional else "problem", text="not installed")
        else:
            yield Finding(name=package, level="ok", text=version, data=version)
    yield Finding(name="formats", level="ok", text=", ".join(format_names()), data=list(format_names()))
    yield _device()
    yield _processes()


def _device() -> Finding:
    if importlib.util.find_spec("torch_xla") is not None:
        device = os.environ.get("PJRT_DEVICE", "")
        text = f"XLA, PJRT_DEVICE={device}" if device else "XLA is installed; PJRT_DEVICE is not set"
        return Finding(name="device", level="ok" if device else "note", text=text, data=f"xla:{device.lower()}")
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        return Finding(name="device", level="ok", text=f"CUDA, {count} devices", data=f"cuda:{count}")
    return Finding(name="device", level="ok", text="CPU", data="cpu")


def _processes() -> Finding:
    count = os.environ.get("WORLD_SIZE", "1")
    text = "one process" if count in ("", "1") else f"the environment speaks of {count} processes"
    return Finding(name="processes", level="ok", text=text, data=count or "1")


def diagnose_root(root: Path) -> Iterator[Finding]:
    """Yield what lies in a root, who owns it, and how fast it can be written to.

    A root that is not there yet is judged by the directory in which it would be made.
    """
    try:
        os.lstat(root)
    except (FileNotFoundError, NotADirectoryError):
        pass  # judged below, by what there is
    except OSError as error:
        yield Finding(name="root", level="problem", text=f"{root} cannot be reached: {error.strerror}")
        return
    place = root
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if not os.path.isdir(place):
        what = "a symbolic link that leads nowhere" if os.path.islink(place) else "not a directory"
        yield Finding(name="root", level="problem", text=f"{place} is {what}")
        return
    if place == root:
        try:
            refuse_step(LocalStorage(root))
        except CheckpointError as error:
            yield Finding(name="root", level="problem", text=str(error))
            return
        yield from _content(LocalStorage(root))
    else:
        yield Finding(name="root", level="ok", text=f"not there yet; it would be made in {place}", data=str(place))
    yield Finding(name="file system", level="ok", text=_file_system(place), data=_file_system(place))
    storage = LocalStorage(place)
    free = storage.free_bytes()
    if free is not None:
        yield Finding(
            name="free space", level="ok" if free > _PROBE_BYTES else "problem", text=f"{free:,} bytes", data=free
        )
    yield from _write_probe(storage)


def diagnose_url(root: str) -> Iterator[Finding]:
    """Yield what lies in a root by URL, who owns it, whether its store keeps conditions, and how fast it takes a file.

    Raises:
        InvalidArgumentError: the URL names no storage.
    """
    storage = open_storage(root)
    try:
        storage.make_dir("")
    except CheckpointError as error:
        yield Finding(name="root", level="problem", text=str(error))
        return
    yield from _content(storage)
    name = f".safepoint-doctor-{secrets.token_hex(8)}"
    try:
        rate = _write(storage, f"{name}/probe")
        yield Finding(name="writable", level="ok", text="yes", data=True)
        require_conditional_writes(storage, f"{name}/conditions")
        yield Finding(name="conditions", level="ok", text="kept", data=True)
        text = f"{rate / 1e6:,.0f} MB/s, {_PROBE_BYTES >> 20} MiB in one piece"
        yield Finding(name="write speed", level="ok", text=text, data=round(rate))
    except CheckpointError as error:
        yield Finding(name="writable", level="problem", text=str(error), data=False)
    finally:
        with suppress(CheckpointError):  # told already
            storage.delete_tree(name)


def _content(storage: Storage) -> Iterator[Finding]:
    try:
        shown = overview(storage)
        holder = current_holder(storage.root if isinstance(storage, LocalStorage) else storage)
    except CheckpointError as error:
        yield Finding(name="root", level="problem", text=str(error))
        return
    counts = {"steps": len(shown.steps), "problems": len(shown.problems)}
    text = f"{counts['steps']} committed" + (
        f", and {counts['problems']} that cannot be read" if shown.problems else ""
    )
    yield Finding(name="root", level="problem" if shown.problems else "ok", text=text, data=counts)
    if holder is None:
        yield Finding(name="owner", level="ok", text="nobody")
        return
    state = "unknown" if holder.process is None else holder.process.state()
    yield Finding(name="owner", level="note", text=f"{holder} ({state})", data={"owner": str(holder), "state": state})


def _file_system(place: Path) -> str:
    """Return the type of the file system, from the longest mount point above the place."""
    best, kind = "", "unknown"
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                _, point, found, *_ = line.split(" ")
                point = point.encode().decode("unicode_escape")
                inside = str(place) == point or str(place).startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, found
    except (OSError, ValueError):
        return "unknown"
    return kind


def _write_probe(storage: LocalStorage) -> Iterator[Finding]:
    name = f".safepoint-doctor-{secrets.token_hex(8)}"
    try:
        storage.make_dir(name, exist_ok=False)
        rate = _write(storage, f"{name}/probe")
        yield Finding(name="writable", level="ok", text="yes", data=True)
        direct = allows_direct(storage.root / name / "probe")
        text = "yes" if direct else "no: writes go through the page cache"
        yield Finding(name="direct I/O", level="ok" if direct else "note", text=text, data=direct)
        linked = storage.link_file(f"{name}/probe", f"{name}/link")
        text = "yes" if linked else 'no: unchanged="link" has no effect'
        yield Finding(name="hard links", level="ok" if linked else "note", text=text, data=linked)
        text = f"{rate / 1e6:,.0f} MB/s, {_PROBE_BYTES >> 20} MiB, durably"
        yield Finding(name="write speed", level="ok", text=text, data=round(rate))
    except (CheckpointError, OSError) as error:
        yield Finding(name="writable", level="problem", text=str(error), data=False)
    finally:
        with suppress(CheckpointError):  # told already: it cannot be written to
            storage.delete_tree(name)


def _write(storage: Storage, path: str) -> float:
    """Write a file, durably, and return the bytes in a second."""
    block = memoryview(os.urandom(_PROBE_PIECE))
    started = time.monotonic()
    with storage.open_writer(path, num_bytes=_PROBE_BYTES) as writer:
        for _ in range(_PROBE_BYTES // _PROBE_PIECE):
            writer.append(block)
        writer.finish()
    return _PROBE_BYTES / (time.monotonic() - started)
