"""Which part of a foreign checkpoint belongs to which part of a target: by dotted names, through the caller's table.

The target says what is wanted, with its own keys; so it does not matter whether the other side nests what a state dict
keeps flat, or has texts where the target has numbers. Pure: works on names and nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint.formats.base import LeafRef
from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.manifest import Node, TreePath, display_path
from safepoint.manager.adapting import Rename
from safepoint.manager.nodes import ARRAYS, alias_path
from safepoint.manager.value_encoding import encode_value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from safepoint.manager.adapting import Adaptation

__all__ = ["Alignment", "align", "flat_names", "renamed"]


def flat_names(tree: Any) -> dict[str, Any]:
    """Return the leaves of a foreign tree by dotted name: references, plain values, and empty containers."""
    return dict(_walk((), tree))


def _walk(path: tuple[str, ...], value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict | list | tuple) or not value:
        yield ".".join(path), value
        return
    for key, child in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _walk((*path, str(key)), child)


def renamed(names: Mapping[str, Any], adapt: Collection[Adaptation]) -> dict[str, Any]:
    """Return the leaves under the names that `Rename` gives them.

    Raises:
        InvalidArgumentError: two leaves get one name.
    """
    rules = [
        (re.compile(re.escape(old).replace(r"\*", "(.*)")), new)
        for adaptation in adapt
        if isinstance(adaptation, Rename)
        for old, new in adaptation.names.items()
    ]
    found: dict[str, Any] = {}
    for name, value in names.items():
        target = _apply(name, rules)
        if target in found:
            raise InvalidArgumentError(f"two parts of the checkpoint are to be called {target!r}", leaf=target)
        found[target] = value
    return found


def _apply(name: str, rules: list[tuple[re.Pattern[str], str]]) -> str:
    for pattern, new in rules:
        match = pattern.fullmatch(name)
        if match is not None:
            groups = iter(match.groups())
            return re.sub(r"\*", lambda _: next(groups), new)  # noqa: B023 - used at once
    return name


@dataclass(kw_only=True)
class Alignment:
    """A structure as if the foreign checkpoint were a step of the target's.

    Attributes:
        structure: the target's, with the other side's plain values, and without what it lacks.
        arrays: what stands for each array: a reference, or a plain number.
    """

    structure: dict[TreePath, Node] = field(default_factory=dict)
    arrays: dict[TreePath, Any] = field(default_factory=dict)


def align(names: Mapping[str, Any], target: Mapping[TreePath, Node]) -> Alignment:
    """Return how the foreign leaves fit the structure of a target; what is left over comes as items of their own."""
    found = Alignment()
    left = dict(names)
    tied = _tied_names(target)
    for path, node in target.items():
        name = display_path(path)
        if node.kind == "array":
            _add_array(found, path, node, [name, *tied.get(path, ())], left)
        elif node.kind in ARRAYS:
            left.pop(name, None)  # the same memory as the array that it shows
            if alias_path(node) in found.arrays:
                found.structure[path] = node
        elif node.kind == "value":
            if name in left:
                found.structure[path] = Node(kind="value", data=encode_value(left.pop(name)))
        else:
            left.pop(name, None)  # an empty container
            found.structure[path] = node
    _add_optimizer_states(found, left, target)
    for name, value in left.items():
        _add_leaf(found, (name,), value)
    return found


def _tied_names(target: Mapping[TreePath, Node]) -> dict[TreePath, list[str]]:
    """Return the other names of arrays that are in the target more than once."""
    tied: dict[TreePath, list[str]] = {}
    for path, node in target.items():
        if node.kind == "alias":
            tied.setdefault(alias_path(node), []).append(display_path(path))
    return tied


def _add_array(found: Alignment, path: TreePath, node: Node, names: list[str], left: dict[str, Any]) -> None:
    for name in names:
        if name in left and isinstance(left[name], LeafRef | bool | int | float):
            found.structure[path] = node
            found.arrays[path] = left.pop(name)
            return


def _add_leaf(found: Alignment, path: TreePath, value: Any) -> None:
    if isinstance(value, LeafRef):
        found.structure[path] = Node(kind="array")
        found.arrays[path] = value
    elif isinstance(value, dict | list | tuple):
        return  # empty: nothing is lost
    else:
        found.structure[path] = Node(kind="value", data=encode_value(value))


def _add_optimizer_states(found: Alignment, left: dict[str, Any], target: Mapping[TreePath, Node]) -> None:
    """Give an optimizer that has not stepped yet the state of its parameters."""
    for path, node in target.items():
        if node.kind != "stateful" or not isinstance(node.data, dict) or node.data.get("form") != "optimizer":
            continue
        prefix = f"{display_path(path)}.state."
        for name in [name for name in left if name.startswith(prefix)]:
            parameter, _, rest = name.removeprefix(prefix).partition(".")
            if not parameter.isdigit() or not rest:
                continue
            at = (*path, "state", int(parameter))
            found.structure.setdefault(at, Node(kind="dict"))
            _add_leaf(found, (*at, rest), left.pop(name))
