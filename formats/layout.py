"""Names and version of the on-disk layout, as `docs/format.md` defines it.

Knows nothing of what the files hold.
"""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Literal

from safepoint.formats.errors import UnsupportedVersionError

if TYPE_CHECKING:
    from safepoint.formats.fields import Fields

__all__ = [
    "COMMIT_NAME",
    "LAYOUT_VERSION",
    "MANIFEST_NAME",
    "MARKER_VERSION",
    "MODES",
    "SCOPES",
    "Mode",
    "Scope",
    "check_header",
]

LAYOUT_VERSION = 1
MARKER_VERSION = 2
"""Of commit records that name the directory of their files, which earlier readers would look for elsewhere."""

COMMIT_NAME = "commit.json"
MANIFEST_NAME = "manifest.json"

Mode = Literal["consolidated", "sharded"]
"""Who wrote: the primary whole leaves, or each process its own regions."""

Scope = Literal["shared", "per_process"]
"""Whether one root is seen by all processes, or each has a private one."""

MODES: tuple[Mode, ...] = ("consolidated", "sharded")
SCOPES: tuple[Scope, ...] = ("shared", "per_process")


def check_header(fields: Fields, *, kind: str, newest: int = LAYOUT_VERSION) -> None:
    """Check `kind` and `version`, before anything else of a file is interpreted.

    Raises:
        CorruptDataError: it is another kind of file.
        UnsupportedVersionError: a newer safepoint wrote it.
    """
    if fields.text("kind") != kind:
        raise fields.error(f"is of kind {reprlib.repr(fields.text('kind'))}, not {kind!r}")
    version = fields.integer("version", minimum=1)
    if version > newest:
        raise UnsupportedVersionError(
            f"{fields.what} has layout version {version}; this release reads up to {newest}",
            path=fields.path,
            hint="Install a newer safepoint to read this step; an older step may still be readable.",
        )
