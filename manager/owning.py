"""Owning a root for one piece of work that no training loop does: copying into it, deleting from it.

The rules are those of `owner`: whoever trains there keeps the root, and is named.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.storage import LocalStorage, Storage, open_storage
from safepoint.manager.commit import Committer
from safepoint.manager.errors import StepExistsError
from safepoint.manager.owner import Owner, Refused, Wait
from safepoint.manager.step_paths import refuse_step

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Iterator

    from safepoint.formats.layout import Scope

__all__ = ["OwnedRoot", "begin_or_resume", "check_absent", "owned_root"]

logger = logging.getLogger("safepoint")

_DEADLINE_SECS = 60.0


@dataclass(frozen=True, kw_only=True)
class OwnedRoot:
    """A root that is ours until the block ends.

    Attributes:
        storage: of the root.
        owner: to be asked right before something that only the owner may do.
        done: what an earlier owner had left in the middle and was put right, one line each.
    """

    storage: Storage
    owner: Owner
    done: tuple[str, ...]

    def committer(self, *, scope: Scope = "shared", process_index: int | None = None) -> Committer:
        """Return a committer for steps of this kind."""
        return Committer(self.storage, scope=scope, process_index=process_index or 0)


@contextmanager
def owned_root(
    root: str | os.PathLike[str] | Storage, *, deadline_secs: float = _DEADLINE_SECS, spare: Collection[str] = ()
) -> Iterator[OwnedRoot]:
    """Own a root, made if need be, for the time of a block; put right what an earlier owner left.

    Blocks until it can be told whether the last owner is alive: at once on one host, else up to twice the deadline.

    Args:
        root: its path or URL, or its storage.
        deadline_secs: twice this time without a heartbeat, and another owner's root is ours.
        spare: attempts whose unfinished directories stay, because they are gone on with.

    Raises:
        InvalidArgumentError: it is a step.
        RootInUseError: a manager, alive, owns it; names it.
        StorageError: the root cannot be written to.
    """
    storage = root if isinstance(root, Storage) else open_storage(root)
    refuse_step(storage)
    owner = Owner(storage.root if isinstance(storage, LocalStorage) else storage, deadline_secs=deadline_secs)
    try:
        while isinstance(answer := owner.acquire(), Wait):
            logger.warning("waiting %.1f s to see whether %s, the last owner of the root, is alive", *_told(answer))
            time.sleep(answer.secs)
        if isinstance(answer, Refused):
            raise answer.to_error(storage.location)
        done = Committer(storage).recover(spare=spare)
        yield OwnedRoot(storage=storage, owner=owner, done=tuple(done))
    finally:
        owner.release()


def _told(answer: Wait) -> tuple[float, str]:
    return answer.secs, str(answer.holder)


def begin_or_resume(committer: Committer, step: int, attempt: str) -> tuple[str, bool]:
    """Return the directory of an attempt, without records in it, and whether somebody had begun it.

    Raises:
        StepExistsError: something that is no step of ours has the step's name.
        StorageError: the root cannot be written to.
    """
    begun = committer.resume(step, attempt)
    if not begun:
        committer.begin(step, attempt)
    return committer.prefix_of(step, attempt), begun


def check_absent(committer: Committer, step: int) -> None:
    """Refuse to add a step to a root that has one of its number.

    Raises:
        StepExistsError: it is there.
    """
    for known in committer.list_steps():
        if known.record.step == step:
            raise StepExistsError(
                f"step {step} is there already, committed by attempt {known.record.attempt}",
                step=step,
                path=known.prefix,
                outcome="not_committed",
                hint="Choose another root, or remove that step first: `safepoint rm`.",
            )
