"""Owner files of roots of any kind, as tests leave them behind for others who are not there."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from safepoint.manager.holder import Holder
from safepoint.manager.owner import Owner, current_holder
from safepoint.manager.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from safepoint.formats.storage import Storage

    from support.roots import Root

__all__ = ["DEADLINE_SECS", "OWNER", "Clock", "OwnedRoot"]

DEADLINE_SECS = 100.0
OWNER = ".safepoint/owner"


class Clock:
    """A clock that tests wind."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class OwnedRoot:
    """A root, or where one will be, with its owner file: in a directory it is touched, elsewhere it is changed."""

    def __init__(self, root: Root) -> None:
        # As a session does: a path has locks and times; a URL, `file://` too, has compare and set.
        self.place: Path | Storage = root.path if root.kind == "directory" else root.storage
        self.root = root
        self._beats = 0

    def open(self, clock: Callable[[], float] = time.monotonic, *, deadline_secs: float = DEADLINE_SECS) -> Owner:
        return Owner(self.place, deadline_secs=deadline_secs, clock=clock)

    def holder(self) -> Holder | None:
        return current_holder(self.place)

    def leave_file(self, **changes: object) -> None:
        """Write the owner file of this process, but for some changes."""
        process = replace(ProcessIdentity.current(), **changes)  # type: ignore[arg-type]
        holder = Holder(
            process=process, since="2026-01-01T00:00:00Z", beat_secs=10.0, nonce="theirs", beats=self._beats
        )
        self.root.write(OWNER, holder.to_bytes())

    def beat(self, **changes: object) -> None:
        """Do as the owner does who left the file."""
        if self.root.kind == "directory":
            found = (self.root.path / OWNER).stat()
            os.utime(self.root.path / OWNER, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
        else:
            self._beats += 1
            self.leave_file(**changes)

    def pulse(self) -> object:
        """Return what changes with each heartbeat."""
        if self.root.kind == "directory":
            return (self.root.path / OWNER).stat().st_mtime_ns
        return self.root.read(OWNER)
