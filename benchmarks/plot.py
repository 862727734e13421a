"""Draws the two figures that matter most as an SVG, and a Markdown table of all goals. Needs no plotting library."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.measuring import Goal, Race, Report

__all__ = ["goals_table", "speed_chart", "summary_table"]

_CHARTED = (
    ("save", "Save of"),
    ("restore", "Restore into existing tensors, warm"),
    ("restore", "Restore into existing tensors, cold"),
)
"""Suite, and how the title of its race begins."""

_WIDTH, _LEFT, _BAR, _GAP = 760, 230, 20, 6


def speed_chart(reports: Sequence[Report]) -> str:
    """Return an SVG of the speeds of the races over one large state."""
    races = [
        race
        for report in reports
        for race in report.races
        if any(report.suite == suite and race.title.startswith(title) for suite, title in _CHARTED)
    ]
    parts: list[str] = []
    top = 10
    for race in races:
        parts.append(_text(10, top + 16, race.title, "title"))
        top += 30
        speeds = {name: race.num_bytes[name] / race.median_secs(name) / 2**30 for name in race.samples}
        largest = max(speeds.values())
        for name, speed in sorted(speeds.items(), key=lambda item: -item[1]):
            width = max(1.0, speed / largest * (_WIDTH - _LEFT - 80))
            kind = "ours" if name == "safepoint" else "limit" if name.startswith("raw") else "peer"
            parts.append(_text(_LEFT - 8, top + 15, name, "name"))
            parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR}"/>')
            parts.append(_text(_LEFT + width + 6, top + 15, f"{speed:.2f} GiB/s", "value"))
            top += _BAR + _GAP
        top += 14
    style = (
        "text{font:13px sans-serif;fill:#24292f}.title{font-weight:bold}.name{text-anchor:end}"
        ".ours{fill:#1f6feb}.peer{fill:#8c959f}.limit{fill:#d0d7de}rect.back{fill:#ffffff}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}">'
        f'<style>{style}</style><rect class="back" width="{_WIDTH}" height="{top}"/>{"".join(parts)}</svg>\n'
    )


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y}">{escape(text)}</text>'


def goals_table(reports: Sequence[Report]) -> str:
    """Return a Markdown table with a row a goal."""
    rows = ["| | goal | measured | |", "|---|---|---|---|"]
    rows += [_row(goal) for report in reports for goal in report.goals]
    return "\n".join(rows) + "\n"


def _row(goal: Goal) -> str:
    sign = "≤" if goal.at_most else "≥"
    measured = "not measured" if goal.measured is None else f"{goal.measured:.2f}{goal.unit}"
    state = {True: "reached", False: "short", None: ""}[goal.is_reached]
    return f"| {goal.name} | {sign} {goal.target:g}{goal.unit} | {measured} | {state} |"


_SUMMARY = (
    ("Save of", "save", 1 / 2**30, "GiB/s"),
    ("Blocked time of an async save", "async save: the loop stops for", 0, "ms"),
    ("Restore into existing tensors, warm", "restore from the page cache", 1 / 2**30, "GiB/s"),
    ("Restore into existing tensors, cold", "restore from the disk", 1 / 2**30, "GiB/s"),
)
"""How the title of a race begins, its row, what a byte a second is, or 0 for a time, and the unit."""

_COLUMNS = ("safepoint", "torch.save", "safetensors", "DCP", "torch_checkpointing", "Orbax")


def summary_table(reports: Sequence[Report]) -> str:
    """Return a Markdown table of the medians of ours and of the peers, for the README."""
    races = [race for report in reports for race in report.races]
    columns = [name for name in _COLUMNS if any(name in race.samples for race in races)]
    rows = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for title, label, scale, unit in _SUMMARY:
        race = next((race for race in races if race.title.startswith(title)), None)
        if race is not None:
            cells = (_cell(race, name, scale) for name in columns)
            rows.append(f"| {label}, {unit} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _cell(race: Race, name: str, scale: float) -> str:
    if name not in race.samples:
        return ""
    secs = race.median_secs(name)
    return f"{race.num_bytes[name] * scale / secs:.2f}" if scale else f"{1000 * secs:.0f}"
