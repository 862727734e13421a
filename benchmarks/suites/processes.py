"""Sharded saves by several processes of this machine, beside raw files and DCP."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import Goal, Race, Report, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.settings import Settings, Workspace

__all__ = ["measure"]


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Start the processes once a count; they race among themselves."""
    report = Report(suite="processes")
    for count in settings.processes:
        found = _start(count, settings, workspace)
        race = Race(title=f"Sharded save of {settings.state_bytes >> 20} MiB by {count} processes")
        for name, secs in found["secs"].items():
            race.samples[name] = [Sample(secs=value, cpu_secs=0.0, extra_bytes=0) for value in secs]
            race.keeps[name] = found["keeps"][name]
            race.num_bytes[name] = found["num_bytes"]
        report.races.append(race)
        report.races.extend(_restores(found, count))
        if count > 1:
            report.goals.extend(
                [
                    Goal(
                        name=f"{count} processes, save / raw aggregate",
                        target=0.8,
                        measured=race.speedup("safepoint", "raw O_DIRECT + fsync"),
                    ),
                    Goal(name=f"{count} processes, save / DCP", target=1.4, measured=race.speedup("safepoint", "DCP")),
                    Goal(
                        name=f"{count} processes, unevenness of replicated bytes / largest leaf",
                        target=1.0,
                        measured=found["unevenness"],
                        at_most=True,
                    ),
                    Goal(
                        name=f"{count} processes, cold restore of all by each: bytes from the device / state",
                        target=1.05,
                        measured=found["device_bytes"],
                        at_most=True,
                    ),
                ]
            )
    return report


def _restores(found: Any, count: int) -> Iterator[Race]:
    for title, secs in found["restores"].items():
        race = Race(title=f"Restore by {count} processes, {title}, warm")
        for name, values in secs.items():
            race.samples[name] = [Sample(secs=value, cpu_secs=0.0, extra_bytes=0) for value in values]
            race.keeps[name] = "every byte verified" if name == "safepoint" else "no digests"
            race.num_bytes[name] = found["num_bytes"] * (count if title.startswith("whole") else 1)
        yield race


def _start(count: int, settings: Settings, workspace: Workspace) -> Any:
    directory = workspace.fresh("processes")
    directory.mkdir()
    rounds = (settings.rounds, 0 if settings.is_quick else settings.rounds)
    arguments = [str(directory), str(count), str(settings.state_bytes), *map(str, rounds)]
    command = [sys.executable, "-m", "benchmarks.worker", *arguments]
    workers = [
        subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE if rank == 0 else None) for rank in range(count)
    ]
    try:
        output, _ = workers[0].communicate(timeout=300)
        for worker in workers:
            if worker.wait(timeout=60):
                raise RuntimeError(f"a process of {count} failed with exit status {worker.returncode}")
    finally:
        for worker in workers:
            worker.kill()
    workspace.remove(directory)
    return json.loads(output.splitlines()[-1])
