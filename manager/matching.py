"""Walks a target and a step's structure together; finds every difference, changes nothing.

Owns the rules for containers, plain values and arrays. A visit returns a `Make`: called once the data is in place, it
finishes its subtree and returns the value that the parent is to hold, the live one where that could be filled.

Mappings and sequences of plain data only are *data*: a list comes back with the length that it was saved with, and so
does a dict with other than str keys, an empty one, a defaultdict or a Counter. All else is *structure* and must agree.

Statefuls are `stateful_targets`', arrays' memory is `fills`'.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from safepoint.formats.manifest import JSON, Node, PathKey, TreePath, display_path
from safepoint.manager.nodes import ARRAYS, SEQUENCES, container_node, node_data
from safepoint.manager.per_process import PerProcess
from safepoint.manager.rebuild import ABSENT, Rebuilder, keys_of, replace_fields
from safepoint.manager.statefuls import Form, load_state, stateful_form
from safepoint.manager.values import enum_of, is_plain_type, type_name

if TYPE_CHECKING:
    from safepoint.manager.adapting import Adapting
    from safepoint.manager.fills import Fills
    from safepoint.manager.saved_tree import Saved, Selection

__all__ = ["Make", "Matcher", "describe_saved"]

Make: TypeAlias = Callable[[], Any]

_MUTABLE = ("dict", "list", "deque", "dataclass")


class Matcher:
    """One walk. `fills` collects the leaves to be read and `problems` the differences.

    Args:
        fills: which live array takes which stored leaf.
        selection: what is wanted; the extents of the saved tree say it for what is in the step.
        own: index and number of the restoring processes.
        adapting: what may differ, and the notes of what does.
        visit_stateful: how an object with a state is matched; given, since it needs the matcher in turn.
    """

    def __init__(
        self,
        fills: Fills,
        selection: Selection,
        *,
        own: tuple[int, int],
        adapting: Adapting,
        visit_stateful: Callable[[Matcher, Saved, Any, Form], Make],
    ) -> None:
        self.fills = fills
        self.problems = fills.problems
        self.own = own
        self._selection = selection
        self.adapting = adapting
        self._visit_stateful = visit_stateful
        self._is_data: dict[int, bool] = {}
        self.extra: dict[TreePath, str] = {}

    # -- differences -------------------------------------------------------------------------------------------------

    def differ(self, path: TreePath, message: str) -> None:
        """Note a difference."""
        self.problems.append(f"{display_path(path)}: {message}")

    def note_missing(self, path: TreePath, live: Any) -> None:
        """Note what the target has and the step has not, if it is wanted."""
        if not self._selection.wants(path):
            return
        if self.adapting.may_differ(path):
            self.adapting.note_missing(path)
        else:
            self.differ(path, f"missing from the step; the target has {describe_live(live)} there")

    def note_extra(self, saved: Saved) -> None:
        """Note what the step has and the target has not, if it is wanted."""
        if saved.extent == "none":
            return
        if self.adapting.may_differ(saved.path):
            self.adapting.note_extra(saved.path)
        else:
            self.differ(saved.path, f"extra in the step; the target has nothing there for {self._told(saved)}")
            self.extra[saved.path] = self.problems[-1]

    def _told(self, saved: Saved) -> str:
        return describe_saved(saved, self.fills.entry_text(saved))

    def rebuild(self, saved: Saved, like: Any = ABSENT) -> Any:
        """Return a new value; its arrays are allocated like the counterpart's, and filled when the data is read."""
        return self.rebuilder().build(saved, like)

    def rebuilder(self) -> Rebuilder:
        """Return what makes new values from the step."""
        return Rebuilder(self.fills.allocate, report=lambda saved, text: self.differ(saved.path, text), own=self.own)

    # -- the walk ----------------------------------------------------------------------------------------------------

    def visit(self, saved: Saved, live: Any) -> Make:
        """Match a live value with its saved counterpart."""
        if saved.extent == "none":
            return lambda: live
        if isinstance(live, (torch.Tensor, np.ndarray)) and saved.node.kind in ARRAYS:
            filled = self.fills.fill(saved, live)
            return lambda: filled
        if isinstance(live, PerProcess) or saved.node.kind == "per_process":
            return self._visit_per_process(saved, live)
        if isinstance(live, (torch.Tensor, np.ndarray)) or saved.node.kind in ARRAYS:
            return self._mismatch(saved, live)
        form = None if is_plain_type(type(live)) else stateful_form(live)
        if form is not None:
            return self._visit_stateful(self, saved, live, form)
        return self._visit_inner(saved, live)

    def _mismatch(self, saved: Saved, live: Any) -> Make:
        self.differ(saved.path, f"the step has {self._told(saved)}, the target {describe_live(live)}")
        return lambda: live

    def _visit_inner(self, saved: Saved, live: Any) -> Make:
        node = None if is_plain_type(type(live)) else container_node(live)
        if node is None or saved.node.kind == "value":
            return self._visit_value(saved, live, node)
        if not _same_container(saved.node, node):
            return self._mismatch(saved, live)
        if node.kind == "dict":
            return self._visit_dict(saved, live)
        if node.kind in SEQUENCES:
            return self._visit_sequence(saved, live)
        return self._visit_fields(saved, live, node)

    def _visit_value(self, saved: Saved, live: Any, node: Node | None) -> Make:
        """A plain value takes the place of any other, and None that of a container, or a container its."""
        if saved.node.kind == "value":
            fits = node is None or (saved.node.data is None and self._holds_data(live))
            fits = fits and (node is not None or is_plain_type(type(live)) or type(live) in (set, frozenset, slice))
        else:
            fits = live is None and not saved.holds_arrays
        if not fits:
            return self._mismatch(saved, live)
        value = self.rebuild(saved, live)
        if saved.node.kind == "value" and enum_of(saved.node.data) is None and _is_member(live) and value is not None:
            return self._mismatch(saved, live)
        return lambda: value

    # -- containers --------------------------------------------------------------------------------------------------

    def _holds_data(self, live: Any) -> bool:
        """Say whether a live container holds plain data only, in containers of the standard library."""
        known = self._is_data.get(id(live))
        if known is None:
            known = self._is_data[id(live)] = self._look_for_data(live)
        return known

    def _look_for_data(self, live: Any) -> bool:
        if is_plain_type(type(live)) or type(live) in (set, frozenset, slice):
            return not _is_member(live)
        if type(live) in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            return all(self._holds_data(child) for child in live.values())
        if type(live) in (list, tuple, collections.deque):
            return all(self._holds_data(child) for child in live)
        return False

    def _is_table(self, saved: Saved, live: Any) -> bool:
        """Say whether a dict's keys are data: they come back as they were saved, whatever the target's are."""
        if saved.holds_arrays or not self._holds_data(live):
            return False
        if not live or isinstance(live, (collections.defaultdict, collections.Counter)):
            return True
        return any(type(key) is not str for key in (*live, *saved.children))

    def _visit_dict(self, saved: Saved, live: Any) -> Make:
        names = keys_of(live)
        is_table = self._is_table(saved, live)
        whole = saved.extent == "all"
        for key, name in names.items():
            if key not in saved.children and not is_table:
                self.note_missing((*saved.path, key), live[name])
        values: dict[Any, Any] = {}
        later: dict[Any, Make] = {}
        for key, child in saved.children.items():
            if child.extent == "none":
                continue
            if key in names:
                name = names[key]
                value = live[name]
                if is_table:
                    values[name] = self.rebuild(child, value)
                elif isinstance(value, torch.Tensor) and child.node.kind in ARRAYS:
                    values[name] = self.fills.fill(child, value)
                else:
                    values[name], later[name] = None, self.visit(child, value)
            elif is_table and whole:
                values[self.rebuilder().new_key(child, live)] = self.rebuild(child)
            else:
                self.note_extra(child)
        reorder = whole and type(live) is not _user_type(live)
        return _dict_maker(live, values, later, drop=is_table and whole, reorder=reorder)

    def _visit_sequence(self, saved: Saved, live: Any) -> Make:
        if not saved.holds_arrays and self._holds_data(live) and saved.extent == "all":
            value = self.rebuild(saved, live)
            return lambda: _refill(live, value)
        if node_data(saved.node).get("length") != len(live):
            length = node_data(saved.node).get("length")
            self.differ(saved.path, f"a {saved.node.kind} of length {length} in the step, {len(live)} in the target")
            return lambda: live
        made = [
            (key, self.visit(child, live[key]))
            for key, child in saved.children.items()
            if type(key) is int and 0 <= key < len(live)
        ]
        return lambda: _put_items(live, [(key, make()) for key, make in made])

    def _visit_fields(self, saved: Saved, live: Any, node: Node) -> Make:
        fields: Sequence[str] = node_data(node)["fields"]
        for name in fields:
            if name not in saved.children:
                self.note_missing((*saved.path, name), getattr(live, name))
        made: list[tuple[str, Make]] = []
        for key, child in saved.children.items():
            if key in fields:
                made.append((str(key), self.visit(child, getattr(live, str(key)))))
            else:
                self.note_extra(child)
        return lambda: _put_fields(live, {name: make() for name, make in made})

    # -- state per process -------------------------------------------------------------------------------------------

    def _visit_per_process(self, saved: Saved, live: Any) -> Make:
        if not isinstance(live, PerProcess) or saved.node.kind != "per_process":
            return self._mismatch(saved, live)
        index, count = self.own
        saved_count = node_data(saved.node).get("process_count")
        if saved_count == count and index in saved.children:
            inner = self.visit(saved.children[index], live.value)
            return lambda: _put_own(live, inner())
        if live.merge is None:
            self.differ(
                saved.path,
                f"{saved_count} processes each saved their own, and {count} restore. Restore with {saved_count}, leave "
                "it out (`items=` or `keys=`), or say what becomes of the parts: `PerProcess(value, merge=function)`",
            )
            return lambda: live
        return self._merged(saved, live)

    def _merged(self, saved: Saved, live: PerProcess) -> Make:
        form = stateful_form(live.value)
        parts = [self.rebuild(saved.children[key], live.value) for key in sorted(saved.children, key=_by_index)]
        merge = live.merge
        assert merge is not None  # asked before

        def make() -> PerProcess:
            value = merge(parts, *self.own)
            if form is None:
                live.value = value
            else:
                load_state(live.value, value, form, leaf=display_path(saved.path))
            return live

        return make


def _by_index(key: PathKey) -> int:
    return key if isinstance(key, int) else -1


def _put_own(live: PerProcess, value: Any) -> PerProcess:
    live.value = value
    return live


def _is_member(value: Any) -> bool:
    return isinstance(value, enum.Enum)


def _user_type(live: Any) -> type | None:
    """Return the type of a mapping whose class is the user's, and whose order is its own affair."""
    standard = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
    return None if type(live) in standard else type(live)


def _same_container(saved: Node, live: Node) -> bool:
    if saved.kind == "stateful" and live.kind == "dict":
        return True  # the state of an object fits a dict that looks like it: `model.state_dict()`
    if saved.kind != live.kind:
        return False
    one, other = node_data(saved), node_data(live)
    if saved.kind == "dict":
        return one.get("type") == other.get("type") and ("class" in one) == ("class" in other)
    return saved.kind != "deque" or one.get("maxlen") == other.get("maxlen")


def _dict_maker(live: Any, values: dict[Any, Any], later: dict[Any, Make], *, drop: bool, reorder: bool) -> Make:
    def make() -> Any:
        for key, value in later.items():
            values[key] = value()
        kept = {} if drop else {key: value for key, value in live.items() if key not in values}
        if reorder and (drop or list(live) != [*values, *kept]):
            live.clear()
            live.update(values)
            live.update(kept)
        else:
            for key, value in values.items():
                if live[key] is not value:
                    live[key] = value
        return live

    return make


def _refill(live: Any, value: Any) -> Any:
    if isinstance(live, list):
        live[:] = value
        return live
    if isinstance(live, collections.deque):
        live.clear()
        live.extend(value)
        return live
    return value


def _put_items(live: Any, items: list[tuple[int, Any]]) -> Any:
    changed = [(key, value) for key, value in items if live[key] is not value]
    if not changed:
        return live
    if isinstance(live, tuple):
        values = list(live)
        for key, value in changed:
            values[key] = value
        return tuple(values)
    for key, value in changed:
        live[key] = value
    return live


def _put_fields(live: Any, fields: dict[str, Any]) -> Any:
    changed = {name: value for name, value in fields.items() if getattr(live, name) is not value}
    if not changed:
        return live
    if isinstance(live, tuple):
        return live._replace(**changed)  # type: ignore[attr-defined]
    if type(live).__dataclass_params__.frozen:
        return replace_fields(live, changed)
    for name, value in changed.items():
        setattr(live, name, value)
    return live


def describe_live(live: Any) -> str:
    """Return what a value of the target is, in few words."""
    if isinstance(live, torch.Tensor):
        return f"a {str(live.dtype).removeprefix('torch.')} tensor of shape {list(live.shape)}"
    if isinstance(live, np.ndarray):
        return f"a {live.dtype} numpy array of shape {list(live.shape)}"
    if live is None:
        return "None"
    name = type_name(type(live))
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def describe_saved(saved: Saved, entry: str | None) -> str:
    """Return what a node of the step is, in few words."""
    data = node_data(saved.node)
    if entry is not None:
        return f"a {entry}"
    if saved.node.kind == "value":
        return _describe_value(saved.node.data)
    if saved.node.kind == "stateful":
        return f"the state of a {data.get('class')}"
    if saved.node.kind == "per_process":
        return "state that each process saved for itself"
    return f"a {data.get('class') or data.get('type') or saved.node.kind}"


def _describe_value(data: JSON) -> str:
    name = enum_of(data)
    if name is not None:
        return f"a member of {name}"
    if data is None:
        return "None"
    return f"a plain {next(iter(data))}" if isinstance(data, dict) and data else f"a plain {type(data).__name__}"
