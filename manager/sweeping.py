"""Taking things out of a root: hiding by a rename, deleting what is hidden, and cleaning up after a crash.

Works on names of ours (`step_listing`) and on nothing else. Does not decide what is to go, except for what an earlier
owner left in the middle of a save.
"""

from __future__ import annotations

import errno
import itertools
import logging
from typing import TYPE_CHECKING

from safepoint.manager.errors import StorageError
from safepoint.manager.step_listing import parse_name, trash_name

if TYPE_CHECKING:
    from collections.abc import Collection

    from safepoint.formats.storage import Storage
    from safepoint.manager.step_listing import Listing

__all__ = ["IN_USE", "delete", "delete_hidden", "recover", "to_trash"]

logger = logging.getLogger("safepoint")

IN_USE = frozenset({errno.EBUSY, errno.ENOTEMPTY})
"""What a file system says of a directory that somebody holds on to: another try, later, may succeed."""

_MAX_TRIES = 1000


def to_trash(storage: Storage, prefix: str, attempt: str) -> str | None:
    """Rename a directory of ours to a free hidden name and return that; None when somebody was faster."""
    for number in itertools.count():
        target = trash_name(attempt, number)
        try:
            return target if storage.rename_dir(prefix, target) else None
        except StorageError as error:
            if error.errno != errno.EEXIST or number >= _MAX_TRIES:
                raise
    raise AssertionError("unreachable")


def delete(storage: Storage, name: str) -> bool:
    """Delete a hidden directory; say whether all of it is gone."""
    try:
        storage.delete_tree(name)
    except StorageError as error:
        logger.warning("cannot delete %s, will try again later: %s", storage.describe(name), error)
        return False
    return True


def delete_hidden(storage: Storage) -> list[str]:
    """Delete what is hidden; return the names of what is left of it."""
    names = [
        entry.name
        for entry in storage.list("")
        if entry.is_dir and (name := parse_name(entry.name)) is not None and name.kind == "trash"
    ]
    if names:
        # A crash must not undo the renames once files are gone: half a step would be listed again.
        storage.sync_dir("")
    return [name for name in names if not delete(storage, name)]


def recover(storage: Storage, listing: Listing, *, spare: Collection[str] = ()) -> list[str]:
    """Hide what earlier owners left unfinished, put interrupted replacements right, and say what was done.

    Args:
        storage: of the root.
        listing: of it.
        spare: attempts that are left as they are.

    Raises:
        StorageError: an attempt could not be hidden, so that its writer might still publish it.
    """
    done = [
        f"put step {step.record.step} back: what was to replace it was never published ({step.prefix})"
        for step in listing.steps
        if str(step.record.step) not in listing.occupied and storage.rename_dir(step.prefix, str(step.record.step))
    ]
    for entry in storage.list(""):
        name = parse_name(entry.name)
        if not entry.is_dir or name is None or name.kind != "tmp" or name.attempt in (None, *spare):
            continue
        if _hide(storage, entry.name, str(name.attempt)):
            done.append(f"removed an unfinished save of step {name.step} ({entry.name})")
    done.extend(
        f"removed the replaced step {step.record.step} ({step.prefix})"
        for step in listing.superseded
        if _hide(storage, step.prefix, step.record.attempt)
    )
    if done:
        storage.sync_dir("")
    return done


def _hide(storage: Storage, prefix: str, attempt: str) -> bool:
    try:
        return to_trash(storage, prefix, attempt) is not None
    except StorageError as error:
        if error.errno not in IN_USE:
            raise
        logger.warning("cannot remove %s now: %s", storage.describe(prefix), error)
        return False
