"""Steps by their path, as people name them: `runs/gpt` is a root, `runs/gpt/1000` a step of it.

Reads only what it takes to tell the two apart.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.layout import COMMIT_NAME
from safepoint.formats.storage import Storage, open_storage
from safepoint.formats.storage.opening import is_url
from safepoint.manager.errors import CorruptDataError, InvalidArgumentError, StepNotFoundError, StorageError
from safepoint.manager.options import full_root
from safepoint.manager.pins import CONTROL_DIR
from safepoint.manager.step_listing import parse_name, parse_step
from safepoint.manager.step_reading import StepReader

if TYPE_CHECKING:
    from safepoint.formats.manifest import Manifest
    from safepoint.manager.step_listing import CommittedStep

__all__ = [
    "OpenStep",
    "StepPath",
    "find_step",
    "open_directory",
    "open_root",
    "open_step",
    "parse_step_path",
    "refuse_step",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPath:
    """What a path names.

    Attributes:
        root: the root, as an absolute path or a URL.
        step: the step; None when the path is the root's own.
    """

    root: str
    step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStep:
    """A committed step whose manifest was read and checked."""

    storage: Storage
    committed: CommittedStep
    manifest: Manifest

    @property
    def step(self) -> int:
        """Its number."""
        return self.committed.record.step

    @property
    def prefix(self) -> str:
        """The directory of its files, relative to the root."""
        return self.committed.files_prefix


def parse_step_path(path: str | os.PathLike[str]) -> StepPath:
    """Tell the path or URL of a step from that of a root.

    That of a step ends in its number. A directory with such a name is a root all the same where it holds steps or a
    control directory, and no commit record.

    Raises:
        InvalidArgumentError: it is empty, or a URL of no storage.
        StorageError: the object store cannot be asked.
    """
    text = os.fspath(path)
    if not text or "\0" in text:
        raise InvalidArgumentError(
            f"{text!r} is no path of a directory", hint="Steps are named by paths such as runs/gpt/1000."
        )
    full = full_root(text)
    parent, name = os.path.split(full)
    step = parse_step(name)
    if step is None or _is_root(full):
        return StepPath(root=full, step=None)
    return StepPath(root=parent, step=step)


def _is_root(root: str) -> bool:
    storage = open_storage(root)
    try:
        entries = {entry.name: entry.is_dir for entry in storage.list("")}
    except StorageError:
        if is_url(root):
            raise
        return False
    if COMMIT_NAME in entries:
        return False
    return CONTROL_DIR in entries or any(
        is_dir and _is_file(storage, f"{name}/{COMMIT_NAME}")
        for name, is_dir in entries.items()
        if (own := parse_name(name)) is not None and own.kind in ("step", "old")
    )


def _is_file(storage: Storage, path: str) -> bool:
    try:
        return storage.size(path) is not None
    except (StorageError, CorruptDataError):
        return False


def open_root(path: str | os.PathLike[str]) -> Storage:
    """Return the storage of a root that is there.

    Raises:
        InvalidArgumentError: the path names a step, or nothing that is there.
        StorageError: the object store cannot be asked.
    """
    named = parse_step_path(path)
    if named.step is not None:
        raise InvalidArgumentError(
            f"this is the path of step {named.step}; the root is wanted", path=named.root, hint="Leave the number away."
        )
    return open_directory(named.root)


def open_directory(root: str) -> Storage:
    """Return the storage of a root, as `parse_step_path` names it, that is there.

    Raises:
        InvalidArgumentError: it is not.
        StorageError: the object store cannot be asked.
    """
    storage = open_storage(root)
    problem = ""
    if is_url(root):
        problem = "" if storage.list("") else "nothing lies there"
    elif not os.path.isdir(root):
        problem = "there is no such directory" if not os.path.lexists(root) else "this is not a directory"
        if os.path.islink(root):
            problem = "this is a symbolic link that leads to no directory"
    if problem:
        raise InvalidArgumentError(
            problem, path=root, hint="Name what the manager was opened with, or a step in it by its number."
        )
    return storage


def refuse_step(storage: Storage) -> None:
    """Refuse to make a root of what is a step.

    Raises:
        InvalidArgumentError: it has a commit record.
    """
    if _is_file(storage, COMMIT_NAME):
        raise InvalidArgumentError(
            "this is a step, and a root is wanted", path=storage.location, hint="Leave the number away."
        )


def open_step(path: str | os.PathLike[str]) -> OpenStep:
    """Return the step that a path names: that of the number, or the latest of a root.

    Raises:
        StepNotFoundError: it is not committed; lists those that are.
        CheckpointError: the step's records cannot be read.
    """
    named = parse_step_path(path)
    storage = open_directory(named.root)
    reader = StepReader(storage)
    committed = find_step(reader, named.step)
    return OpenStep(storage=storage, committed=committed, manifest=reader.load_manifest(committed))


def find_step(reader: StepReader, step: int | None, *, root: str = "") -> CommittedStep:
    """Return a committed step; the latest for None.

    Raises:
        StepNotFoundError: it is not committed; lists those that are.
        CheckpointError: what is wrong with its record.
    """
    listing = reader.listing()
    for known in reversed(listing.steps):
        if step in (None, known.record.step):
            return known
    for problem in listing.problems:
        if step == problem.step:
            raise problem.error.with_context(step=step)
    available = tuple(sorted(known.record.step for known in listing.steps))
    what = "no step is committed here" if step is None else f"step {step} is not committed here"
    raise StepNotFoundError(
        f"{what}; committed are: {', '.join(map(str, available)) or 'none'}",
        step=step,
        path=root or None,
        available=available,
        hint="`safepoint ls` shows what lies there.",
    )
