"""The tombstone: what stands in the place of a commit record while a step is not there, on stores without a rename.

It owns the other content of `commit.json` that `docs/format.md` defines. It must not know who puts it there, or when.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from safepoint.formats.checksum import digest
from safepoint.formats.commit_record import COMMIT_KIND, CommitRecord, check_own_digest
from safepoint.formats.fields import Fields, canonical_json, parse_json
from safepoint.formats.layout import MARKER_VERSION, check_header

if TYPE_CHECKING:
    from safepoint.formats.tree import JSON

__all__ = ["Tombstone", "TombstoneState", "parse_slot"]

TombstoneState = Literal["claimed", "abandoned", "deleted"]

_KIND = "safepoint-tombstone"
_STATES: tuple[TombstoneState, ...] = ("claimed", "abandoned", "deleted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tombstone:
    """Says that a step is not committed.

    Attributes:
        step: the step.
        attempt: the attempt concerned.
        state: "claimed": the attempt may yet put its record here. "abandoned": it was given up before it did.
            "deleted": its record was here.
        nonce: makes each tombstone another one, so that what was read once cannot come back.
    """

    step: int
    attempt: str
    state: TombstoneState
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    def to_bytes(self) -> bytes:
        """Return the file, with a digest of itself."""
        value: dict[str, JSON] = {
            "kind": _KIND,
            "version": MARKER_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "state": self.state,
            "nonce": self.nonce,
        }
        return canonical_json({**value, "digest": digest(canonical_json(value))})


def parse_slot(data: bytes, *, path: str) -> CommitRecord | Tombstone:
    """Return what a `commit.json` says.

    Args:
        data: its content.
        path: where it was read, for errors.

    Raises:
        UnsupportedVersionError: a newer safepoint wrote it.
        CorruptDataError: it is neither a record nor a tombstone, or damaged; names `path`.
    """
    if _KIND.encode() not in data:
        return CommitRecord.from_bytes(data, path=path)
    value = parse_json(data, what="the tombstone", path=path)
    fields = Fields(value, what="the tombstone", path=path)
    if fields.text("kind") == COMMIT_KIND:  # a record that only quotes the other kind
        return CommitRecord.from_bytes(data, path=path)
    check_header(fields, kind=_KIND, newest=MARKER_VERSION)
    check_own_digest(data, value, fields)
    return Tombstone(
        step=fields.integer("step"),
        attempt=fields.identifier("attempt"),
        state=fields.choice("state", _STATES),
        nonce=fields.identifier("nonce"),
    )
