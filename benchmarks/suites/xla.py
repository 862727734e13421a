"""Device-to-host staging on torch_xla: in one execution, tensor by tensor, and torch_xla's own manager."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.measuring import Goal, Race, Report, Sample

if TYPE_CHECKING:
    from benchmarks.settings import Settings, Workspace

__all__ = ["measure"]


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Run in a process of its own: an initialised XLA runtime would change the other suites."""
    report = Report(suite="xla")
    if settings.is_quick:
        report.notes.append("not measured in a quick run")
        return report
    if importlib.util.find_spec("torch_xla") is None:
        report.notes.append("torch_xla is not installed")
        return report
    directory = workspace.fresh("xla")
    directory.mkdir()
    command = [sys.executable, "-m", "benchmarks.xla_worker", str(directory)]
    command += [str(min(settings.state_bytes, 256 << 20)), str(settings.rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=False)
    workspace.remove(directory)
    if done.returncode:
        report.notes.append(f"the XLA process ended with status {done.returncode}")
        return report
    found = json.loads(done.stdout.splitlines()[-1])
    race = Race(title=f"Staging and saving {found['num_bytes'] >> 20} MiB from an XLA device")
    for name, secs in found["secs"].items():
        race.samples[name] = [Sample(secs=value, cpu_secs=0.0, extra_bytes=0) for value in secs]
        race.keeps[name] = found["keeps"][name]
        race.num_bytes[name] = found["num_bytes"]
    race.absent.update(found["absent"])
    report.races.append(race)
    report.goals.append(
        Goal(
            name="XLA: staging in batches / .cpu() one by one",
            target=1.0,
            measured=race.speedup("staging in batches", ".cpu() one by one"),
        )
    )
    return report
