"""A live state to its tree: structure, plain values and array leaves.

Owns what a state may hold, and the refusal, by name and before anything is written, of what cannot be kept exactly.
Copies no tensor and alters nothing. How a tree goes back into a state is `targets`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from safepoint.formats.errors import CheckpointError, InvalidArgumentError, UnsupportedValueError
from safepoint.formats.manifest import Node, PathKey, TreePath, display_path
from safepoint.manager.adapters import ArrayLeaf, wrap_array
from safepoint.manager.adapters.numpy_array import NumpyLeaf
from safepoint.manager.aliases import SameMemory
from safepoint.manager.leaf_table import LeafTable
from safepoint.manager.nodes import alias_node, children_of, container_node, encode_metadata
from safepoint.manager.numpy_values import encode_dtype
from safepoint.manager.per_process import PerProcess
from safepoint.manager.refusals import refusal
from safepoint.manager.shared_memory import Share, store_once
from safepoint.manager.statefuls import Form, metadata_of, state_of, stateful_form
from safepoint.manager.values import encode_value, is_plain_type, type_name

__all__ = ["MAX_DEPTH", "FlatState", "LeafTable", "array_node", "check_items", "flatten", "owners_of"]

_ARRAY = Node(kind="array")

MAX_DEPTH = 64
"""How deep a state may be nested."""


@dataclass(kw_only=True)
class FlatState:
    """A live state, flattened.

    Attributes:
        nodes: node by path, parents first, in the state's order; `()` is the root.
        arrays: the live array leaf of each node of kind "array".
    """

    nodes: dict[TreePath, Node] = field(default_factory=dict)
    arrays: dict[TreePath, ArrayLeaf] = field(default_factory=dict)

    def table(self) -> LeafTable:
        """Return what is brought to the rendezvous: structure and geometry, without the data."""
        return LeafTable(nodes=dict(self.nodes), arrays={path: leaf.spec for path, leaf in self.arrays.items()})


def flatten(
    state: Mapping[str, Any] | FlatState, *, process_index: int, process_count: int, share: Share = store_once
) -> FlatState:
    """Return the tree of a state, with references to its live arrays; one that is flat already as it is.

    Called by: every process, after the devices are synchronised, since a lazy tensor's sharding is unknown before.

    Args:
        state: by item.
        process_index: this process.
        process_count: how many save.
        share: what becomes of arrays that show one memory.

    Raises:
        InvalidArgumentError: `state` is no mapping with str keys.
        UnsupportedValueError: something in it cannot be kept exactly; names the path, the type and a way out.
    """
    if isinstance(state, FlatState):
        return state
    check_items(state)
    flattener = _Flattener(process_index, process_count)
    flattener.add_root(state)
    share(flattener.flat.nodes, flattener.flat.arrays)
    return flattener.flat


def check_items(state: object) -> None:
    """Check that a state or target is a mapping of item names.

    Raises:
        InvalidArgumentError: it is not.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            f"a state is a mapping of names to what is kept under them, not a {type(state).__name__}",
            hint='Give the state a name: `{"model": model}`.',
        )
    for name in state:
        if type(name) is not str or not name or not name.isprintable():
            raise InvalidArgumentError(f"the name of an item of the state is a printable str, not {name!r}")


def array_node(leaf: ArrayLeaf) -> Node:
    """Return the node of an array.

    Raises:
        UnsupportedValueError: a numpy dtype that could not be made again.
    """
    if leaf.spec.kind != "numpy" or not isinstance(leaf, NumpyLeaf):  # an ABC takes its time to say what is one
        return _ARRAY
    dtype = leaf.numpy_dtype
    if not leaf.is_bytes and dtype.isnative:
        return Node(kind="array", data={"kind": "numpy"})
    form = encode_dtype(dtype)
    if form is None:
        raise UnsupportedValueError(
            f"numpy arrays of dtype {dtype} cannot be kept exactly",
            leaf=leaf.name,
            hint="Save each field as an array of its own, or a copy of a plain dtype.",
        )
    return Node(kind="array", data={"kind": "numpy", "dtype": form})


def owners_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a module by their names in its state dict, tied ones under each name."""
    owners: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    owners.update(module.named_buffers(remove_duplicate=False))
    return owners


class _Flattener:
    """One walk over a state. `_open` holds the containers that are being walked, so that a cycle is found."""

    def __init__(self, process_index: int, process_count: int) -> None:
        self.flat = FlatState()
        self._process_index = process_index
        self._process_count = process_count
        self._open: set[int] = set()
        self._seen: SameMemory[TreePath] = SameMemory()
        self._kept: list[Any] = []  # states made for this save: their addresses stay theirs

    def add_root(self, state: Mapping[str, Any]) -> None:
        self.flat.nodes[()] = Node(kind="dict")
        for name, value in state.items():
            self.add((name,), value)

    def add(self, path: TreePath, value: Any, owner: object = None) -> None:
        if isinstance(value, (torch.Tensor, np.ndarray)):
            self._add_array(path, value, owner)
        elif is_plain_type(type(value)):
            self._add_value(path, value)
        elif isinstance(value, ArrayLeaf):  # not in memory: it is read while it is saved (`opened`)
            self.flat.nodes[path] = _ARRAY
            self.flat.arrays[path] = value
        else:
            self._add_inner(path, value)

    def _add_value(self, path: TreePath, value: Any) -> None:
        try:
            self.flat.nodes[path] = Node(kind="value", data=encode_value(value))
        except UnsupportedValueError as error:
            raise error.with_context(leaf=display_path(path)) from None

    def _add_array(self, path: TreePath, value: Any, owner: object) -> None:
        leaf = wrap_array(value, path)
        if leaf is None:
            raise refusal(value, path)
        first = self._seen.first(value, owner, path)
        if first is not None and self.flat.arrays[first].spec.kind == leaf.spec.kind:
            self.flat.nodes[path] = alias_node(first, self.flat.nodes[first])
            return
        self.flat.nodes[path] = array_node(leaf)
        self.flat.arrays[path] = leaf

    def _add_inner(self, path: TreePath, value: Any) -> None:
        if id(value) in self._open:
            raise UnsupportedValueError(
                f"a {type_name(type(value))} contains itself",
                leaf=display_path(path),
                hint="A tree is kept: break the cycle, or keep one end of it by name.",
            )
        if len(path) > MAX_DEPTH:
            raise UnsupportedValueError(f"the state is nested deeper than {MAX_DEPTH} levels", leaf=display_path(path))
        self._open.add(id(value))
        try:
            self._add_open(path, value)
        finally:
            self._open.discard(id(value))

    def _add_open(self, path: TreePath, value: Any) -> None:
        if isinstance(value, PerProcess):
            self.flat.nodes[path] = Node(kind="per_process", data={"process_count": self._process_count})
            self.add((*path, self._process_index), value.value)
            return
        form = stateful_form(value)
        if form is not None:
            self._add_stateful(path, value, form)
            return
        try:
            node = container_node(value)
            if node is not None:
                self.flat.nodes[path] = node
                self._add_children(path, value, node)
                return
            if is_plain_container(value):
                self._add_value(path, value)
                return
        except CheckpointError as error:
            raise error.with_context(leaf=display_path(path)) from None
        raise refusal(value, path)

    def _add_children(
        self, path: TreePath, value: Any, node: Node, owners: Mapping[PathKey, object] | None = None
    ) -> None:
        for key, child in children_of(value, node):
            self.add((*path, key), child, owners.get(key) if owners else None)

    def _add_stateful(self, path: TreePath, value: Any, form: Form) -> None:
        state = state_of(value, form, leaf=display_path(path))
        self._kept.append(state)
        data: dict[str, Any] = {"form": form, "class": type_name(type(value))}
        metadata = metadata_of(state)
        if metadata is not None:
            data["metadata"] = encode_metadata(metadata)
        if not isinstance(state, Mapping):
            data["wrapped"] = True
            self.flat.nodes[path] = Node(kind="stateful", data=data)
            self.add((*path, "state"), state)
            return
        self.flat.nodes[path] = Node(kind="stateful", data=data)
        owners = owners_of(value) if isinstance(value, torch.nn.Module) else None
        try:
            self._add_children(path, state, Node(kind="dict"), owners)  # type: ignore[arg-type]  # str is a key
        except CheckpointError as error:
            raise error.with_context(leaf=display_path(path)) from None


def is_plain_container(value: object) -> bool:
    """Say whether it is a set, frozenset or slice: containers whose members are plain, kept as one value."""
    return type(value) in (set, frozenset, slice)
