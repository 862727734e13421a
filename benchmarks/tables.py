"""Prints what was measured: a table a race, and a line a goal."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from benchmarks.measuring import Goal, Race, Report

__all__ = ["goal_text", "print_goals", "print_report"]

_STATES = {True: ("reached", "green"), False: ("short", "yellow"), None: ("not measured", "dim")}


def print_report(report: Report, console: Console) -> None:
    """Print the tables of one suite."""
    for race in report.races:
        console.print(_table(race))
        for name, reason in race.absent.items():
            console.print(f"  [dim]{name}: {reason}[/dim]", highlight=False)
    for note in report.notes:
        console.print(f"  [dim]{report.suite}: {note}[/dim]", highlight=False)


def _table(race: Race) -> Table:
    first = next(iter(race.samples))
    table = Table(title=race.title, title_justify="left", title_style="bold")
    table.add_column("")
    for heading in ("median ms", "lowest to highest", "GiB/s", "CPU s", "extra MiB", f"{first} is"):
        table.add_column(heading, justify="right")
    table.add_column("when it returns")
    for name, samples in sorted(race.samples.items(), key=lambda item: race.median_secs(item[0])):
        secs = sorted(sample.secs for sample in samples)
        median = statistics.median(secs)
        ratio = race.speedup(first, name)
        table.add_row(
            name,
            f"{median * 1000:.3g}" if median < 1 else f"{median * 1000:.0f}",
            f"{secs[0] * 1000:.3g} to {secs[-1] * 1000:.3g}",
            f"{race.num_bytes.get(name, 0) / median / 2**30:.2f}" if race.num_bytes.get(name) else "",
            f"{statistics.median(sample.cpu_secs for sample in samples):.2f}",
            f"{max(sample.extra_bytes for sample in samples) >> 20}",
            "" if name == first or ratio is None else f"{ratio:.2f} ×",
            race.keeps.get(name, ""),
            style="bold" if name == first else "",
        )
    return table


def goal_text(goal: Goal) -> str:
    """Return the goal and what was measured, on one line."""
    sign = "≤" if goal.at_most else "≥"
    measured = "-" if goal.measured is None else f"{goal.measured:.2f}{goal.unit}"
    return f"{goal.name}: goal {sign} {goal.target:g}{goal.unit}, measured {measured}"


def print_goals(reports: Sequence[Report], console: Console) -> None:
    """Print one line a goal."""
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("goal", "left"), ("asked", "right"), ("measured", "right"), ("", "left")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for report in reports:
        for goal in report.goals:
            word, style = _STATES[goal.is_reached]
            sign = "≤" if goal.at_most else "≥"
            measured = "" if goal.measured is None else f"{goal.measured:.2f}{goal.unit}"
            table.add_row(goal.name, f"{sign} {goal.target:g}{goal.unit}", measured, Text(word, style=style))
    console.print(table)
