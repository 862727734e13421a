"""Who owns a root, as the owner file tells it. Knows nothing of where that file lies and how it is changed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.fields import canonical_json
from safepoint.manager.process_identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Hashable

    from safepoint.formats.tree import JSON

__all__ = ["BEAT_SECS", "Holder", "Seen"]

BEAT_SECS = 15.0
"""Longest time between two heartbeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who owns a root.

    Attributes:
        process: the owning process; None when the owner file cannot be read.
        since: when it became the owner, as text for people.
        beat_secs: its time between two heartbeats, in seconds.
        nonce: unique to one ownership.
        beats: heartbeats so far, where the file itself has to change for one.
    """

    process: ProcessIdentity | None = None
    since: str = "an unknown time"
    beat_secs: float = BEAT_SECS
    nonce: str = ""
    beats: int = 0

    def __str__(self) -> str:
        if self.process is None:
            return "an unknown process"
        return f"process {self.process.pid} on host {self.process.host}, since {self.since}"

    def to_bytes(self) -> bytes:
        """Return the content of the owner file."""
        process = None if self.process is None else self.process.to_json()
        value: dict[str, JSON] = {
            "process": process,
            "since": self.since,
            "beat_secs": self.beat_secs,
            "nonce": self.nonce,
        }
        return canonical_json({**value, "beats": self.beats} if self.beats else value)

    @classmethod
    def from_bytes(cls, data: bytes) -> Holder:
        """Return who owns the root; anything that is no owner file's content gives an unknown holder."""
        try:
            value = json.loads(data)
            return cls(
                process=ProcessIdentity.from_json(value["process"]),
                since=str(value["since"]),
                beat_secs=min(max(float(value["beat_secs"]), 0.0), BEAT_SECS),
                nonce=str(value["nonce"]),
                beats=int(value.get("beats", 0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls()


@dataclass(frozen=True, slots=True)
class Seen:
    """The owner file at one moment; another signature means that somebody wrote it or that a heart beat."""

    holder: Holder
    signature: Hashable
