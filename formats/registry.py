"""The file formats by name.

A closed table: a name that comes from a file or a user is looked up here, and never imported.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.orbax.layout import OrbaxFormat
from safepoint.formats.safetensors import SafetensorsFormat
from safepoint.formats.torch_file import TorchFormat

if TYPE_CHECKING:
    from safepoint.formats.base import Format

__all__ = ["format_names", "get_format"]

_FORMATS: dict[str, Format] = {known.name: known for known in (SafetensorsFormat(), OrbaxFormat(), TorchFormat())}


def format_names() -> tuple[str, ...]:
    """Return the names that `get_format` knows, sorted."""
    return tuple(sorted(_FORMATS))


def get_format(name: str) -> Format:
    """Return the format of this name.

    Raises:
        InvalidArgumentError: there is none; lists those that there are.
    """
    known = _FORMATS.get(name)
    if known is None:
        raise InvalidArgumentError(
            f"there is no format {reprlib.repr(name)}", hint=f"Formats: {', '.join(format_names())}."
        )
    return known
