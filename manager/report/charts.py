"""Stacked columns, one a save: how long its phases took, and how large its items are. Drawn without a script."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.manager.report.markup import Markup, duration, join, size, tag

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safepoint.manager.report.facts import SaveFacts

__all__ = ["Column", "legend", "phase_chart", "phase_columns", "save_text", "size_chart"]

PHASES = (("begin", "meet and plan"), ("stage", "stage"), ("write", "write"), ("commit", "wait and commit"))

_LEAST_COLUMNS = 24
_COLUMN = 0.8
_NUM_COLORS = 8
_OUTLIER = 3.0
"""How many times the usual a column may be before it is cut."""

_ROUND = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: its parts from below, each a class and a height; a mark, and what it says."""

    parts: tuple[tuple[str, float], ...]
    text: str
    mark: float | None = None


def save_text(save: SaveFacts) -> str:
    """Return one line about a save."""
    parts = [f"step {save.step}", f"{duration(save.secs)} in all"]
    parts += [f"{label} {duration(getattr(save, f'{name}_secs'))}" for name, label in PHASES]
    parts.append(f"held up the training for {duration(save.blocked_secs)}")
    parts += [size(save.num_bytes)] if save.num_bytes is not None else []
    parts += [] if save.is_there else ["removed since"]
    return " · ".join(parts)


def phase_columns(saves: Sequence[SaveFacts]) -> list[Column]:
    """Return a column for each save."""
    return [
        Column(
            parts=tuple((name, getattr(save, f"{name}_secs")) for name, _ in PHASES),
            text=save_text(save),
            mark=save.blocked_secs if save.is_blocking is False else None,
        )
        for save in saves
    ]


def phase_chart(saves: Sequence[SaveFacts]) -> Markup:
    """Return how long each save took."""
    return _chart(
        phase_columns(saves),
        steps=[save.step for save in saves],
        unit=duration,
        label=f"How long each of {len(saves)} saves took, by phase. The table of steps has the same numbers.",
        identity="chart-secs",
    )


def size_chart(saves: Sequence[SaveFacts]) -> tuple[Markup, list[str]]:
    """Return how large each save's items are, and the names of the items as they are coloured."""
    known = [save for save in saves if save.items is not None]
    totals: dict[str, int] = {}
    for save in known:
        for item, num_bytes in (save.items or {}).items():
            totals[item] = totals.get(item, 0) + num_bytes
    names = sorted(totals, key=lambda item: (-totals[item], item))
    shown = names if len(names) <= _NUM_COLORS else names[: _NUM_COLORS - 1]
    columns = []
    for save in known:
        items = save.items or {}
        parts = [(f"c{index}", float(items.get(item, 0))) for index, item in enumerate(shown)]
        rest = sum(num_bytes for item, num_bytes in items.items() if item not in shown)
        parts += [(f"c{_NUM_COLORS - 1}", float(rest))] if rest else []
        lines = " · ".join(f"{item} {size(items[item])}" for item in shown if item in items)
        columns.append(Column(parts=tuple(parts), text=f"step {save.step} · {lines}"))
    chart = _chart(
        columns,
        steps=[save.step for save in known],
        unit=lambda value: size(int(value)),
        label=f"Bytes of each item in {len(known)} saves.",
        identity="chart-bytes",
    )
    return chart, [*shown, *(["everything else"] if len(shown) < len(names) else [])]


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Return which colour is what."""
    items = [tag("li", tag("span", class_=f"key {color}", aria_hidden="true"), name) for color, name in entries]
    return tag("ul", *items, class_="legend")


def _chart(
    columns: Sequence[Column], *, steps: Sequence[int], unit: Callable[[float], str], label: str, identity: str
) -> Markup:
    top, is_cut = _top([sum(height for _, height in column.parts) for column in columns])
    width = max(_LEAST_COLUMNS, len(columns))
    drawn = [_draw(index, column, top) for index, column in enumerate(columns)]
    svg = tag(
        "svg",
        *drawn,
        viewBox=f"0 0 {width} 100",
        preserveAspectRatio="none",
        role="img",
        aria_label=label,
        id=identity,
    )
    scale = [tag("span", unit(top * part)) for part in (1.0, 0.5, 0.0)]
    marks = sorted({0, len(steps) // 2, len(steps) - 1}) if steps else []
    ends = [tag("span", f"step {steps[index]}") for index in marks]
    note = tag("p", "Columns with a jagged top are cut: they took far longer than the rest.", class_="note")
    return join(
        tag(
            "div",
            tag("div", *scale, class_="scale", aria_hidden="true"),
            tag("div", svg, class_="plot"),
            tag("div", *ends, class_="ends", style=f"width:{100 * len(columns) / width:.2f}%", aria_hidden="true"),
            class_="chart",
        ),
        note if is_cut else None,
    )


def _top(totals: Sequence[float]) -> tuple[float, bool]:
    """Return the value at the upper end, and whether some column goes beyond it."""
    highest = max(totals, default=0.0)
    typical = sorted(totals)[int(0.95 * (len(totals) - 1))] if totals else 0.0
    is_cut = typical > 0 and highest > _OUTLIER * typical
    return _rounded(1.2 * typical if is_cut else highest), is_cut


def _rounded(value: float) -> float:
    if value <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in _ROUND if step * power >= value * 0.9999)


def _draw(index: int, column: Column, top: float) -> Markup:
    rects, below = [], 0.0
    x = f"{index + (1 - _COLUMN) / 2:.1f}"
    for color, value in column.parts:
        height = min(100.0 * value / top, 100.0 - below)
        if height > 0:
            y = f"{100 - below - height:.2f}"
            rects.append(tag("rect", x=x, y=y, width=_COLUMN, height=f"{height:.2f}", class_=color))
            below += height
    if sum(value for _, value in column.parts) > top * 1.0001:
        rects.append(tag("path", d=f"M{x} 0l.2 4 .2-4 .2 4 .2-4z", class_="cut"))
    if column.mark is not None and 0 < column.mark <= top:
        y = f"{max(0.0, 100 - 100 * column.mark / top - 0.6):.2f}"
        rects.append(tag("rect", x=f"{index:.1f}", y=y, width=1, height=1.2, class_="mark"))
    return tag("g", tag("title", column.text), *rects)
