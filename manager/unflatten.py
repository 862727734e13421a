"""A step's structure and host arrays to a state, without a target.

Standard containers come back as they were; objects with a state as their state; classes of the user's as mappings and
plain values. State per process comes as this process's own where the number of processes is the same, else as a dict
by process index. Arrays that showed one memory show one again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.dtypes import torch_dtype
from safepoint.formats.errors import CorruptDataError
from safepoint.formats.manifest import Node, TreePath, display_path
from safepoint.manager.nodes import ARRAYS, MAX_SPREAD, alias_path, base_data, memory_of, node_data
from safepoint.manager.numpy_arrays import as_numpy, is_numpy, with_dtype
from safepoint.manager.rebuild import Rebuilder
from safepoint.manager.saved_tree import Saved, array_paths, build_tree, select_structure
from safepoint.manager.shared_memory import put
from safepoint.manager.windows import Window, open_window

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    memories = _Memories(structure, arrays)

    def array_of(source: TreePath, saved: Saved, _: Any) -> Any:
        if source not in arrays:
            raise CorruptDataError("the data of this leaf is missing", leaf=display_path(saved.path))
        data = base_data(saved.node)
        try:
            placed = memories.place(arrays[source], saved.node)
        except CorruptDataError as error:
            raise error.with_context(leaf=display_path(saved.path)) from None
        if placed is not None:
            return placed
        return as_numpy(arrays[source], data) if is_numpy(data) else arrays[source]

    rebuilder = Rebuilder(array_of, report=None, own=(process_index, process_count))
    root = build_tree(structure)
    return {str(name): rebuilder.build(child) for name, child in root.children.items()}


class _Memories:
    """The memories that several arrays show, of which each was stored by itself.

    One that is far larger than what was read of it is not made: a file may say anything.
    """

    def __init__(self, structure: Mapping[TreePath, Node], arrays: Mapping[TreePath, torch.Tensor]) -> None:
        members: dict[TreePath, dict[TreePath, int]] = {}
        for path, node in structure.items():
            memory = memory_of(node) if node.kind in ARRAYS else None
            if memory is not None:
                source = path if node.kind == "array" else alias_path(node)
                members.setdefault(memory.first, {})[source] = memory.num_bytes
        self._buffers: dict[TreePath, torch.Tensor] = {}
        self._sizes = {
            first: max(sizes.values())
            for first, sizes in members.items()
            if len(sizes) > 1
            and max(sizes.values()) <= MAX_SPREAD * sum(arrays[path].nbytes for path in sizes if path in arrays)
        }

    def place(self, array: torch.Tensor, node: Node) -> Any:
        """Return an array in its memory; None where it shows none with others of those that are wanted.

        Raises:
            CorruptDataError: it does not fit there.
        """
        memory = memory_of(node)
        if memory is None or memory.first not in self._sizes:
            return None
        num_bytes = self._sizes[memory.first]
        window = Window.from_json(memory.window, num_bytes=num_bytes)
        if window.shape != tuple(array.shape) or torch_dtype(window.dtype) != array.dtype:
            raise CorruptDataError("a view of a memory is not of the shape and dtype of its data")
        if memory.first not in self._buffers:
            self._buffers[memory.first] = torch.zeros(num_bytes, dtype=torch.uint8)
        buffer = self._buffers[memory.first]
        put(array, buffer, window)
        data = node_data(node)
        return with_dtype(open_window(buffer.numpy(), window), data) if is_numpy(data) else open_window(buffer, window)
