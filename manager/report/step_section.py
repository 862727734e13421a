"""What is in one step: a treemap of its leaves, the largest in a table, and which process wrote what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.report.markup import Markup, join, size, tag
from safepoint.manager.report.sections import data_table
from safepoint.manager.report.treemap import treemap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.manager.report.leaves import StepFacts, WriterFacts

__all__ = ["step_section"]

_MAX_LEAVES = 500
_MAX_WRITERS = 256


def step_section(step: StepFacts, items: Sequence[str]) -> Markup:
    """Return a step; `items` are named in the order of their colours."""
    return join(
        tag("h3", "Leaves"),
        treemap(step, items) if any(leaf.num_bytes for leaf in step.leaves) else tag("p", "It holds no array."),
        _leaf_table(step),
        tag("h3", "Which process wrote what"),
        _writers(step, items),
    )


def _leaf_table(step: StepFacts) -> Markup | None:
    if not step.leaves:
        return None
    shown = step.leaves[:_MAX_LEAVES]
    caption = (
        f"All leaves: {len(step.leaves):,}" if len(shown) == len(step.leaves) else f"The {len(shown)} largest leaves"
    )
    rows = [[leaf.path, leaf.dtype, leaf.shape, size(leaf.num_bytes), f"{leaf.num_regions:,}"] for leaf in shown]
    table = data_table(f"{caption}, the largest first", ("leaf", "dtype", "shape", "size", "regions"), rows, right="34")
    rest = step.leaves[_MAX_LEAVES:]
    note = f"{len(rest):,} smaller ones hold {size(sum(leaf.num_bytes for leaf in rest))}."
    return tag("details", tag("summary", caption), table, tag("p", note, class_="note") if rest else None)


def _writers(step: StepFacts, items: Sequence[str]) -> Markup:
    most = max((writer.num_bytes for writer in step.writers), default=0)
    if not most:
        return tag("p", "Nobody wrote a file.")
    shown = step.writers[:_MAX_WRITERS]
    rows = [
        [
            f"process {writer.process_index}",
            size(writer.num_bytes),
            _bar(writer, items, most),
            _files(writer),
        ]
        for writer in shown
    ]
    rest = step.writers[_MAX_WRITERS:]
    note = f"{len(rest):,} more processes wrote {size(sum(writer.num_bytes for writer in rest))}."
    return join(
        data_table("Bytes by process", ("process", "wrote", "by item", "files"), rows, right="1"),
        tag("p", note, class_="note") if rest else None,
    )


def _bar(writer: WriterFacts, items: Sequence[str], most: int) -> Markup:
    parts = []
    for item, num_bytes in writer.items:
        index = items.index(item) if item in items else len(items) - 1
        width = f"width:{100 * num_bytes / most:.2f}%"
        parts.append(tag("span", class_=f"c{index}", style=width, title=f"{item}: {size(num_bytes)}"))
    label = ", ".join(f"{item} {size(num_bytes)}" for item, num_bytes in writer.items[:_NAMED]) or "no array"
    return tag("div", *parts, class_="bar", role="img", aria_label=label)


_NAMED = 8


def _files(writer: WriterFacts) -> str:
    first, num_bytes = writer.files[0]
    if len(writer.files) == 1:
        return first
    del num_bytes
    return f"{first} and {len(writer.files) - 1:,} more"
