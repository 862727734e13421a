"""What differs between two steps, as tables and as JSON."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Any

from safepoint.manager.cli.output import counted, new_table, safe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from safepoint.manager.comparing import Comparison, Difference
    from safepoint.manager.step_paths import OpenStep

__all__ = ["comparison_document", "comparison_tables", "summary"]

_WORDS = {"only_a": "only in the first", "only_b": "only in the second", "value": "data"}


def comparison_tables(found: Comparison) -> Iterator[Table]:
    """Yield a table of what differs in the trees, and one of the leaves whose elements do."""
    if found.structure:
        table = new_table("path", "differs in", "first", "second")
        for one in found.structure:
            table.add_row(safe(one.path), _WORDS.get(one.kind, one.kind), _side(one, one.a), _side(one, one.b))
        yield table
    if found.leaves:
        numbers = ("changed", "elements", "max difference")
        table = new_table("leaf", *numbers, right=numbers)
        for one in found.leaves:
            largest = "" if one.max_difference is None else f"{one.max_difference:.6g}"
            table.add_row(safe(one.path), f"{one.num_changed:,}", f"{one.num_elements:,}", largest)
        yield table


def _side(one: Difference, value: Any) -> str:
    if value is None and one.kind.startswith("only"):
        return ""
    return safe(value if isinstance(value, str) and one.kind != "value" else reprlib.repr(value))


def summary(found: Comparison, *, values: bool) -> str:
    """Return the result in a line."""
    trees = f"{counted(len(found.structure), 'difference')} in the trees"
    if not values:
        return "the trees are equal" if found.is_equal else trees
    equal = f"{counted(found.num_equal, 'leaf')} equal in every bit"
    if found.is_equal:
        return f"no difference: {equal}"
    return f"{trees}, {counted(len(found.leaves), 'leaf')} changed, {equal}"


def comparison_document(a: OpenStep, b: OpenStep, found: Comparison, *, values: bool) -> dict[str, Any]:
    """Return the result."""
    return {
        "a": {"root": a.storage.location, "step": a.step},
        "b": {"root": b.storage.location, "step": b.step},
        "equal": found.is_equal,
        "values_compared": values,
        "structure": [{"path": one.path, "difference": one.kind, "a": one.a, "b": one.b} for one in found.structure],
        "leaves": [
            {
                "path": one.path,
                "num_changed": one.num_changed,
                "num_elements": one.num_elements,
                "max_difference": one.max_difference,
            }
            for one in found.leaves
        ],
        "num_equal": found.num_equal,
    }
