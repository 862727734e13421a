"""What one open manager holds: its options, coordinator, storage and what it has saved and restored so far.

Opening is collective: the processes agree on the options, prove that they see one root, and share a run id.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from safepoint.formats.storage import LocalStorage, Storage, open_storage
from safepoint.formats.storage.opening import is_url
from safepoint.manager.admission import Lineage
from safepoint.manager.agreement import require_same
from safepoint.manager.commit import Committer
from safepoint.manager.coordination import Coordinator, run_together
from safepoint.manager.errors import CheckpointError, DisagreementError, Outcome, StorageError
from safepoint.manager.history import History
from safepoint.manager.linking import LinkMemory
from safepoint.manager.owner import Owner
from safepoint.manager.remembering import SaveMemos
from safepoint.manager.step_paths import refuse_step
from safepoint.manager.telling import Telling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.formats.manifest import Manifest
    from safepoint.manager.options import ManagerOptions
    from safepoint.manager.policies import StepInfo

__all__ = ["Session", "open_session"]

logger = logging.getLogger("safepoint")


@dataclass(kw_only=True)
class Session:
    """One open manager on one process. Only the facade and the two operations change it."""

    options: ManagerOptions
    coordinator: Coordinator
    storage: Storage
    committer: Committer
    owner: Owner
    run: str
    telling: Telling
    restored: StepInfo | None = None
    """The step that this run was last restored from."""
    committed: set[str] = field(default_factory=set)
    """Attempts that this run committed since it was last restored."""
    memos: SaveMemos = field(default_factory=SaveMemos)
    links: LinkMemory | None = None
    """With `unchanged="link"`: what the next save may link from."""
    parent: str | None = None
    """The attempt last restored or committed."""
    num_restores: int = 0
    """How many times a step was read; the same on all processes."""

    @property
    def owns_root(self) -> bool:
        """Whether this process writes commit records: the primary, or everyone with roots of their own."""
        return self.coordinator.is_primary or self.options.root_scope == "per_process"

    @property
    def lineage(self) -> Lineage:
        """What decides whether a committed step is this run's own."""
        return Lineage(restored=self.restored, committed=frozenset(self.committed))

    def remember_commit(self, attempt: str) -> None:
        """Note a step that this run committed."""
        self.committed.add(attempt)
        self.parent = attempt
        if self.links is not None:
            self.links.adopt(attempt)

    def remember_restore(self, restored: StepInfo, manifest: Manifest) -> None:
        """Note the step that this run goes on from: what it committed before is another branch now."""
        self.committed.clear()
        self.restored = restored
        self.parent = restored.attempt
        if self.links is not None:
            self.links.restart(manifest, self.options.format)

    def close(self) -> None:
        """Stop what runs behind, and let go of the root. Idempotent."""
        if self.links is not None:
            self.links.close()
        self.telling.close(timeout_secs=min(10.0, self.options.deadline_secs))
        self.owner.release()

    def settle(self, step: int, attempt: str, *, otherwise: Outcome) -> Outcome:
        """Take back an attempt whose save failed here; return what became of the step.

        The first change wins: either this one, and then nobody can publish the attempt any more, or the primary's.

        Args:
            step: of the save.
            attempt: of the save.
            otherwise: what to conclude when this process finds the attempt under none of its names.
        """
        try:
            if self.committer.abandon(step, attempt):
                return "not_committed"
            if any(item.record.attempt == attempt for item in self.committer.list_steps()):
                return "committed"
        except CheckpointError as error:
            logger.warning("cannot tell what became of step %d: %s", step, error)
            return "unknown"
        return otherwise


def open_session(options: ManagerOptions, coordinator: Coordinator) -> Session:
    """Agree with the other processes and return the session.

    Called by: all processes.

    Raises:
        StorageError: the root is a file, or cannot be created.
        DisagreementError: the options differ, or some processes do not see the primary's root.
        RendezvousTimeoutError: a process did not open its manager.
    """
    storage = _open_root(options)
    shared = options.root_scope == "shared"

    def prepare() -> bytes:
        if coordinator.is_primary or not shared:
            _prepare_root(options, storage)
        choices = {
            "root": options.root if shared else "(one a process)",
            "mode": options.mode,
            "format": options.format,
            "save_every": options.save_every,
            "keep": repr(options.keep),
            "root_scope": options.root_scope,
            "check_replicas": options.check_replicas,
            "unchanged": options.unchanged,
            "commit": options.commit,
        }
        return json.dumps(choices).encode()

    def agree(payloads: Sequence[bytes]) -> bytes:
        brought = [json.loads(payload) for payload in payloads]
        for name in brought[0]:
            require_same(name, [choices[name] for choices in brought], doing="CheckpointManager(...)")
        run = secrets.token_hex(8)
        nonce = _leave_nonce(storage, run) if shared and len(payloads) > 1 else ""
        return json.dumps({"run": run, "nonce": nonce}).encode()

    answer = json.loads(run_together(coordinator, "open", options.deadline_secs, prepare, agree))
    nonce = answer["nonce"]
    if nonce:
        _prove_one_root(options, coordinator, storage, nonce)
    committer = Committer(
        storage,
        scope=options.root_scope,
        process_index=coordinator.process_index,
        process_count=coordinator.process_count if shared else 1,
        commit=None if options.commit == "auto" else options.commit,
    )
    owner = Owner(storage if is_url(options.root) else options.root, deadline_secs=options.deadline_secs)
    may_own = coordinator.is_primary or not shared
    history = History.of_root(options.root, run=answer["run"], options=options.storage) if may_own else None
    return Session(
        options=options,
        coordinator=coordinator,
        storage=storage,
        committer=committer,
        owner=owner,
        run=answer["run"],
        telling=Telling(coordinator, observers=options.observers, progress=options.progress, history=history),
        links=LinkMemory(storage, committer) if options.unchanged == "link" else None,
    )


def _open_root(options: ManagerOptions) -> Storage:
    return open_storage(options.root, options.storage) if is_url(options.root) else LocalStorage(options.root)


def _prepare_root(options: ManagerOptions, storage: Storage) -> None:
    root = options.root
    if is_url(root):
        storage.make_dir("")
        refuse_step(storage)
        return
    try:
        mode = os.stat(root).st_mode
    except FileNotFoundError:
        storage.make_dir("")
        return
    except OSError as error:
        raise StorageError(f"cannot open the root: {error.strerror}", path=root, errno=error.errno) from error
    if not stat.S_ISDIR(mode):
        raise StorageError("the root is not a directory", path=root, hint="Give the path of a directory, or a new one.")
    refuse_step(storage)


def _leave_nonce(storage: Storage, run: str) -> str:
    """Return the name of a file that all must see, or "" where the root cannot be written to."""
    name = f".safepoint/nonce-{run}"
    try:
        storage.make_dir(".safepoint")
        storage.put(name, run.encode())
    except StorageError as error:
        logger.warning("cannot prove that all processes see the same root, since it cannot be written to: %s", error)
        return ""
    return name


def _prove_one_root(options: ManagerOptions, coordinator: Coordinator, storage: Storage, nonce: str) -> None:
    def look() -> bytes:
        return b"seen" if storage.size(nonce) is not None else b""

    def compare(payloads: Sequence[bytes]) -> bytes:
        blind = tuple(process for process, seen in enumerate(payloads) if not seen)
        try:
            storage.delete(nonce)
        except CheckpointError as error:
            logger.warning("cannot remove %s: %s", nonce, error)
        if blind:
            names = ", ".join(map(str, blind))
            raise DisagreementError(
                f"the processes do not share this root: process(es) {names} do not see what process 0 wrote there",
                path=options.root,
                brought=(("another root", blind),),
                hint='Use a path on a shared file system, or root_scope="per_process" for node-local disks.',
            )
        return b""

    run_together(coordinator, "open-proof", options.deadline_secs, look, compare)
