"""The file formats by name: those of safepoint, and those that installed packages register.

A package registers a format by an entry point of the group `safepoint.formats`, which names an object that is a
`Format`. Only a name that the user gives is looked up, among what is installed; restoring looks up nothing.
"""

from __future__ import annotations

import functools
import reprlib
from importlib.metadata import entry_points
from typing import Any

from safepoint.formats.base import Format
from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.orbax.layout import ORBAX, ORBAX_ZSTD
from safepoint.formats.safetensors import SafetensorsFormat
from safepoint.formats.torch_file import TorchFormat

__all__ = ["ENTRY_POINT_GROUP", "FORMAT_PARTS", "format_names", "get_format"]

ENTRY_POINT_GROUP = "safepoint.formats"

FORMAT_PARTS = tuple(name for name in vars(Format) if not name.startswith("_"))
"""What a format has, by name."""

_OURS: tuple[Format, ...] = (SafetensorsFormat(), ORBAX, ORBAX_ZSTD, TorchFormat())
_FORMATS: dict[str, Format] = {known.name: known for known in _OURS}


def format_names() -> tuple[str, ...]:
    """Return the names that `get_format` knows, sorted."""
    return tuple(sorted({*_FORMATS, *entry_points(group=ENTRY_POINT_GROUP).names}))


def get_format(name: str) -> Format:
    """Return the format of this name.

    Raises:
        InvalidArgumentError: there is none, and the names that there are are listed; or the package that registers it
            is broken.
    """
    known = _FORMATS.get(name)
    if known is None and isinstance(name, str):
        known = _registered(name)
    if known is None:
        raise InvalidArgumentError(
            f"there is no format {reprlib.repr(name)}", hint=f"Formats: {', '.join(format_names())}."
        )
    return known


@functools.cache
def _registered(name: str) -> Format | None:
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not found:
        return None
    try:
        made: Any = found[0].load()
    except Exception as error:
        raise InvalidArgumentError(f"the package that registers the format {name} cannot be loaded: {error}") from error
    missing = [part for part in FORMAT_PARTS if not hasattr(made, part)]
    if missing or made.name != name:
        raise InvalidArgumentError(
            f"what is registered as the format {name} is none", hint=f"It lacks {', '.join(missing) or 'this name'}."
        )
    loaded: Format = made
    return loaded
