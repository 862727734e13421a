"""How much memory this process may still take: of the machine, and of the control group that a container gives it.

Taking more than that does not fail: the kernel kills the process later, when the memory is touched.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["free_memory"]


def free_memory(system: Path = Path("/")) -> int | None:
    """Return the bytes that can be taken without pushing anything out but what is cached, or None if nobody tells.

    Args:
        system: the root of the file system that tells; see proc(5), and the kernel's `cgroup-v2.rst`.
    """
    found = [_machine(system), *_groups(system)]
    known = [num_bytes for num_bytes in found if num_bytes is not None]
    return max(0, min(known)) if known else None


def _machine(system: Path) -> int | None:
    kilobytes = _table(system / "proc/meminfo").get("MemAvailable:")
    return None if kilobytes is None else kilobytes << 10


def _groups(system: Path) -> Iterator[int | None]:
    """Yield what is left of the group of this process and of all that it is in; each may have a limit."""
    with suppress(OSError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            number, kinds, path = line.split(":", maxsplit=2)
            if number == "0" and not kinds:
                top, names = system / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
            elif "memory" in kinds.split(","):
                top = system / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            else:
                continue
            group = Path(path.lstrip("/"))
            yield from (_left(top / inner, *names) for inner in (group, *group.parents))


def _left(group: Path, limit: str, usage: str, cached: str) -> int | None:
    with suppress(OSError, ValueError):  # no such group from here, or no limit: "max"
        left = int((group / limit).read_text()) - int((group / usage).read_text())
        return left + _table(group / "memory.stat").get(cached, 0)
    return None


def _table(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines "name number"."""
    found = {}
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, number, *_ = line.split()
            found[name] = int(number)
    return found
