"""The structure of a step as a tree of objects, and which parts of it a restore wants.

Owns the selection by items and key patterns. Must not know live targets.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from safepoint.formats.errors import CorruptDataError, InvalidArgumentError
from safepoint.formats.manifest import Node, PathKey, TreePath, display_path
from safepoint.manager.nodes import ARRAYS, alias_path, node_data

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["Extent", "Saved", "Selection", "array_paths", "build_tree", "select_structure"]

Extent: TypeAlias = Literal["all", "some", "none"]
"""How much of a subtree is wanted."""


@dataclass(slots=True)
class Saved:
    """One node of a step's structure.

    Attributes:
        path: where it is, under its new name where it has one.
        origin: where it is in the step.
        node: what it is.
        children: by key, in order.
        extent: how much of it is wanted.
        holds_arrays: whether anything but plain data is in it: an array, a stateful object, state per process, or a
            class of the user's.
    """

    path: TreePath
    origin: TreePath
    node: Node
    children: dict[PathKey, Saved] = field(default_factory=dict)
    extent: Extent = "all"
    holds_arrays: bool = False

    def walk(self) -> Iterator[Saved]:
        """Yield this node and all below it, parents first."""
        yield self
        for child in self.children.values():
            yield from child.walk()


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What of a step is wanted: nothing said is everything.

    Attributes:
        items: names of items.
        keys: patterns as of `fnmatch`, on dotted paths; what one matches is wanted with everything below it.
    """

    items: frozenset[str] | None = None
    keys: tuple[str, ...] | None = None

    @classmethod
    def of(cls, items: Collection[str] | None, keys: Collection[str] | None) -> Selection:
        """Return the selection that a caller asked for.

        Raises:
            InvalidArgumentError: it is no collection of texts, but one text, say.
        """
        texts = {name: _texts(name, value) for name, value in (("items", items), ("keys", keys)) if value is not None}
        return cls(items=frozenset(texts["items"]) if "items" in texts else None, keys=texts.get("keys"))

    @property
    def is_everything(self) -> bool:
        """Whether nothing is left out."""
        return self.items is None and self.keys is None

    def wants(self, path: TreePath) -> bool:
        """Say whether `path`, or something above it, is asked for."""
        if self.items is not None and path and path[0] not in self.items:
            return False
        if self.keys is None:
            return bool(path) or self.items is None
        pattern = _compiled(self.keys)
        return any(pattern.fullmatch(display_path(path[:end])) for end in range(1, len(path) + 1))


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes):
        raise InvalidArgumentError(f"{name} is a collection of texts, not one text", hint=f"{name}=[{value!r}]")
    texts = tuple(dict.fromkeys(value)) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(text, str) for text in texts):
        raise InvalidArgumentError(f"{name} is a collection of texts, got {value!r}")
    return texts


def _compiled(keys: tuple[str, ...]) -> re.Pattern[str]:
    # re.compile caches; an empty alternative would match the root.
    return re.compile("|".join(fnmatch.translate(key) for key in keys) if keys else r"(?!)")


def build_tree(
    structure: Mapping[TreePath, Node],
    selection: Selection | None = None,
    *,
    origins: Mapping[TreePath, TreePath] = MappingProxyType({}),
) -> Saved:
    """Return the root of the tree, with the extent of each node.

    Args:
        structure: of the step.
        selection: what is wanted; None is all.
        origins: the path in the step of what was renamed.

    Raises:
        CorruptDataError: the root is no mapping.
        InvalidArgumentError: an item or a pattern of the selection is not in the step.
    """
    index: dict[TreePath, Saved] = {}
    holders: list[Saved] = []
    for path, node in structure.items():
        holds_arrays = node.kind == "array" or _is_more_than_data(node)
        saved = index[path] = Saved(path, origins.get(path, path), node, {}, "all", holds_arrays)
        if path:
            parent = index[path[:-1]]
            parent.children[path[-1]] = saved
            if holds_arrays and not parent.holds_arrays:
                parent.holds_arrays = True
                holders.append(parent)
    root = index.get(())
    if root is None or root.node.kind != "dict":
        raise CorruptDataError("the structure has no root that is a dict")
    for holder in holders:
        above = index[holder.path[:-1]]
        if not above.holds_arrays:
            above.holds_arrays = True
            holders.append(above)
    if selection is not None and not selection.is_everything:
        _mark(root, selection)
    return root


def _is_more_than_data(node: Node) -> bool:
    if node.kind in ("list", "tuple", "deque"):
        return False
    if node.kind == "dict":
        return isinstance(node.data, dict) and "class" in node.data
    if node.kind == "value":
        return isinstance(node.data, dict) and "enum" in node.data
    return True


def _mark(root: Saved, selection: Selection) -> None:
    unknown = sorted(repr(name) for name in selection.items or () if name not in root.children)
    if unknown:
        raise InvalidArgumentError(
            f"the step has no item {', '.join(unknown)}",
            hint=f"It has {', '.join(repr(str(name)) for name in root.children)}.",
        )
    _mark_children(root, selection, None if selection.keys is None else _compiled(selection.keys))
    unmatched = _unmatched(root, selection)
    if unmatched:
        raise InvalidArgumentError(
            f"nothing in the step matches {', '.join(map(repr, unmatched))}",
            hint="Patterns are those of fnmatch, on dotted paths as `model.layers.0.weight`.",
        )


def _unmatched(root: Saved, selection: Selection) -> list[str]:
    """Return the patterns that match nothing: a misspelt one would leave out, unnoticed, what it was given for."""
    left = dict.fromkeys(selection.keys or ())
    for saved in root.walk() if left else ():
        if saved.path and (selection.items is None or saved.path[0] in selection.items):
            text = display_path(saved.path)
            for key in [key for key in left if _compiled((key,)).fullmatch(text)]:
                del left[key]
            if not left:
                break
    return list(left)


def _mark_children(saved: Saved, selection: Selection, pattern: re.Pattern[str] | None) -> None:
    for key, child in saved.children.items():
        if selection.items is not None and not saved.path and key not in selection.items:
            _mark_all(child, "none")
        elif pattern is None or pattern.fullmatch(display_path(child.path)):
            _mark_all(child, "all")
        elif child.children:
            _mark_children(child, selection, pattern)
        else:
            child.extent = "none"
    extents = {child.extent for child in saved.children.values()}
    saved.extent = extents.pop() if len(extents) == 1 else "some" if extents else "none"


def _mark_all(saved: Saved, extent: Extent) -> None:
    for below in saved.walk():
        below.extent = extent


def select_structure(
    structure: Mapping[TreePath, Node],
    *,
    items: Collection[str] | None = None,
    keys: Collection[str] | None = None,
    process_index: int = 0,
    process_count: int = 1,
) -> dict[TreePath, Node]:
    """Return the part of a structure that a restore without a target reads.

    What is not selected is left out, and of state per process what belongs to others, where this process has its own.

    Raises:
        InvalidArgumentError: an item or a pattern is not in the step.
    """
    root = build_tree(structure, Selection.of(items, keys))
    chosen: dict[TreePath, Node] = {}
    pending = [root]
    while pending:
        saved = pending.pop()
        if saved.extent == "none" and saved.path:
            continue
        chosen[saved.path] = saved.node
        own = own_part(saved, process_index, process_count)
        pending.extend(reversed(saved.children.values()) if own is None else [own])
    return {path: node for path, node in structure.items() if path in chosen}


def own_part(saved: Saved, process_index: int, process_count: int) -> Saved | None:
    """Return what a process saved for itself, if as many processes saved as restore now."""
    if saved.node.kind != "per_process" or node_data(saved.node).get("process_count") != process_count:
        return None
    return saved.children.get(process_index)


def array_paths(structure: Mapping[TreePath, Node]) -> set[TreePath]:
    """Return the leaves whose data `unflatten` needs for this structure."""
    return {
        path if node.kind == "array" else alias_path(node) for path, node in structure.items() if node.kind in ARRAYS
    }
