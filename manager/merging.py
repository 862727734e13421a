"""The union of what all processes hold, or the disagreement between them, by name.

Pure: tables in, table out. Processes may hold different leaves (pipeline and expert parallel ones do); what they hold
in common must agree. Must not know live values.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.manifest import JSON, Node, TreePath, display_path
from safepoint.manager.adapters import ArraySpec
from safepoint.manager.errors import DisagreementError
from safepoint.manager.leaf_table import LeafTable
from safepoint.manager.values import same_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.region import Region

__all__ = ["merge_tables"]

_NAMED = 3  # disagreements that the message names; the first is told in full

_MARK = "Mark what each process has for itself: `PerProcess(value)`. Otherwise make the processes agree before saving."
_KEYS = (
    "The processes keep different things under one name. Give them names that differ (an item or key a stage), "
    "or mark what each has for itself: `PerProcess(value)`."
)


def merge_tables(tables: Sequence[LeafTable]) -> LeafTable:
    """Return the union of the processes' tables, in time linear in their distinct nodes.

    Regions are joined, in the order of the processes. A table that several processes share is looked at once.

    Args:
        tables: one for each process, by process index.

    Raises:
        DisagreementError: a leaf or container that several processes have is not the same for all of them; names it
            and who brought what.
    """
    if not tables:
        raise InvalidArgumentError("there are no tables to merge")
    distinct: dict[int, tuple[LeafTable, list[int]]] = {}
    for process, table in enumerate(tables):
        distinct.setdefault(id(table), (table, []))[1].append(process)
    if len(distinct) == 1:
        return tables[0]
    merged = _Union()
    for table, _ in distinct.values():
        merged.add(table)
    if merged.disputed:
        raise _disagreement(list(merged.disputed), [*distinct.values()])
    return LeafTable(nodes=merged.nodes, arrays=merged.specs())


class _Union:
    def __init__(self) -> None:
        self.nodes: dict[TreePath, Node] = {}
        self.disputed: dict[TreePath, None] = {}
        self._arrays: dict[TreePath, ArraySpec] = {}
        self._regions: dict[TreePath, dict[Region, None]] = {}

    def add(self, table: LeafTable) -> None:
        for path, node in table.nodes.items():
            known = self.nodes.get(path)
            if known is None:
                self.nodes[path] = node
            elif known != node or node.kind == "value":
                joined = _join(known, node)
                if joined is None:
                    self.disputed[path] = None
                else:
                    self.nodes[path] = joined
        for path, spec in table.arrays.items():
            self._add_spec(path, spec)

    def _add_spec(self, path: TreePath, spec: ArraySpec) -> None:
        known = self._arrays.setdefault(path, spec)
        if known is not spec and (known.dtype, known.shape) != (spec.dtype, spec.shape):
            self.disputed[path] = None
        self._regions.setdefault(path, {}).update(dict.fromkeys(spec.regions))

    def specs(self) -> dict[TreePath, ArraySpec]:
        return {
            path: ArraySpec(dtype=spec.dtype, shape=spec.shape, regions=tuple(self._regions[path]), kind=spec.kind)
            for path, spec in self._arrays.items()
        }


def _join(one: Node, other: Node) -> Node | None:
    """Return the node that stands for both, or None where they contradict each other."""
    if one.kind != other.kind:
        return None
    if one.kind == "value":
        return one if same_value(one.data, other.data) else None
    if one.data == other.data:
        return one
    if not isinstance(one.data, dict) or not isinstance(other.data, dict):
        return None
    # Module versions are by prefix, and stages have different modules. A class's name is for people.
    loose = ("metadata", "class") if one.kind == "stateful" else ("metadata",)
    if _without(one.data, loose) != _without(other.data, loose):
        return None
    metadata = {**other.data.get("metadata", {}), **one.data.get("metadata", {})}
    return Node(kind=one.kind, data={**one.data, "metadata": metadata} if metadata else one.data)


def _without(data: Mapping[str, JSON], names: tuple[str, ...]) -> dict[str, JSON]:
    return {name: value for name, value in data.items() if name not in names}


def _disagreement(paths: list[TreePath], groups: list[tuple[LeafTable, list[int]]]) -> DisagreementError:
    path = paths[0]
    brought: dict[str, list[int]] = {}
    kinds = set()
    for table, processes in groups:
        node = table.nodes.get(path)
        if node is not None:
            kinds.add(node.kind)
            brought.setdefault(_describe(node, table.arrays.get(path)), []).extend(processes)
    sides = sorted(((what, tuple(sorted(who))) for what, who in brought.items()), key=lambda side: side[1])
    told = "; ".join(f"{what} on {_processes(who)}" for what, who in sides)
    others = [repr(display_path(other)) for other in paths[1:_NAMED]]
    rest = len(paths) - 1 - len(others)
    also = f" (and {', '.join(others)}{f' and {rest} more' if rest else ''})" if others else ""
    return DisagreementError(
        f"the processes disagree about {display_path(path)!r}: {told}{also}",
        leaf=display_path(path),
        brought=tuple(sides),
        hint=_MARK if kinds == {"value"} else _KEYS,
    )


def _processes(indices: Sequence[int]) -> str:
    return f"process{'es' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _describe(node: Node, spec: ArraySpec | None) -> str:
    if spec is not None:
        return f"{spec.kind} {spec.dtype} {list(spec.shape)}"
    if node.kind == "value":
        return _short(node.data)
    data: Any = node.data if isinstance(node.data, dict) else {}
    if node.kind in ("alias", "view"):
        return "the memory of another leaf"
    details = [str(data[name]) for name in ("class", "type", "form") if name in data]
    if "length" in data:
        details.append(f"of length {data['length']}")
    return " ".join([node.kind, *details])


def _short(data: JSON, limit: int = 80) -> str:
    text = json.dumps(data)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
