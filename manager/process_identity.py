"""Telling one process from all others, also later and from elsewhere: host, boot, PID namespace, PID, start time.

A PID alone is used again, and means nothing on another host or in another container. Reads `/proc`; where there is
none, nothing is claimed about other processes.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

__all__ = ["ProcessIdentity"]

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """One process.

    Attributes:
        host: name of the host, for people, and as one more difference.
        boot_id: of the running kernel; "" where it is not known.
        pid_space: the PID namespace, so that containers on one host are told apart.
        pid: the process.
        start_ticks: when it started, in clock ticks since boot; None where it is not known.
    """

    host: str
    boot_id: str
    pid_space: str
    pid: int
    start_ticks: int | None

    @classmethod
    def current(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        found = _look_up(os.getpid())
        return cls(
            host=socket.gethostname(),
            boot_id=_read(_BOOT_ID),
            pid_space=_pid_space(),
            pid=os.getpid(),
            start_ticks=None if found is None else found[1],
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value from which `from_json` makes an equal one."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ProcessIdentity:
        """Return the identity that `to_json` described.

        Raises:
            ValueError: it is none.
        """
        texts = [value.get(name) for name in ("host", "boot_id", "pid_space")]
        pid, start_ticks = value.get("pid"), value.get("start_ticks")
        if not all(isinstance(text, str) for text in texts) or type(pid) is not int or pid <= 0:
            raise ValueError("not the identity of a process")
        if start_ticks is not None and type(start_ticks) is not int:
            raise ValueError("not the start of a process")
        host, boot_id, pid_space = (str(text) for text in texts)
        return cls(host=host, boot_id=boot_id, pid_space=pid_space, pid=pid, start_ticks=start_ticks)

    def state(self) -> Literal["gone", "running", "stopped", "unknown"]:
        """Say what became of the process, as far as that can be seen from here.

        "unknown" for a process of another host, boot or container, and for one that may not be looked at.
        """
        here = ProcessIdentity.current()
        if not self.boot_id or (self.boot_id, self.pid_space, self.host) != (here.boot_id, here.pid_space, here.host):
            return "unknown"
        found = _look_up(self.pid)
        if found is None:
            return "unknown" if _may_exist(self.pid) else "gone"
        state, start_ticks = found
        if state in "ZX" or start_ticks != self.start_ticks:
            return "gone"
        return "stopped" if state in "Tt" else "running"


def _look_up(pid: int) -> tuple[str, int] | None:
    """Return state letter and start time of a process from `/proc/<pid>/stat` (proc(5), fields 3 and 22)."""
    text = _read(_PROC / str(pid) / "stat")
    fields = text.rpartition(")")[2].split()  # the name in parentheses may hold anything
    try:
        return fields[0], int(fields[19])
    except (IndexError, ValueError):
        return None


def _may_exist(pid: int) -> bool:
    """Ask the kernel itself: `/proc` may hide the processes of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _pid_space() -> str:
    try:
        return str((_PROC / "self/ns/pid").readlink())
    except OSError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
