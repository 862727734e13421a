"""What a process may still take, from files as Linux has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.free_memory import free_memory

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = "MemTotal:       1000 kB\nMemAvailable:    900 kB\n"


def make(system: Path, **files: str) -> Path:
    for name, text in files.items():
        path = system / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return system


def test_without_a_limit_it_is_what_the_machine_has(tmp_path: Path) -> None:
    make(tmp_path, **{"proc/meminfo": MACHINE, "proc/self/cgroup": "0::/user/run\n"})
    make(tmp_path, **{"sys/fs/cgroup/user/run/memory.max": "max\n", "sys/fs/cgroup/user/run/memory.current": "5\n"})
    assert free_memory(tmp_path) == 900 << 10


def test_the_tightest_group_decides_and_what_it_caches_is_free(tmp_path: Path) -> None:
    make(tmp_path, **{"proc/meminfo": MACHINE, "proc/self/cgroup": "0::/pod/run\n"})
    for group, limit in (("pod", 70_000), ("pod/run", 800_000)):
        below = f"sys/fs/cgroup/{group}"
        make(tmp_path, **{f"{below}/memory.max": f"{limit}\n", f"{below}/memory.current": "50000\n"})
        make(tmp_path, **{f"{below}/memory.stat": "anon 1\ninactive_file 10000\nactive_file 7\n"})
    assert free_memory(tmp_path) == 70_000 - 50_000 + 10_000


def test_groups_of_the_first_version_are_understood(tmp_path: Path) -> None:
    make(tmp_path, **{"proc/meminfo": MACHINE, "proc/self/cgroup": "12:cpu,cpuacct:/x\n4:memory:/docker/ab\n"})
    below = "sys/fs/cgroup/memory"  # in a container the path of the host's is not there, and its top is the group
    make(tmp_path, **{f"{below}/memory.limit_in_bytes": "5000\n", f"{below}/memory.usage_in_bytes": "6000\n"})
    make(tmp_path, **{f"{below}/memory.stat": "total_inactive_file 500\n"})
    assert free_memory(tmp_path) == 0


def test_nobody_tells(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None


def test_this_machine_tells_something_that_can_be() -> None:
    free = free_memory()
    assert free is None or free > 1 << 20
