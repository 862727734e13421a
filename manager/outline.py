"""A state without its data, as other tools know it: standard containers, plain values, and a reference for each array.

For formats that store more than arrays. Objects come as their state, classes of the user's as mappings, and state per
process by process index; so what other tools see is everything, and our own restore goes by the manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safepoint.formats.base import LeafRef
from safepoint.manager.rebuild import Rebuilder
from safepoint.manager.saved_tree import build_tree

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safepoint.formats.manifest import Node, TreePath

__all__ = ["outline_state"]


def outline_state(structure: Mapping[TreePath, Node]) -> dict[str, Any]:
    """Return the state by item."""
    rebuilder = Rebuilder(lambda source, *_: LeafRef(source), report=None, own=(-1, -1))
    return {str(name): rebuilder.build(child) for name, child in build_tree(structure).children.items()}
