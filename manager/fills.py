"""Which live array takes which stored leaf, or which window on one.

Owns the comparison of dtype, shape and kind, and the allocation of arrays that the target does not have yet. What the
target's arrays share is `shared_targets`'. Must not know the tree's containers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.errors import CheckpointError, CorruptDataError
from safepoint.formats.manifest import LeafEntry, TreePath, display_path
from safepoint.manager.adapters import ArrayLeaf, empty_like_parameter, wrap_array
from safepoint.manager.adapters.numpy_array import NumpyLeaf
from safepoint.manager.casting import CastLeaf, can_cast
from safepoint.manager.fan_out import fan_out
from safepoint.manager.nodes import ARRAYS, alias_path, base_data, node_data
from safepoint.manager.numpy_arrays import dtype_of_node, is_numpy, new_numpy
from safepoint.manager.shared_targets import Claim, SharedTargets
from safepoint.manager.windows import Window

if TYPE_CHECKING:
    from collections.abc import Iterable

    from safepoint.manager.adapting import Adapting
    from safepoint.manager.saved_tree import Saved

__all__ = ["Fills"]


class Fills:
    """The arrays of one restore. Nothing is written before the data is read.

    Attributes:
        problems: differences found, each beginning with the dotted path.
    """

    def __init__(self, entries: Iterable[LeafEntry], adapting: Adapting) -> None:
        self.problems: list[str] = []
        self._adapting = adapting
        self._entries = {entry.path: entry for entry in entries}
        self._wanted: dict[TreePath, ArrayLeaf] = {}
        self._tied: dict[TreePath, list[ArrayLeaf]] = {}
        self._shared = SharedTargets()

    def source_of(self, saved: Saved) -> TreePath:
        """Return the leaf whose data an array, alias or view has."""
        return saved.origin if saved.node.kind == "array" else alias_path(saved.node)

    def entry(self, source: TreePath, saved: Saved) -> LeafEntry:
        """Return the stored leaf.

        Raises:
            CorruptDataError: the step has none there.
        """
        found = self._entries.get(source)
        if found is None:
            raise CorruptDataError("the step has no data for this leaf", leaf=display_path(saved.path))
        return found

    def shape_of(self, saved: Saved) -> tuple[str, tuple[int, ...]]:
        """Return the dtype and shape of a saved array, as its leaf would have them."""
        source = self.source_of(saved)
        entry = self.entry(source, saved)
        window = self._window(saved, entry)
        return (entry.dtype, entry.shape) if window is None else (window.dtype, window.shape)

    def _window(self, saved: Saved, entry: LeafEntry) -> Window | None:
        if saved.node.kind != "view":
            return None
        num_bytes = ITEM_BYTES[entry.dtype]
        for size in entry.shape:
            num_bytes *= size
        try:
            return Window.from_json(node_data(saved.node).get("window"), num_bytes=num_bytes)
        except CorruptDataError as error:
            raise error.with_context(leaf=display_path(saved.path)) from None

    def entry_text(self, saved: Saved) -> str | None:
        """Return what a saved array is, in few words, or None for anything else."""
        if saved.node.kind not in ARRAYS:
            return None
        dtype, shape = self.shape_of(saved)
        told = _numpy_dtype(saved, dtype)
        if told is not None:
            dtype, shape = str(told), shape[:-1]
        kind = "numpy array" if is_numpy(node_data(saved.node)) else "tensor"
        return f"{dtype} {kind} of shape {list(shape)}"

    def fill(self, saved: Saved, live: Any, owner: object = None) -> Any:
        """Plan to fill a live array; return it, or the new one that must take its place."""
        node = saved.node
        source = saved.origin if node.kind == "array" else alias_path(node)
        entry = self._entries.get(source) or self.entry(source, saved)
        try:
            leaf = wrap_array(live, saved.path)
        except CheckpointError as error:
            self._differ(saved.path, f"the target cannot be filled: {error.message}")
            return live
        if leaf is None:
            return live
        window, filled, spec = None, leaf, leaf.spec
        is_alike = spec.dtype == entry.dtype and spec.shape == entry.shape and spec.kind != "numpy"
        if not is_alike or node.data is not None or node.kind != "array":  # nearly all arrays are as they were saved
            window = self._window(saved, entry)
            fitted = self._fitted(saved, leaf)
            if fitted is None:
                return live
            filled = fitted
            if isinstance(live, np.ndarray) and not live.flags.writeable and window is None:
                return self._fresh(source, entry, saved, live)
        reason = leaf.why_not_writable()
        if reason is not None:
            self._differ(saved.path, f"the target cannot be filled: {reason}")
            return live
        claim = Claim(path=saved.path, source=source, window=window, live=live, leaf=leaf, filled=filled, entry=entry)
        if self._shared.add(claim, owner) and window is None:
            self._want(source, filled)
        return live

    def _want(self, source: TreePath, leaf: ArrayLeaf) -> None:
        first = self._wanted.setdefault(source, leaf)
        if first is not leaf:
            self._tied.setdefault(source, [first]).append(leaf)

    def allocate(self, source: TreePath, saved: Saved, like: Any) -> Any:
        """Return a new array for a stored leaf, on the device and placements of `like` where that is an array."""
        return self._fresh(source, self.entry(source, saved), saved, like)

    def allocate_state(self, source: TreePath, saved: Saved, parameter: torch.Tensor, device: torch.device) -> Any:
        """Return a new array for optimizer state: like its parameter where the shapes agree, else on `device`."""
        entry = self.entry(source, saved)
        like = parameter if entry.shape == tuple(parameter.shape) and parameter.device == device else device
        return self._fresh(source, entry, saved, like)

    def _fresh(self, source: TreePath, entry: LeafEntry, saved: Saved, like: Any) -> Any:
        dtype = torch_dtype(entry.dtype)
        data = base_data(saved.node)
        if is_numpy(data):
            made: Any = new_numpy(entry.shape, entry.dtype, data, like)
        elif isinstance(like, torch.Tensor):
            made = empty_like_parameter(like, entry.shape, dtype)
        else:
            made = torch.empty(entry.shape, dtype=dtype, device=like if isinstance(like, torch.device) else None)
        leaf = wrap_array(made, source)
        assert leaf is not None  # it was made an array above
        self._want(source, leaf)
        return made

    def _fitted(self, saved: Saved, leaf: ArrayLeaf) -> ArrayLeaf | None:
        """Return what takes the stored data for a live leaf, or None, with the differences noted."""
        found = len(self.problems)
        numpy = is_numpy(node_data(saved.node))
        if numpy != isinstance(leaf, NumpyLeaf):
            kinds = ("a numpy array", "a tensor")
            one, other = kinds if numpy else kinds[::-1]
            self._differ(saved.path, f"kind: {one} in the step, {other} in the target")
            return None
        dtype, shape = self.shape_of(saved)
        numpy_dtypes = _same_numpy(saved, leaf, dtype)
        one, other = numpy_dtypes or (dtype, leaf.spec.dtype)
        filled = leaf
        if one != other:
            if numpy_dtypes is None and self._may_cast(saved, one, other):
                filled = CastLeaf(leaf, dtype)
            else:
                self._differ(saved.path, f"dtype: {one} in the step, {other} in the target")
        if shape != leaf.spec.shape and (one == other or numpy_dtypes is None):
            self._differ(saved.path, f"shape: {list(shape)} in the step, {list(leaf.spec.shape)} in the target")
        return filled if len(self.problems) == found else None

    def _may_cast(self, saved: Saved, one: str, other: str) -> bool:
        if not self._adapting.may_cast(saved.path) or not can_cast(one, other):
            return False
        self._adapting.note_cast(saved.path, one, other)
        return True

    def _differ(self, path: TreePath, message: str) -> None:
        self.problems.append(f"{display_path(path)}: {message}")

    def settle(self) -> SharedTargets:
        """Decide, once all is matched, how windows and shared memory are filled; return what is to be done later."""
        for source, leaf in self._shared.settle():
            self._want(source, leaf)
        return self._shared

    def wanted(self) -> dict[TreePath, ArrayLeaf]:
        """Return the live leaf of each stored leaf that is to be read."""
        return {**self._wanted, **{source: fan_out(leaves) for source, leaves in self._tied.items()}}


def _numpy_dtype(saved: Saved, dtype: str) -> np.dtype[Any] | None:
    """Return what the bytes of a leaf are the items of, where numpy alone has a name for it."""
    told = dtype_of_node(node_data(saved.node)) if is_numpy(node_data(saved.node)) else None
    return told if dtype == "uint8" else None


def _same_numpy(saved: Saved, leaf: ArrayLeaf, dtype: str) -> tuple[str, str] | None:
    """Return the dtypes of both sides if one is kept as bytes; None where the leaves' dtypes tell all."""
    told = _numpy_dtype(saved, dtype)
    live = leaf.numpy_dtype if isinstance(leaf, NumpyLeaf) and leaf.is_bytes else None
    if told is None and live is None:
        return None
    if told == live:
        return str(told), str(told)
    return dtype if told is None else str(told), leaf.spec.dtype if live is None else str(live)
