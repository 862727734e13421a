"""A part of an object's state, restored alone: its selected tensors are filled in place, and nothing else happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.manager.nodes import ARRAYS
from safepoint.manager.rebuild import ABSENT

if TYPE_CHECKING:
    from safepoint.manager.matching import Matcher
    from safepoint.manager.saved_tree import Saved

__all__ = ["fill_selected"]


def fill_selected(matcher: Matcher, saved: Saved, live: Any) -> None:
    """Plan to fill each selected array of a subtree into its counterpart in `live`; values are left as they are."""
    if saved.extent == "none":
        return
    if saved.node.kind in ARRAYS:
        if isinstance(live, (torch.Tensor, np.ndarray)):
            matcher.fills.fill(saved, live)
        else:
            matcher.differ(
                saved.path,
                "the target has no tensor there to fill; restore the whole object, without `keys=` for parts of it",
            )
        return
    for key, child in saved.children.items():
        fill_selected(matcher, child, _child(live, key))


def _child(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key, ABSENT)
    if isinstance(live, (list, tuple)) and type(key) is int and 0 <= key < len(live):
        return live[key]
    return ABSENT
