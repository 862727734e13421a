"""Which files in a root may have to go, told by small marks, on stores where nothing can be renamed out of sight.

A mark is made before the first file of an attempt is written, and before a committed step is replaced or deleted; it
goes when what it speaks of is settled: the record of the step names the attempt, or the files are gone. Nothing is ever
deleted because it lies in a root without a record (somebody may be copying a step to there); only what a mark names is.
Marks lie outside of the steps, so that copies of these carry none.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.fields import canonical_json
from safepoint.formats.layout import COMMIT_NAME
from safepoint.formats.tombstone import Tombstone
from safepoint.manager.errors import CheckpointError, StorageError
from safepoint.manager.pins import CONTROL_DIR
from safepoint.manager.slots import fence_attempt, read_slot, slot_path
from safepoint.manager.step_listing import is_attempt, parse_name

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from safepoint.formats.storage import Storage
    from safepoint.manager.slots import Slot

__all__ = ["Mark", "Unsettled", "read_marks", "told", "unsettled_marks"]

logger = logging.getLogger("safepoint")

_DIRECTORY = f"{CONTROL_DIR}/unsettled"
_MAX_BYTES = 4096
_TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}", re.ASCII)

MarkKind = Literal["unfinished", "replaced", "deleted"]
_KINDS: tuple[MarkKind, ...] = ("unfinished", "replaced", "deleted")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Files that go unless the slot names their attempt.

    Attributes:
        kind: "unfinished": a save that has not committed, under way or left. "replaced", "deleted": a committed step.
        prefix: the directory of the slot, relative to the root.
        attempt: whose files they are.
        files: their directory, relative to `prefix`; "" for what lies there beside the slot.
    """

    kind: MarkKind
    prefix: str
    attempt: str
    files: str

    @property
    def path(self) -> str:
        """Of the mark, relative to the root."""
        return f"{_DIRECTORY}/{self.prefix}-{self.attempt}"

    @property
    def files_prefix(self) -> str:
        """The directory of the files, relative to the root."""
        return f"{self.prefix}/{self.files}" if self.files else self.prefix

    @property
    def step(self) -> int:
        """The step concerned."""
        name = parse_name(self.prefix)
        return 0 if name is None or name.step is None else name.step

    def to_bytes(self) -> bytes:
        """Return the content of the mark."""
        return canonical_json({name: getattr(self, name) for name in ("kind", "prefix", "attempt", "files")})

    @classmethod
    def from_bytes(cls, data: bytes) -> Mark | None:
        """Return the mark, or None for anything that is none: it may then name nothing to be deleted."""
        try:
            value = json.loads(data)
            kind, prefix, attempt, files = (value[name] for name in ("kind", "prefix", "attempt", "files"))
        except (ValueError, KeyError, TypeError):
            return None
        if not all(type(text) is str for text in (kind, prefix, attempt, files)) or kind not in _KINDS:
            return None
        name = parse_name(prefix)
        if name is None or name.kind not in ("step", "old") or not is_attempt(attempt) or files not in ("", attempt):
            return None
        return cls(kind=kind, prefix=prefix, attempt=attempt, files=files)


def read_marks(storage: Storage) -> list[Mark]:
    """Return all marks of a root, in no particular order.

    Raises:
        StorageError: they cannot be read.
    """
    marks = []
    for entry in storage.list(_DIRECTORY):
        try:
            found = None if entry.is_dir else storage.read_versioned(f"{_DIRECTORY}/{entry.name}", max_bytes=_MAX_BYTES)
        except StorageError:
            raise
        except CheckpointError:
            continue
        mark = None if found is None else Mark.from_bytes(found.data)
        if mark is not None and mark.path == f"{_DIRECTORY}/{entry.name}":
            marks.append(mark)
    return marks


def unsettled_marks(storage: Storage) -> list[Mark]:
    """Return the marks of what is not committed now: it goes, or is under way.

    Raises:
        StorageError: they cannot be read.
    """
    return [mark for mark in read_marks(storage) if not _is_settled(read_slot(storage, mark.prefix), mark)]


class Unsettled:
    """The marks of one root, and what follows from them. For the root's owner; thread-safe."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._active: set[str] = set()
        self.lock = threading.RLock()
        """Around changes that the thread which settles must see as one: a mark, and the change of the slot after it."""

    def hold(self, attempts: Collection[str]) -> None:
        """Leave these attempts alone: this process goes on with them."""
        with self.lock:
            self._active.update(attempts)

    def let_go(self, attempt: str) -> None:
        """Undo `hold`."""
        with self.lock:
            self._active.discard(attempt)

    def put(self, mark: Mark) -> None:
        """Make a mark, durably."""
        self._storage.make_dir(CONTROL_DIR)
        self._storage.make_dir(_DIRECTORY)
        self._storage.replace(mark.path, mark.to_bytes())

    def remove(self, mark: Mark) -> None:
        """Take a mark away: what it speaks of is settled. A failure is logged; the next look finds it settled too."""
        try:
            self._storage.delete(mark.path)
        except StorageError as error:
            logger.warning("cannot remove the mark %s: %s", self._storage.describe(mark.path), error)

    def fence_all(self) -> list[Mark]:
        """Make sure that no attempt of others can be published any more; return what is to go.

        Called by: the root's owner, when it became that.

        Raises:
            StorageError: that could not be made sure of.
        """
        doomed = []
        for mark in read_marks(self._storage):
            if mark.attempt in self._active:
                continue
            if mark.kind == "unfinished":
                fence_attempt(self._storage, mark.step, mark.attempt)
            slot = read_slot(self._storage, mark.prefix)
            if not _is_settled(slot, mark):
                doomed.append(mark)
        return doomed

    def settle_all(self) -> list[str]:
        """Delete what is to go, slowly; return the directories that could not be deleted now.

        Raises:
            StorageError: the marks cannot be read.
        """
        left = []
        for mark in read_marks(self._storage):
            try:
                done = self.settle(mark)
            except CheckpointError as error:
                logger.warning("cannot delete %s now: %s", self._storage.describe(mark.files_prefix), error)
                done = False
            if not done:
                left.append(mark.files_prefix)
        return left

    def settle(self, mark: Mark) -> bool:
        """Do what follows from one mark; return False when its files could not be deleted yet.

        Raises:
            StorageError: the storage failed.
        """
        storage = self._storage
        with self.lock:
            if mark.attempt in self._active:
                return True
            slot = read_slot(storage, mark.prefix)
            if _is_settled(slot, mark):
                self.remove(mark)
                return True
            if mark.kind == "unfinished":
                fence_attempt(storage, mark.step, mark.attempt)
        if mark.files:
            storage.delete_tree(mark.files_prefix)
        else:
            self._delete_beside(mark)
        with self.lock:
            if mark.attempt in self._active:  # begun again meanwhile: its mark stays
                return True
            self._clear_slot(mark)
            self.remove(mark)
        return True

    def _delete_beside(self, mark: Mark) -> None:
        """Delete the files that lie beside the slot, and nothing of other attempts."""
        storage = self._storage
        slot = read_slot(storage, mark.prefix)
        others = {other.attempt for other in read_marks(storage)} | {getattr(slot and slot.content, "attempt", "")}
        for entry in storage.list(mark.prefix):
            if entry.name != COMMIT_NAME and not (entry.is_dir and entry.name in others and is_attempt(entry.name)):
                storage.delete_tree(f"{mark.prefix}/{entry.name}")

    def _clear_slot(self, mark: Mark) -> None:
        storage = self._storage
        slot = read_slot(storage, mark.prefix)
        if slot is not None and isinstance(slot.content, Tombstone):
            if slot.content.attempt != mark.attempt:
                return
            storage.delete_if_unchanged(slot_path(mark.prefix), slot.version)
        if slot is None or isinstance(slot.content, Tombstone):
            for entry in storage.list(mark.prefix):
                if _TEMPORARY.fullmatch(entry.name) is not None:  # of a killed process, on a local file system
                    storage.delete(f"{mark.prefix}/{entry.name}")
            storage.delete_dir(mark.prefix)


def _is_settled(slot: Slot | None, mark: Mark) -> bool:
    """Say whether nothing goes: the attempt is committed, or a rename has put another step's files there."""
    if slot is None or not isinstance(slot.content, CommitRecord):
        return False
    return slot.content.attempt == mark.attempt or slot.content.files == mark.files


def told(marks: Sequence[Mark]) -> list[str]:
    """Return for people what was done about the marks of others."""
    texts = {"unfinished": "an unfinished save of step", "replaced": "the replaced step", "deleted": "the deleted step"}
    return [f"removed {texts[mark.kind]} {mark.step} ({mark.files_prefix})" for mark in marks]
