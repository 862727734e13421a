"""What to tell a person whose state holds something that cannot be kept: what it is, where, and a way out.

Must not know how things are kept.
"""

from __future__ import annotations

import io
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.manifest import TreePath, display_path
from safepoint.manager.values import type_name

__all__ = ["refusal"]

_WAYS_OUT: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (
        (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.LambdaType),
        "Code is not kept. Leave it out and make it again, or keep its name as a str.",
    ),
    (type, "A class is not kept. Keep its name as a str, or an object with state_dict and load_state_dict."),
    (types.ModuleType, "A Python module is not kept. Keep its name as a str."),
    (io.IOBase, "An open file is not kept. Keep its path and position as plain values."),
    (np.ndarray, "Keep an array of numbers, or its elements as a list of plain values."),
    (Mapping, "Pass a dict of its items: `dict(value)`."),
    (Iterator, "An iterator is not kept. Keep the position, and what it runs over by name."),
    ((list, tuple, Sequence), "Pass a list or tuple of its items: `list(value)`."),
    ((int, float, str, bytes), "Pass the plain value, without the subclass."),
)


def refusal(value: Any, path: TreePath) -> UnsupportedValueError:
    """Return the error for a value that cannot be kept."""
    return UnsupportedValueError(
        f"a value of type {type_name(type(value))} cannot be kept", leaf=display_path(path), hint=_way_out(value)
    )


def _way_out(value: Any) -> str:
    has_get, has_set = (callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    if has_get != has_set and not isinstance(value, type):
        missing, present = ("load_state_dict", "state_dict") if has_get else ("state_dict", "load_state_dict")
        return f"It has {present} but no {missing}: give it both, or pass its state dict itself."
    for kind, hint in _WAYS_OUT:
        if isinstance(value, kind):
            return hint
    return (
        "Give it state_dict and load_state_dict, make it a dataclass, or pass what matters of it as tensors and plain "
        "values."
    )
