"""The one file of a step whose content says whether the step is there, and its changes by compare and set.

`<step>/commit.json` holds nothing, a tombstone or a commit record. Whoever wants to publish an attempt first makes the
slot its own (a tombstone "claimed", or the record that is to be replaced), and later puts the record only if the slot
is still as it was. So whoever changes it in between, in whatever way, has made sure that the attempt is never
published; and no change is ever undone, since no two contents are equal.
"""

from __future__ import annotations

import errno
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.commit_record import COMMIT_MAX_BYTES, CommitRecord, fenced
from safepoint.formats.layout import COMMIT_NAME
from safepoint.formats.tombstone import Tombstone, parse_slot
from safepoint.manager.errors import (
    AttemptLostError,
    CheckpointError,
    CorruptDataError,
    StorageError,
    UnsupportedVersionError,
)

if TYPE_CHECKING:
    from collections.abc import Hashable

    from safepoint.formats.storage import Storage

logger = logging.getLogger("safepoint")

__all__ = ["Slot", "claim_slot", "fence_attempt", "read_slot", "slot_path"]

_MAX_TRIES = 100
"""Each failed try means that somebody else has changed the slot meanwhile."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """What a slot held at one moment.

    Attributes:
        content: what it said; an error where that cannot be read.
        data: its bytes.
        version: for a change that is to happen only if nothing else has changed it.
    """

    content: CommitRecord | Tombstone | CheckpointError
    data: bytes
    version: Hashable

    @property
    def committed(self) -> str | None:
        """The attempt that is committed, None where none is."""
        return self.content.attempt if isinstance(self.content, CommitRecord) else None


def slot_path(prefix: str) -> str:
    """Return the path of the slot of a directory in the root."""
    return f"{prefix}/{COMMIT_NAME}"


def read_slot(storage: Storage, prefix: str) -> Slot | None:
    """Return what the slot holds, None where there is no such file.

    Raises:
        StorageError: it cannot be read.
    """
    path = slot_path(prefix)
    try:
        found = storage.read_versioned(path, max_bytes=COMMIT_MAX_BYTES)
    except CorruptDataError as error:  # no file, or far too large for ours: nobody can replace it unseen
        return Slot(content=error, data=b"", version=None)
    if found is None:
        return None
    content: CommitRecord | Tombstone | CheckpointError
    try:
        content = parse_slot(found.data, path=storage.describe(path))
    except (CorruptDataError, UnsupportedVersionError) as error:
        content = error
    return Slot(content=content, data=found.data, version=found.version)


def claim_slot(storage: Storage, step: int, attempt: str) -> Slot:
    """Make the slot of a step this attempt's, and return it as it is then; a committed step stays there as it is.

    Raises:
        AttemptLostError: others change it all the time.
        StorageError: the storage failed.
    """
    prefix = str(step)
    claims: set[bytes] = set()
    for _ in range(_MAX_TRIES):
        found = read_slot(storage, prefix)
        if found is not None and (found.committed is not None or found.data in claims):
            return found
        # Another one for each try: where versions are digests of contents, one that comes back makes a condition hold
        # for whoever read it the first time.
        data = Tombstone(step=step, attempt=attempt, state="claimed").to_bytes()
        claims.add(data)
        if found is None:
            _put_first(storage, prefix, data)
        elif isinstance(found.content, CheckpointError) and found.version is None:
            raise found.content
        else:
            _keep_damaged(storage, prefix, attempt, found)
            storage.put_if_unchanged(slot_path(prefix), data, found.version)
    raise AttemptLostError(
        "other jobs are saving this step at the same time",
        step=step,
        path=storage.describe(prefix),
        outcome="not_committed",
        hint="Give each run a root of its own.",
    )


def _put_first(storage: Storage, prefix: str, data: bytes) -> None:
    storage.make_dir(prefix)
    try:
        storage.put_if_absent(slot_path(prefix), data)
    except StorageError as error:
        if error.errno != errno.ENOENT:  # another job has just removed the empty directory
            raise


def _keep_damaged(storage: Storage, prefix: str, attempt: str, found: Slot) -> None:
    """Keep a copy of a record that cannot be read, for people, before another one takes its place."""
    if isinstance(found.content, CheckpointError):
        kept = f"{prefix}/commit.damaged-{attempt}.json"
        if storage.put_if_absent(kept, found.data):
            logger.warning(
                "step %s was damaged and is being saved again; its record is kept as %s (%s)",
                prefix,
                storage.describe(kept),
                found.content.message,
            )


def fence_attempt(storage: Storage, step: int, attempt: str) -> bool:
    """Change the slot, if need be, so that this attempt can never be published; a committed step stays committed.

    Returns:
        True when this call did it; False when the attempt is published, or was given up or beaten before.

    Raises:
        AttemptLostError: others change the slot all the time.
        StorageError: the storage failed.
    """
    prefix = str(step)
    for _ in range(_MAX_TRIES):
        found = read_slot(storage, prefix)
        if found is None:
            return False
        content = found.content
        if isinstance(content, CommitRecord) and attempt not in (content.attempt, content.fence):
            data = fenced(found.data, attempt, path=storage.describe(slot_path(prefix)))
        elif isinstance(content, Tombstone) and (content.attempt, content.state) == (attempt, "claimed"):
            data = Tombstone(step=step, attempt=attempt, state="abandoned").to_bytes()
        else:
            return False
        if storage.put_if_unchanged(slot_path(prefix), data, found.version):
            return True
    raise AttemptLostError("other jobs change this step all the time", step=step, path=storage.describe(prefix))
