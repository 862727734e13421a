"""A step's structure and host arrays to a state, without a target.

Standard containers come back as they were; objects with a state as their state; classes of the user's as mappings and
plain values. State per process comes as this process's own where the number of processes is the same, else as a dict
by process index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safepoint.formats.errors import CorruptDataError
from safepoint.formats.manifest import Node, TreePath, display_path
from safepoint.manager.nodes import base_data
from safepoint.manager.numpy_arrays import as_numpy, is_numpy
from safepoint.manager.rebuild import Rebuilder
from safepoint.manager.saved_tree import Saved, array_paths, build_tree, select_structure

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["array_paths", "select_structure", "unflatten"]


def unflatten(
    structure: Mapping[TreePath, Node],
    arrays: Mapping[TreePath, torch.Tensor],
    *,
    process_index: int,
    process_count: int,
) -> dict[str, Any]:
    """Return the state of a structure.

    Args:
        structure: of the step, or the part of it that `select_structure` chose.
        arrays: a host tensor for each of `array_paths(structure)`; the state takes them over.
        process_index: this process.
        process_count: how many restore.

    Raises:
        CorruptDataError: the structure is malformed, or an array is missing.
    """

    def array_of(source: TreePath, saved: Saved, _: Any) -> Any:
        if source not in arrays:
            raise CorruptDataError("the data of this leaf is missing", leaf=display_path(saved.path))
        data = base_data(saved.node)
        return as_numpy(arrays[source], data) if is_numpy(data) else arrays[source]

    rebuilder = Rebuilder(array_of, report=None, own=(process_index, process_count))
    root = build_tree(structure)
    return {str(name): rebuilder.build(child) for name, child in root.children.items()}
