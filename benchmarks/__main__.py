"""The command line: `python -m benchmarks [--quick] [--suite NAME …] [--json FILE] [--directory DIR]`."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.measuring import Report
from benchmarks.plot import goals_table, speed_chart, summary_table
from benchmarks.settings import Settings, Workspace
from benchmarks.suites import SUITES
from benchmarks.tables import goal_text, print_goals, print_report

_GUARDED = ("save", "async", "restore")
_MARGIN = 8.0
"""Of the guard: on two cores with a load of 4 to 20 a small state missed no goal by more than fivefold."""


def main() -> int:
    """Run the suites asked for and return the exit status."""
    options = _parser().parse_args()
    if options.draw:
        _draw(options, _loaded(options.draw))
        return 0
    if options.guard:
        options.quick = True
        options.suite = options.suite or list(_GUARDED)
    settings = Settings.quick() if options.quick else Settings.full()
    if options.rounds:
        settings = replace(settings, rounds=options.rounds)
    logging.getLogger("safepoint").setLevel(logging.ERROR)
    logging.getLogger("torch").setLevel(logging.ERROR)
    console = Console(width=None if sys.stdout.isatty() else 160)
    options.directory.mkdir(parents=True, exist_ok=True)
    workspace = Workspace(root=Path(tempfile.mkdtemp(prefix="run-", dir=options.directory)))
    reports: list[Report] = []
    started = time.monotonic()
    try:
        for name in options.suite or SUITES:
            begun = time.monotonic()
            report = SUITES[name](settings, workspace)
            if options.guard and any(goal.is_far_off(_MARGIN) for goal in report.goals):
                report = SUITES[name](settings, workspace)  # once more: a busy moment is no regression
            reports.append(report)
            if not options.quick:
                print_report(report, console)
            console.print(f"[dim]{name}: {time.monotonic() - begun:.0f} s[/dim]", highlight=False)
    finally:
        shutil.rmtree(workspace.root, ignore_errors=True)
    print_goals(reports, console)
    console.print(f"{time.monotonic() - started:.0f} s in all; {_machine_text()}", highlight=False)
    _write(options, reports)
    if not options.guard:
        return 0
    lost = [goal for report in reports for goal in report.goals if goal.is_far_off(_MARGIN)]
    for goal in lost:
        console.print(f"far off, twice: {goal_text(goal)}", highlight=False)
    return 1 if lost else 0


def _write(options: argparse.Namespace, reports: list[Report]) -> None:
    if options.json:
        found = {"machine": _machine(), "reports": [report.to_json() for report in reports]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    _draw(options, reports)


def _draw(options: argparse.Namespace, reports: list[Report]) -> None:
    if options.plot:
        options.plot.write_text(speed_chart(reports))
    if options.table:
        options.table.write_text(goals_table(reports))
    if options.summary:
        options.summary.write_text(summary_table(reports))


def _loaded(paths: list[Path]) -> list[Report]:
    found = [json.loads(path.read_text()) for path in paths]
    return [Report.from_json(report) for run in found for report in run["reports"]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure safepoint beside its peers.")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes: ends within 45 s on idle cores; prints one line a goal"
    )
    parser.add_argument("--suite", action="append", choices=list(SUITES), help="only this one; may be given again")
    parser.add_argument(
        "--guard", action="store_true", help="a quick run that fails when a ratio is far off its goal, twice"
    )
    parser.add_argument("--plot", type=Path, help="write a chart of the large state's speeds there, as SVG")
    parser.add_argument("--table", type=Path, help="write the goals there, as a Markdown table")
    parser.add_argument("--summary", type=Path, help="write a short table of ours beside the peers there, as Markdown")
    parser.add_argument(
        "--draw", action="append", type=Path, help="measure nothing; draw from what --json wrote; may be given again"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds of a race")
    parser.add_argument("--json", type=Path, help="write every sample there")
    parser.add_argument(
        "--directory", type=Path, default=Path("build/benchmarks"), help="where to write; must be on a real disk"
    )
    return parser


def _machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _machine_text() -> str:
    machine = _machine()
    return (
        f"{machine['cores']} cores, load {machine['load']:.1f}, {machine['system']}, Python {machine['python']}, "
        f"torch {machine['torch']}"
    )


if __name__ == "__main__":
    sys.exit(main())
