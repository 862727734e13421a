"""A treemap: boxes whose areas are as the numbers, each as square as can be (Bruls, Huizing and van Wijk, 2000)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.manager.report.markup import Markup, size, tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.manager.report.leaves import LeafFacts, StepFacts

__all__ = ["Box", "squarify", "treemap"]

_MAX_LEAVES = 300
_SMALLEST = 0.0001
"""Leaves below this part of the whole are shown together."""

_ASPECT = 2.2
_LABEL = 0.003
"""Boxes below this part of the whole have no room for a name."""

_HEADING = 5.5


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle: its left upper corner, and its sides."""

    x: float
    y: float
    width: float
    height: float


def squarify(values: Sequence[float], box: Box) -> list[Box]:
    """Cut a box into parts of these areas, up to a common factor; `values` are positive and fall."""
    total = sum(values)
    if not values or total <= 0:
        return []
    areas = [value * box.width * box.height / total for value in values]
    placed: list[Box] = []
    while areas:
        side = min(box.width, box.height)
        count = 1
        while count < len(areas) and _worst(areas[: count + 1], side) <= _worst(areas[:count], side):
            count += 1
        row, areas = areas[:count], areas[count:]
        boxes, box = _lay(row, box)
        placed += boxes
    return placed


def _worst(row: Sequence[float], side: float) -> float:
    total = sum(row)
    if side <= 0 or total <= 0:
        return float("inf")
    return max(side * side * max(row) / (total * total), total * total / (side * side * max(min(row), 1e-300)))


def _lay(row: Sequence[float], box: Box) -> tuple[list[Box], Box]:
    """Lay a row along the shorter side of a box; return the boxes, and what is left."""
    total = sum(row)
    placed = []
    if box.width >= box.height:
        width = min(box.width, total / box.height) if box.height > 0 else 0.0
        y = box.y
        for area in row:
            height = box.height * area / total if total > 0 else 0.0
            placed.append(Box(box.x, y, width, height))
            y += height
        return placed, Box(box.x + width, box.y, max(0.0, box.width - width), box.height)
    height = min(box.height, total / box.width) if box.width > 0 else 0.0
    x = box.x
    for area in row:
        width = box.width * area / total if total > 0 else 0.0
        placed.append(Box(x, box.y, width, height))
        x += width
    return placed, Box(box.x, box.y + height, box.width, max(0.0, box.height - height))


def treemap(step: StepFacts, colors: Sequence[str]) -> Markup:
    """Return the leaves of a step as boxes, those of an item together; `colors` are the names of the items in order."""
    total = sum(leaf.num_bytes for leaf in step.leaves)
    by_item: dict[str, list[LeafFacts]] = {}
    for leaf in step.leaves:
        if leaf.num_bytes:
            by_item.setdefault(leaf.item, []).append(leaf)
    order = sorted(by_item, key=lambda item: -sum(leaf.num_bytes for leaf in by_item[item]))
    whole = Box(0.0, 0.0, 100.0 * _ASPECT, 100.0)
    outer = squarify([float(sum(leaf.num_bytes for leaf in by_item[item])) for item in order], whole)
    cells = []
    for item, box in zip(order, outer, strict=True):
        color = f"c{min(colors.index(item), len(colors) - 1) if item in colors else len(colors) - 1}"
        parts = _parts(by_item[item], total)
        heading = f"{item}: {size(sum(num_bytes for _, num_bytes in parts))}"
        inside = box
        if box.height > 4 * _HEADING and box.width > 4 * _HEADING and len(parts) > 1:
            cells.append(_cell("heading", heading, heading, Box(box.x, box.y, box.width, _HEADING), color))
            inside = Box(box.x, box.y + _HEADING, box.width, box.height - _HEADING)
        for (name, num_bytes), inner in zip(parts, squarify([float(value) for _, value in parts], inside), strict=True):
            short = name.removeprefix(f"{item}.") if inner.width * inner.height > _LABEL * whole.width * 100.0 else ""
            cells.append(_cell("cell", short, f"{name}: {size(num_bytes)}", inner, color))
    label = f"Treemap of the {len(step.leaves)} leaves of step {step.step} by bytes. The table below has the largest."
    return tag("div", *cells, class_="treemap", role="img", aria_label=label)


def _parts(leaves: Sequence[LeafFacts], total: int) -> list[tuple[str, int]]:
    large = [leaf for leaf in leaves[:_MAX_LEAVES] if leaf.num_bytes >= _SMALLEST * total] or list(leaves[:1])
    parts = [(leaf.path, leaf.num_bytes) for leaf in large]
    rest = leaves[len(large) :]
    if rest:
        name = f"{len(rest)} smaller leaves of {leaves[0].item}"
        parts.append((name, sum(leaf.num_bytes for leaf in rest)))
        parts.sort(key=lambda part: -part[1])
    return parts


def _cell(kind: str, text: str, title: str, box: Box, color: str) -> Markup:
    place = f"left:{box.x / _ASPECT:.3f}%;top:{box.y:.3f}%;width:{box.width / _ASPECT:.3f}%;height:{box.height:.3f}%"
    # A name may be cut after each of its parts.
    parts = [part for piece in text.split(".") for part in (piece, ".", Markup("<wbr>"))][:-2] if text else []
    return tag("div", *parts, class_=f"{kind} {color}", style=place, title=title)
