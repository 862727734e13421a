"""Roots with many steps: opening, listing, and what a deletion costs its caller."""

from __future__ import annotations

import functools
import shutil
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.measuring import Contender, Goal, Report, run_race
from benchmarks.ours import OpenRoot
from safepoint.formats.manifest import CommitRecord
from safepoint.manager import CheckpointManager, KeepLast

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.settings import Settings, Workspace

__all__ = ["measure"]


def measure(settings: Settings, workspace: Workspace) -> Report:
    """Copy one step many times, then open and list."""
    report = Report(suite="listing")
    for count in settings.steps:
        root = workspace.fresh("steps")
        _fill(root, count)
        opened = run_race(
            f"Opening a root of {count:,} steps",
            [Contender(name="open, steps() and latest_step()", run=functools.partial(_open, root))],
            rounds=settings.rounds,
        )
        with CheckpointManager(root) as manager:
            again = run_race(
                f"latest_step() again among {count:,}",
                [Contender(name="safepoint", run=functools.partial(_latest, manager))],
                rounds=settings.rounds,
            )
        workspace.remove(root)
        report.races.extend([opened, again])
        scale = count / 1000
        report.goals.extend(
            [
                Goal(
                    name=f"opening a root of {count:,} steps",
                    target=50 * scale,
                    measured=1000 * opened.median_secs("open, steps() and latest_step()"),
                    at_most=True,
                    unit=" ms",
                ),
                Goal(
                    name=f"latest_step() (or steps()) again among {count:,}",
                    target=5 * scale,
                    measured=1000 * again.median_secs("safepoint"),
                    at_most=True,
                    unit=" ms",
                ),
            ]
        )
    report.goals.append(
        Goal(
            name="blocked by the deletion of an old step",
            target=1.0,
            measured=_deletion_millis(settings, workspace),
            at_most=True,
            unit=" ms",
        )
    )
    return report


def _open(root: Path) -> None:
    with CheckpointManager(root) as manager:
        _look(manager)


def _latest(manager: CheckpointManager) -> None:
    manager.latest_step()


def _look(manager: CheckpointManager) -> None:
    manager.steps()
    manager.latest_step()


def _fill(root: Path, count: int) -> None:
    """Make `count` steps out of one: only their records differ."""
    first = OpenRoot(root)
    first.save({"w": torch.zeros(8)})
    first.manager.close()
    model = root / "1"
    record = CommitRecord.from_bytes((model / "commit.json").read_bytes(), path="commit.json")
    for step in range(2, count + 1):
        directory = root / str(step)
        directory.mkdir()
        for name in ("manifest.json",):
            shutil.copyfile(model / name, directory / name)
        attempt = f"{step:016x}"
        (directory / "commit.json").write_bytes(replace(record, step=step, sequence=step, attempt=attempt).to_bytes())


def _deletion_millis(settings: Settings, workspace: Workspace) -> float:
    """Return how much longer a save takes that lets go of a large old step: the time of hiding it."""
    state = {"w": torch.zeros(settings.state_bytes // 4)}
    root = workspace.fresh("deletion")
    times = []
    with CheckpointManager(root, keep=KeepLast(1)) as manager:
        worker: Any = manager._retention  # noqa: SLF001 - its part of a save
        apply = worker.apply

        def timed(**options: Any) -> Any:
            started = time.perf_counter()
            hidden = apply(**options)
            times.append(time.perf_counter() - started)
            return hidden

        worker.apply = timed
        for step in range(settings.rounds + 1):
            manager.save(step, state)
    workspace.remove(root)
    return 1000 * statistics.median(times[1:])
