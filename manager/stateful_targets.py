"""Matches objects with a state: modules, random generators, and anything with `load_state_dict`.

Owns when a module's tensors are filled in place and its `load_state_dict` is not called: where that could do nothing
else. Optimizers are `optimizers`'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.manifest import display_path
from safepoint.manager.aliases import memory_key
from safepoint.manager.matching import Make, Matcher, describe_live
from safepoint.manager.nodes import ARRAYS, node_data
from safepoint.manager.optimizers import visit_optimizer
from safepoint.manager.partial_fill import fill_selected
from safepoint.manager.rebuild import decode_metadata
from safepoint.manager.state import owners_of
from safepoint.manager.statefuls import Form, load_state, state_of

if TYPE_CHECKING:
    from safepoint.manager.saved_tree import Saved

__all__ = ["needs_load_call", "visit_stateful"]

_EXTRA_STATE = "_extra_state"
_TORCH_STATEFULS = ("torch.optim.",)


def visit_stateful(matcher: Matcher, saved: Saved, live: Any, form: Form) -> Make:
    """Match an object that gives and takes a state."""
    data = node_data(saved.node)
    saved_form = data.get("form", form) if saved.node.kind == "stateful" else form
    if saved.node.kind not in ("stateful", "dict") or saved_form != form or _is_other_of_torch(data, live):
        told = f"the state of a {data.get('class')}" if saved.node.kind == "stateful" else f"a {saved.node.kind}"
        matcher.differ(saved.path, f"the step has {told}, the target {describe_live(live)}")
        return lambda: live
    if form == "module":
        return _visit_module(matcher, saved, live)
    if form == "optimizer":
        return visit_optimizer(matcher, saved, live)
    if saved.extent == "some":
        return _fill_some(matcher, saved, live, form)
    return _visit_object(matcher, saved, live, form)


def _is_other_of_torch(data: Mapping[str, Any], live: Any) -> bool:
    """Say whether step and target have different optimizers or schedulers of torch's, whose states look alike."""
    one, other = str(data.get("class", "")), f"{type(live).__module__}.{type(live).__qualname__}"
    both = all(name.startswith(_TORCH_STATEFULS) for name in (one, other))
    return both and one.rpartition(".")[2] != other.rpartition(".")[2]


def _visit_object(matcher: Matcher, saved: Saved, live: Any, form: Form) -> Make:
    leaf = display_path(saved.path)
    like = state_of(live, form, leaf=leaf)
    if form == "generator":
        _check_generator(matcher, saved, like)
    state = matcher.rebuilder().state(saved, like)

    def make() -> Any:
        load_state(live, state, form, leaf=leaf)
        return live

    return make


def _check_generator(matcher: Matcher, saved: Saved, like: Mapping[str, Any]) -> None:
    name = saved.children.get("bit_generator")
    same_bits = name is None or name.node.data == like.get("bit_generator")
    if set(saved.children) != set(like) or not same_bits:
        matcher.differ(saved.path, "the step has the state of another kind of generator than the target's")


def _fill_some(matcher: Matcher, saved: Saved, live: Any, form: Form) -> Make:
    """Fill the selected tensors of an object in place, and nothing else."""
    fill_selected(matcher, saved, state_of(live, form, leaf=display_path(saved.path)))
    return lambda: live


# -- modules -----------------------------------------------------------------------------------------------------------


def _visit_module(matcher: Matcher, saved: Saved, live: torch.nn.Module) -> Make:
    leaf = display_path(saved.path)
    state = state_of(live, "module", leaf=leaf)
    if not isinstance(state, Mapping) or node_data(saved.node).get("wrapped"):
        return _visit_object(matcher, saved, live, "module")
    owners = owners_of(live)
    for key, value in state.items():
        if key not in saved.children:
            matcher.note_missing((*saved.path, key), value)
    made: dict[str, Any] = {}
    in_place = True
    for key, child in saved.children.items():
        name = str(key)
        if child.extent == "none":
            continue
        if key not in state:
            matcher.note_extra(child)
            continue
        made[name] = _visit_entry(matcher, child, name, state[name], owners.get(name))
        in_place = in_place and made[name] is state[name] and _is_live(state[name], owners.get(name))
    if saved.extent == "some" or (in_place and not needs_load_call(live)):
        return lambda: live

    def make() -> torch.nn.Module:
        complete: Any = type(state)() if isinstance(state, dict) else {}
        complete.update({**state, **made})
        metadata = decode_metadata(node_data(saved.node).get("metadata"))
        if metadata:
            complete._metadata = metadata  # noqa: SLF001  # torch's own place for the modules' versions
        load_state(live, complete, "module", leaf=leaf)
        return live

    return make


def _visit_entry(matcher: Matcher, saved: Saved, name: str, live: Any, owner: torch.Tensor | None) -> Any:
    if name.rpartition(".")[2] == _EXTRA_STATE:
        return matcher.rebuild(saved, live)  # whatever the module gave; its shape may differ from save to save
    if saved.node.kind in ARRAYS and isinstance(live, torch.Tensor):
        return matcher.fills.fill(saved, live, owner)
    return matcher.visit(saved, live)()


def _is_live(value: Any, owner: torch.Tensor | None) -> bool:
    """Say whether an entry of a state dict is the module's own memory, so that filling it restores the module."""
    return owner is not None and memory_key(value, owner) == memory_key(owner, owner)


def needs_load_call(module: torch.nn.Module) -> bool:
    """Say whether `load_state_dict` could do more than copy tensors: hooks, overridden methods, extra state."""
    return type(module).load_state_dict is not torch.nn.Module.load_state_dict or any(
        _does_more(part) for part in module.modules()
    )


_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_PLAIN_LOADS = (
    torch.nn.Module._load_from_state_dict,  # noqa: SLF001
    torch.nn.modules.batchnorm._NormBase._load_from_state_dict,  # noqa: SLF001  # only adds what old versions lacked
)


def _does_more(module: torch.nn.Module) -> bool:
    kind = type(module)
    return (
        kind._load_from_state_dict not in _PLAIN_LOADS  # noqa: SLF001
        or kind.set_extra_state is not torch.nn.Module.set_extra_state
        or kind.state_dict is not torch.nn.Module.state_dict
        or any(getattr(module, name, None) for name in _HOOKS)
    )
