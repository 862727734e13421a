"""Whether the structure of a step is one that a save could have written. A manifest is input from anywhere.

Checked once, when a manifest is read, so that what walks trees afterwards need not doubt every key. Kinds that are not
known here are left to those who meet them. Owns no vocabulary (`nodes`) and knows no live targets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.formats.manifest import Manifest, Node, PathKey, TreePath, display_path
from safepoint.manager.errors import CorruptDataError
from safepoint.manager.nodes import SEQUENCES, node_data

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_structure"]

_LEAVES = frozenset({"value", "array", "alias"})
_FIELDS = frozenset({"namedtuple", "dataclass"})
_MAX_LENGTH = (1 << 63) - 1
_NO_KEYS: list[PathKey] = []


def check_structure(manifest: Manifest, *, path: str) -> None:
    """Refuse a structure whose containers cannot hold the children that it gives them.

    Args:
        manifest: read, with every node after its parent.
        path: of the manifest, for the error.

    Raises:
        CorruptDataError: names the node.
    """
    children: dict[TreePath, list[PathKey]] = {}
    for node_path in manifest.structure:
        if node_path:
            children.setdefault(node_path[:-1], []).append(node_path[-1])
    for node_path, node in manifest.structure.items():
        keys = children.get(node_path, _NO_KEYS)
        if node.kind in _LEAVES and not keys:
            continue
        problem = _problem(node, keys)
        if problem is not None:
            raise CorruptDataError(f"the structure {problem}", path=path, leaf=display_path(node_path))
    _check_arrays(manifest.structure, manifest, path=path)


def _problem(node: Node, keys: list[PathKey]) -> str | None:
    if node.kind in SEQUENCES:
        return _sequence_problem(node, keys)
    if node.kind in _LEAVES:
        return f"has children below a node of kind {node.kind}" if keys else None
    if node.kind in _FIELDS and not all(type(key) is str for key in keys):
        return f"has a field of a {node.kind} that is no text"
    if node.kind == "per_process" and not all(type(key) is int and key >= 0 for key in keys):
        return "has state of a process that is no number"
    return None


def _sequence_problem(node: Node, keys: list[PathKey]) -> str | None:
    data = node_data(node)
    length, maxlen = data.get("length"), data.get("maxlen")
    if type(length) is not int or length != len(keys) or keys != list(range(length)):
        return f"has a {node.kind} of length {str(length)[:40]} with {len(keys)} children, or not in order"
    if maxlen is not None and (type(maxlen) is not int or not length <= maxlen <= _MAX_LENGTH):
        return f"has a {node.kind} of an impossible longest length"
    return None


def _check_arrays(structure: Mapping[TreePath, Node], manifest: Manifest, *, path: str) -> None:
    for entry in manifest.leaves:
        kind = structure[entry.path].kind
        if kind != "array":
            raise CorruptDataError(
                f"the structure has data in a node of kind {kind}", path=path, leaf=display_path(entry.path)
            )
