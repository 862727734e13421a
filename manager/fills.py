"""Which live array takes which stored leaf.

Owns the comparison of dtype, shape and kind, the allocation of arrays that the target does not have yet, and what to do
where target and step tie different leaves. Must not know the tree's containers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.formats.dtypes import torch_dtype
from safepoint.formats.errors import CheckpointError, CorruptDataError
from safepoint.formats.manifest import LeafEntry, Node, TreePath, display_path
from safepoint.manager.adapters import ArrayLeaf, empty_like_parameter, wrap_array
from safepoint.manager.aliases import memory_key
from safepoint.manager.errors import StructureMismatchError
from safepoint.manager.fan_out import fan_out, holds_the_same
from safepoint.manager.nodes import alias_path, node_data

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from safepoint.manager.saved_tree import Saved

__all__ = ["Fills"]


class Fills:
    """The arrays of one restore. Nothing is written before the data is read.

    Attributes:
        problems: differences found, each beginning with the dotted path.
    """

    def __init__(self, structure: Mapping[TreePath, Node], entries: Iterable[LeafEntry]) -> None:
        self.problems: list[str] = []
        self._structure = structure
        self._entries = {entry.path: entry for entry in entries}
        self._wanted: dict[TreePath, list[ArrayLeaf]] = {}
        self._taken: dict[Hashable, TreePath] = {}
        self._kept: list[Any] = []  # keeps memory keys valid
        self._ties: list[tuple[TreePath, TreePath, ArrayLeaf, ArrayLeaf]] = []

    def source_of(self, saved: Saved) -> TreePath:
        """Return the leaf whose data an array or alias has."""
        return saved.path if saved.node.kind == "array" else alias_path(saved.node)

    def entry(self, source: TreePath, saved: Saved) -> LeafEntry:
        """Return the stored leaf.

        Raises:
            CorruptDataError: the step has none there.
        """
        found = self._entries.get(source)
        if found is None:
            raise CorruptDataError("the step has no data for this leaf", leaf=display_path(saved.path))
        return found

    def is_numpy(self, source: TreePath) -> bool:
        """Say whether a leaf was a numpy array."""
        node = self._structure.get(source)
        return node is not None and node_data(node).get("kind") == "numpy"

    def entry_text(self, saved: Saved) -> str | None:
        """Return what a saved array is, in few words, or None for anything else."""
        if saved.node.kind not in ("array", "alias"):
            return None
        source = self.source_of(saved)
        entry = self.entry(source, saved)
        kind = "numpy array" if self.is_numpy(source) else "tensor"
        return f"{entry.dtype} {kind} of shape {list(entry.shape)}"

    def fill(self, saved: Saved, live: Any, owner: object = None) -> Any:
        """Plan to fill a live array; return it, or the new one that must take its place."""
        source = self.source_of(saved)
        entry = self.entry(source, saved)
        leaf = self._wrap(saved.path, live)
        if leaf is None or not self._fits(saved, entry, leaf):
            return live
        if isinstance(live, np.ndarray) and not live.flags.writeable:
            return self._fresh(source, entry, live)
        reason = leaf.why_not_writable()
        if reason is not None:
            self._differ(saved.path, f"the target cannot be filled: {reason}")
            return live
        key = memory_key(live, owner)
        other = self._taken.get(key) if key is not None else None
        if other is None:
            self._take(key, source, live, leaf)
        elif other != source:
            self._tie(other, source, entry, leaf, live)
        return live

    def allocate(self, source: TreePath, saved: Saved, like: Any) -> Any:
        """Return a new array for a stored leaf, on the device and placements of `like` where that is an array."""
        return self._fresh(source, self.entry(source, saved), like)

    def allocate_state(self, source: TreePath, saved: Saved, parameter: torch.Tensor, device: torch.device) -> Any:
        """Return a new array for optimizer state: like its parameter where the shapes agree, else on `device`."""
        entry = self.entry(source, saved)
        like = parameter if entry.shape == tuple(parameter.shape) and parameter.device == device else device
        return self._fresh(source, entry, like)

    def _fresh(self, source: TreePath, entry: LeafEntry, like: Any) -> Any:
        dtype = torch_dtype(entry.dtype)
        if self.is_numpy(source):
            made: Any = torch.empty(entry.shape, dtype=dtype).numpy()
        elif isinstance(like, torch.Tensor):
            made = empty_like_parameter(like, entry.shape, dtype)
        else:
            made = torch.empty(entry.shape, dtype=dtype, device=like if isinstance(like, torch.device) else None)
        leaf = wrap_array(made, source)
        assert leaf is not None  # it was made an array above
        self._wanted.setdefault(source, []).append(leaf)
        return made

    def _wrap(self, path: TreePath, live: Any) -> ArrayLeaf | None:
        try:
            return wrap_array(live, path)
        except CheckpointError as error:
            self._differ(path, f"the target cannot be filled: {error.message}")
            return None

    def _fits(self, saved: Saved, entry: LeafEntry, leaf: ArrayLeaf) -> bool:
        found = len(self.problems)
        numpy = self.is_numpy(entry.path)
        if numpy != (leaf.spec.kind == "numpy"):
            kinds = ("a numpy array", "a tensor")
            one, other = kinds if numpy else kinds[::-1]
            self._differ(saved.path, f"kind: {one} in the step, {other} in the target")
        if entry.dtype != leaf.spec.dtype:
            self._differ(saved.path, f"dtype: {entry.dtype} in the step, {leaf.spec.dtype} in the target")
        if entry.shape != leaf.spec.shape:
            self._differ(saved.path, f"shape: {list(entry.shape)} in the step, {list(leaf.spec.shape)} in the target")
        return len(self.problems) == found

    def _take(self, key: Hashable | None, source: TreePath, live: Any, leaf: ArrayLeaf) -> None:
        if key is not None:
            self._taken[key] = source
            self._kept.append(live)
        self._wanted.setdefault(source, []).append(leaf)

    def _tie(self, first: TreePath, second: TreePath, entry: LeafEntry, leaf: ArrayLeaf, live: Any) -> None:
        """Read the second leaf beside the memory that both share, to see that they are equal."""
        made = self._fresh(second, entry, live)
        beside = wrap_array(made, second)
        assert beside is not None  # it was made an array above
        self._ties.append((first, second, leaf, beside))

    def _differ(self, path: TreePath, message: str) -> None:
        self.problems.append(f"{display_path(path)}: {message}")

    def wanted(self) -> dict[TreePath, ArrayLeaf]:
        """Return the live leaf of each stored leaf that is to be read."""
        return {source: fan_out(leaves) for source, leaves in self._wanted.items()}

    def check_ties(self) -> None:
        """Check that leaves which the target ties, and the step does not, have the same data.

        Raises:
            StructureMismatchError: they have not, so the target could not hold both.
        """
        problems = tuple(
            f"{display_path(second)}: the target ties it to {display_path(first)}, and the step has other data for it"
            for first, second, leaf, beside in self._ties
            if not holds_the_same(leaf, beside)
        )
        if problems:
            raise StructureMismatchError(
                "the target ties what the step holds apart: " + "; ".join(problems),
                mismatches=problems,
                hint="Untie them in the target, or restore them one by one. The target was filled already.",
            )
