"""Matches optimizers: parameters by name or position, state that does not exist yet, hyper-parameters from the file.

Owns what differs from torch's own `load_state_dict`: state keeps the dtype that it was saved with (torch casts it to
the parameter's), goes straight to the memory where it stays, and takes time linear in the number of parameters (torch
looks each of them up in its group's list). Hooks and overridden methods still get the whole state through torch's way.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.errors import CorruptDataError
from safepoint.formats.manifest import PathKey, TreePath, display_path
from safepoint.manager.partial_fill import fill_selected
from safepoint.manager.rebuild import ABSENT, Rebuilder
from safepoint.manager.statefuls import load_state, state_of
from safepoint.manager.tree_keys import decode_key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.manager.matching import Make, Matcher
    from safepoint.manager.saved_tree import Saved

__all__ = ["visit_optimizer"]

_LIKE_PARAMETER = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "exp_inf",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "sum",
        "ax",
        "prev",
        "step_size",
    }
)
"""State of torch's optimizers of its parameter's shape, so that a wrong model is noticed without existing state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Slot:
    """One parameter of the target: its index in the target's state dict, itself, and its group as restored."""

    index: int
    parameter: torch.Tensor
    group: Mapping[str, Any]

    def device_of(self, key: PathKey) -> torch.device:
        """Return where torch keeps this state: a step count stays on the host unless a kernel reads it there."""
        on_device = key != "step" or self.group.get("fused") or self.group.get("capturable")
        return self.parameter.device if on_device else torch.device("cpu")


def visit_optimizer(matcher: Matcher, saved: Saved, live: torch.optim.Optimizer) -> Make:
    """Match an optimizer, primed or not."""
    leaf = display_path(saved.path)
    like = state_of(live, "optimizer", leaf=leaf)
    groups, slots = _pair_groups(matcher, saved, live, like["param_groups"])
    saved_state = saved.children.get("state")
    if groups is None or saved_state is None:
        return lambda: live
    if saved.extent == "some":
        for key, entry in saved_state.children.items():
            slot = slots.get(key)
            fill_selected(matcher, entry, like["state"].get(key if slot is None else slot.index, ABSENT))
        return lambda: live
    parameters = _parameters_of(live, like)
    taken = {slot.index for slot in slots.values() if slot is not None}
    # What the step knows nothing of stays as it is; of all others, what the step has not is gone.
    state: dict[Any, Any] = {
        index: like["state"][index] for index in (parameters.keys() - taken) & like["state"].keys()
    }
    for key, entry in saved_state.children.items():
        slot = slots.get(key)
        if key in slots and slot is None:
            continue  # of a parameter that the target has not, as was allowed
        if slot is None:
            state[decode_key(key)] = matcher.rebuild(entry, like["state"].get(key, ABSENT))
        else:
            state[slot.index] = _match_state(matcher, entry, slot, like["state"].get(slot.index, {}))

    def make() -> torch.optim.Optimizer:
        _load(live, state, groups, parameters, leaf=leaf)
        return live

    return make


# -- groups ---------------------------------------------------------------------------------------------------------


def _pair_groups(
    matcher: Matcher, saved: Saved, live: torch.optim.Optimizer, like: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]] | None, dict[PathKey, _Slot | None]]:
    """Return the groups to load, and the target's parameter for each saved index; None for one that it has not."""
    node = saved.children.get("param_groups")
    saved_groups = [] if node is None else list(node.children.values())
    path = (*saved.path, "param_groups")
    if len(saved_groups) != len(like):
        matcher.differ(path, f"{len(saved_groups)} parameter groups in the step, {len(like)} in the target")
        return None, {}
    groups: list[dict[str, Any]] = []
    slots: dict[PathKey, _Slot | None] = {}
    for index, (saved_group, live_group, like_group) in enumerate(
        zip(saved_groups, live.param_groups, like, strict=True)
    ):
        group: dict[str, Any] = {**like_group, **matcher.rebuild(saved_group, like_group)}
        saved_indices = group["params"]
        if not isinstance(saved_indices, list) or not all(type(number) is int for number in saved_indices):
            raise CorruptDataError("a parameter group without its parameters", leaf=display_path((*path, index)))
        order = _pair_parameters(matcher, (*path, index), group, like_group)
        if order is None:
            continue
        group["params"] = list(like_group["params"])
        if "param_names" in like_group:
            group["param_names"] = list(like_group["param_names"])
        for saved_index, place in zip(saved_indices, order, strict=True):
            slots[saved_index] = (
                None
                if place is None
                else _Slot(index=like_group["params"][place], parameter=live_group["params"][place], group=group)
            )
        groups.append(group)
    return (groups if len(groups) == len(like) else None), slots


def _pair_parameters(
    matcher: Matcher, path: TreePath, group: Mapping[str, Any], like: Mapping[str, Any]
) -> Sequence[int | None] | None:
    """Return the place in the target's group of each saved parameter, by name where both sides have names."""
    saved_names, names = group.get("param_names"), like.get("param_names")
    if "param_names" in like and _are_names(saved_names, group["params"]) and _are_names(names, like["params"]):
        return _pair_names(matcher, path, saved_names or [], names or [])
    if len(group["params"]) != len(like["params"]):
        matcher.differ(path, f"{len(group['params'])} parameters in the step, {len(like['params'])} in the target")
        return None
    return range(len(like["params"]))


def _pair_names(
    matcher: Matcher, path: TreePath, saved_names: Sequence[str], names: Sequence[str]
) -> Sequence[int | None] | None:
    places = {name: place for place, name in enumerate(names)}
    missing = [name for name in names if name not in set(saved_names)]
    extra = [name for name in saved_names if name not in places]
    adapting = matcher.adapting
    refused = False
    for side, told, note in (
        (missing, "of the target is missing from the step", adapting.note_missing),
        (extra, "of the step is not in the target", adapting.note_extra),
    ):
        for name in side:
            if adapting.may_differ((*path, name)):
                note((*path, name))
            else:
                matcher.differ(path, f"parameter {name!r} {told}")
                refused = True
    return None if refused else [places.get(name) for name in saved_names]


def _are_names(names: object, parameters: Sequence[int]) -> bool:
    return isinstance(names, list) and len(set(names)) == len(names) == len(parameters)


def _parameters_of(live: torch.optim.Optimizer, like: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    return {
        index: parameter
        for group, like_group in zip(live.param_groups, like["param_groups"], strict=True)
        for index, parameter in zip(like_group["params"], group["params"], strict=True)
    }


# -- state ----------------------------------------------------------------------------------------------------------


def _match_state(matcher: Matcher, saved: Saved, slot: _Slot, like: Mapping[Any, Any]) -> Any:
    """Return the state of one parameter; existing tensors are filled in place, others allocated."""
    if saved.node.kind != "dict":
        return matcher.rebuild(saved, like)
    for key in like:
        if key not in saved.children:
            matcher.note_missing((*saved.path, key), like[key])
    return {
        decode_key(key): _match_entry(matcher, child, key, slot, like.get(key, ABSENT))
        for key, child in saved.children.items()
    }


def _match_entry(matcher: Matcher, saved: Saved, key: PathKey, slot: _Slot, like: Any) -> Any:
    if saved.node.kind not in ("array", "alias"):
        rebuilder = Rebuilder(
            lambda source, inner, _: matcher.fills.allocate_state(source, inner, slot.parameter, slot.device_of(key)),
            report=lambda inner, text: matcher.differ(inner.path, text),
            own=matcher.own,
        )
        return rebuilder.build(saved, like)
    source = matcher.fills.source_of(saved)
    entry = matcher.fills.entry(source, saved)
    device = slot.device_of(key)
    if isinstance(like, torch.Tensor) and entry.shape == tuple(like.shape):
        if str(like.dtype) == f"torch.{entry.dtype}" and like.device == device:
            return matcher.fills.fill(saved, like)
    elif isinstance(like, torch.Tensor) or (key in _LIKE_PARAMETER and entry.shape != tuple(slot.parameter.shape)):
        expected = like.shape if isinstance(like, torch.Tensor) else slot.parameter.shape
        matcher.differ(saved.path, f"shape: {list(entry.shape)} in the step, {list(expected)} in the target")
        return None
    return matcher.fills.allocate_state(source, saved, slot.parameter, device)


def _load(
    live: torch.optim.Optimizer,
    state: dict[Any, Any],
    groups: list[dict[str, Any]],
    parameters: Mapping[int, torch.Tensor],
    *,
    leaf: str,
) -> None:
    if _needs_whole_state(live):
        load_state(live, {"state": state, "param_groups": groups}, "optimizer", leaf=leaf)
        _undo_casts(live, state, parameters)
        return
    load_state(live, {"state": {}, "param_groups": groups}, "optimizer", leaf=leaf)
    by_parameter: collections.defaultdict[Any, Any] = collections.defaultdict(dict)
    by_parameter.update({parameters.get(key, key): entry for key, entry in state.items()})
    # What load_state_dict itself ends with: optimizers bring state of older torch releases up to date here.
    live.__setstate__({"state": by_parameter, "param_groups": live.param_groups})


def _needs_whole_state(live: torch.optim.Optimizer) -> bool:
    overridden = type(live).load_state_dict is not torch.optim.Optimizer.load_state_dict
    hooks = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return overridden or any(getattr(live, name, None) for name in hooks)


def _undo_casts(live: torch.optim.Optimizer, state: Mapping[Any, Any], parameters: Mapping[int, torch.Tensor]) -> None:
    for index, parameter in parameters.items():
        loaded = live.state.get(parameter)
        saved = state.get(index)
        if not isinstance(loaded, dict) or not isinstance(saved, dict):
            continue
        for key, value in saved.items():
            found = loaded.get(key)
            if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and found.dtype != value.dtype:
                loaded[key] = value.to(found.device)
