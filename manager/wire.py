"""How assignments and paths travel between the processes of one run, as JSON values. Trusted: not checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safepoint.formats.manifest import PathKey, TaggedKey, TreePath
from safepoint.formats.region import Region
from safepoint.manager.planner import WriteAssignment

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["assignments_from_json", "assignments_to_json", "path_from_json", "path_to_json"]


def path_to_json(path: TreePath) -> list[Any]:
    """Return the keys of a path; injective."""
    return [{key.kind: key.text} if isinstance(key, TaggedKey) else key for key in path]


def path_from_json(value: list[Any]) -> TreePath:
    """Return the path that `path_to_json` described."""
    return tuple(_key_from_json(key) for key in value)


def _key_from_json(key: Any) -> PathKey:
    if isinstance(key, dict):
        ((kind, text),) = key.items()
        return TaggedKey(kind, text)
    checked: PathKey = key
    return checked


def assignments_to_json(parts: Iterable[WriteAssignment]) -> list[Any]:
    """Return `[path, offsets, shape, source, writer]` for each."""
    return [[path_to_json(part.path), *part.region.to_json(), part.source, part.writer] for part in parts]


def assignments_from_json(value: list[Any]) -> tuple[WriteAssignment, ...]:
    """Return the assignments that `assignments_to_json` described."""
    return tuple(
        WriteAssignment(path_from_json(path), Region(tuple(offsets), tuple(shape)), source, writer)
        for path, offsets, shape, source, writer in value
    )
