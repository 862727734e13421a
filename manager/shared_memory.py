"""Arrays of a state that show one memory: stored once, each in its place.

After a walk found all arrays, those that show parts of others become nodes of kind "view", and the memory of those that
overlap without one holding the rest becomes a leaf of its own, below the first of them. Arrays that are stored one by
one all the same say where in their memory they lie, so that they can show it together again. Copies nothing before the
pool is read. Where memory overlaps is `overlaps`'; must not know targets.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, TypeAlias

import torch

from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.manifest import Node, TaggedKey, TreePath, display_path
from safepoint.formats.region import Region
from safepoint.manager.adapters import ArrayLeaf, ArraySpec
from safepoint.manager.nodes import MAX_SPREAD, alias_node, alias_path, memory_node, view_node
from safepoint.manager.overlaps import Place, Sharing, find_sharings, tell_places
from safepoint.manager.sources import raw_view
from safepoint.manager.windows import Window, open_window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["POOL_KEY", "PoolLeaf", "Share", "put", "share_for", "store_apart", "store_once", "take", "window_on"]

POOL_KEY = TaggedKey("memory", "shared")
"""The last key of a pool's path; no key of a state is of this kind."""

_RAW = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


Share: TypeAlias = "Callable[[dict[TreePath, Node], dict[TreePath, ArrayLeaf]], None]"
"""Decides, for a flattened state, which arrays are stored by themselves."""

_WITH_VIEWS = frozenset({"safetensors"})


def share_for(file_format: str) -> Share:
    """Return how a format stores arrays that show one memory.

    Other tools read the trees of `torch` and `orbax` steps, and know nothing of our views: there each array is whole.
    """
    return store_once if file_format in _WITH_VIEWS else store_apart


def store_apart(nodes: dict[TreePath, Node], arrays: dict[TreePath, ArrayLeaf]) -> None:
    """Leave the data of every array where it is, and note which show one memory; equal ones are aliases already.

    Raises:
        UnsupportedValueError: arrays that share a few elements of a memory that is far larger than they are.
    """
    leaves = list(arrays.values())
    _rewrite(nodes, arrays, [tell_places(leaves, sharing) for sharing in find_sharings(leaves)])


def store_once(nodes: dict[TreePath, Node], arrays: dict[TreePath, ArrayLeaf]) -> None:
    """Rewrite a flattened state so that each byte of memory is a leaf's once, where that saves any.

    Raises:
        UnsupportedValueError: arrays that share a few elements of a memory that is far larger than they are.
    """
    _rewrite(nodes, arrays, find_sharings(list(arrays.values())))


def _rewrite(nodes: dict[TreePath, Node], arrays: dict[TreePath, ArrayLeaf], sharings: Sequence[Sharing]) -> None:
    paths = list(arrays)
    changed: dict[TreePath, Node] = {}
    for sharing in sharings:
        if not sharing.is_stored:
            changed |= _memory_nodes(sharing, paths, nodes, arrays)
            continue
        base = _pool(sharing, paths, nodes, arrays) if sharing.base is None else paths[sharing.base]
        for number, place in sharing.places.items():
            path = paths[number]
            changed[path] = view_node(base, nodes[base], window_on(arrays.pop(path), place), nodes[path])
    if changed:
        nodes |= changed
        for path, node in nodes.items():
            if node.kind == "alias" and (array := changed.get(alias_path(node))) is not None:
                nodes[path] = array if array.kind == "view" else alias_node(alias_path(node), array)


def _memory_nodes(
    sharing: Sharing, paths: Sequence[TreePath], nodes: Mapping[TreePath, Node], arrays: Mapping[TreePath, ArrayLeaf]
) -> dict[TreePath, Node]:
    """Return the nodes of arrays that are stored one by one, with their places in the memory that they show."""
    windows = {number: window_on(arrays[paths[number]], place) for number, place in sorted(sharing.places.items())}
    shown = sum(math.prod(window.shape) * ITEM_BYTES[window.dtype] for window in windows.values())
    first, *others = [paths[number] for number in windows]
    if sharing.num_bytes > MAX_SPREAD * shown or not all(window.is_aligned for window in windows.values()):
        raise UnsupportedValueError(
            f"it shares elements with {display_path(others[0])} in a way that cannot be kept: "
            f"{len(windows)} arrays of {shown} bytes show {sharing.num_bytes} bytes of memory",
            leaf=display_path(first),
            hint="Save a copy of one of them: `tensor.clone()`, or `array.copy()`.",
        )
    return {
        paths[number]: memory_node(first, window, num_bytes=sharing.num_bytes, node=nodes[paths[number]])
        for number, window in windows.items()
    }


def window_on(leaf: ArrayLeaf, place: Place) -> Window:
    """Return the window that shows an array at a place of another leaf."""
    memory = leaf.memory()
    start, strides = place
    return Window(
        start=start,
        shape=leaf.spec.shape,
        strides=strides,
        dtype=leaf.spec.dtype,
        is_conj=memory is not None and memory.is_conj,
        is_neg=memory is not None and memory.is_neg,
    )


def _pool(
    sharing: Sharing, paths: Sequence[TreePath], nodes: dict[TreePath, Node], arrays: dict[TreePath, ArrayLeaf]
) -> TreePath:
    first = paths[min(sharing.places)]
    path = (*first, POOL_KEY)
    parts = [
        (arrays[paths[number]], window_on(arrays[paths[number]], place)) for number, place in sharing.places.items()
    ]
    nodes[path] = Node(kind="array", data={"kind": "numpy"} if arrays[first].spec.kind == "numpy" else None)
    arrays[path] = PoolLeaf(parts, num_bytes=sharing.num_bytes, name=display_path(first))
    return path


class PoolLeaf(ArrayLeaf):
    """The memory that several arrays show together, and nothing that none of them shows.

    Args:
        parts: the arrays, and where each lies in the pool.
        num_bytes: of the pool.
        name: for messages.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[tuple[ArrayLeaf, Window]], *, num_bytes: int, name: str) -> None:
        dtypes = {window.dtype for _, window in parts}
        dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"
        shape = (num_bytes // ITEM_BYTES[dtype],)
        super().__init__(ArraySpec(dtype=dtype, shape=shape, regions=(Region.whole(shape),), kind="tensor"), name)
        self._parts = tuple(parts)

    def read(self, region: Region) -> torch.Tensor:
        """Return a copy, in which bytes that no array shows are zero."""
        whole = Region.whole(self.spec.shape)
        if not whole.contains(region):
            raise self.not_held(region)
        pool = torch.zeros(self.spec.shape[0] * ITEM_BYTES[self.spec.dtype], dtype=torch.uint8)
        for leaf, window in self._parts:
            put(leaf.read(Region.whole(leaf.spec.shape)), pool, window)
        return pool.view(torch_dtype(self.spec.dtype))[region.slices_in(whole)]

    def write(self, region: Region, data: torch.Tensor) -> None:
        """Refuse: a pool is filled through its arrays."""
        del region, data
        raise NotImplementedError("a pool is no target")


def put(data: torch.Tensor, pool: torch.Tensor, window: Window) -> None:
    """Copy values through a window on host memory, bit for bit; a conjugate or negative one gets what gives them."""
    if min(window.strides, default=0) < 0:  # numpy's, which torch cannot have
        raw = dataclasses.replace(window, dtype=_RAW[data.element_size()])
        open_window(pool.numpy(), raw)[...] = raw_view(data).numpy()
        return
    view = open_window(pool, window)
    with torch.no_grad():
        if view.is_conj() or view.is_neg():
            view.copy_(data)
        else:
            raw_view(view).copy_(raw_view(data))


def take(pool: torch.Tensor, window: Window) -> torch.Tensor:
    """Return a copy of the values that a window shows, contiguous, as a tensor."""
    dtype = torch_dtype(window.dtype)
    if min(window.strides, default=0) < 0:
        raw = dataclasses.replace(window, dtype=_RAW[dtype.itemsize])
        return torch.from_numpy(open_window(pool.numpy(), raw).copy()).view(dtype)
    view = open_window(pool, window)
    if view.is_conj() or view.is_neg():
        return torch.Tensor.resolve_neg(view.resolve_conj()).clone(memory_format=torch.contiguous_format)
    return raw_view(view).clone(memory_format=torch.contiguous_format).view(dtype)
