"""The first meeting of a save: the graph is cut, all want the same, the root is ours, and the step is to be written.

Nothing of the state is looked at here. Decided by the primary; `directing` goes on from here.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from safepoint.manager.agreement import require_same
from safepoint.manager.coordination import run_together
from safepoint.manager.errors import StepExistsError
from safepoint.manager.owner import Refused, Wait
from safepoint.manager.policies import OnExists, StepInfo, decide_existing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from safepoint.manager.commit import CommittedStep, Committer
    from safepoint.manager.options import ManagerOptions
    from safepoint.manager.retention import RetentionWorker
    from safepoint.manager.session import Session

__all__ = ["Admission", "Lineage", "SaveRequest", "admit", "admit_save"]

logger = logging.getLogger("safepoint")


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """What one process brings to the beginning of a save."""

    step: int
    root: str
    mode: str
    format: str
    on_exists: OnExists
    blocking: bool
    wait_secs: float
    next_sequence: int
    existing: str
    """The attempt that committed this step here; "" if none did, or if this process writes no records."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True, kw_only=True)
class Admission:
    """The primary's answer: write the step under this sequence; or do not, and why; or ask again after a while."""

    sequence: int = 0
    skip_reason: str | None = None
    wait_secs: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """What decides whether a committed step is this run's own, or one of an abandoned branch."""

    restored: StepInfo | None
    committed: frozenset[str]
    """Attempts that this run committed since it was last restored."""

    def action(self, on_exists: OnExists, existing: CommittedStep) -> Literal["skip", "replace", "error"]:
        """Return what a save does about this step."""
        ours = existing.record.attempt in self.committed
        return decide_existing(
            on_exists, existing.info, run=existing.record.run if ours else "", restored=self.restored
        )


def admit_save(
    session: Session,
    check: Callable[[], int],
    *,
    on_exists: OnExists,
    blocking: bool,
    retention: RetentionWorker,
) -> Admission:
    """Cut the graph, agree on the step, own the root.

    Called by: all processes.

    Args:
        session: the open manager.
        check: returns the checked step, or raises what the others must hear of.
        on_exists: what to do about a committed step.
        blocking: whether the caller waits for the commit.
        retention: deletes what an earlier owner left hidden.

    Raises:
        CheckpointError: see `CheckpointManager.save`.
    """
    options = session.options

    def prepare() -> bytes:
        session.coordinator.sync_devices()
        step = check()
        wait_secs = _own_root(session, retention)
        existing = find_step(session.committer, step) if session.owns_root else None
        request = SaveRequest(
            step=step,
            root=options.root,
            mode=options.mode,
            format=options.format,
            on_exists=on_exists,
            blocking=blocking,
            wait_secs=wait_secs,
            next_sequence=session.committer.next_sequence() if session.owns_root else 0,
            existing="" if existing is None else existing.record.attempt,
        )
        return json.dumps(request.to_json()).encode()

    def decide(payloads: Sequence[bytes]) -> bytes:
        requests = [SaveRequest(**json.loads(payload)) for payload in payloads]
        admission = admit(requests, options=options, committer=session.committer, lineage=session.lineage)
        return json.dumps(admission.__dict__).encode()

    while True:
        answer = run_together(session.coordinator, "save-begin", options.deadline_secs, prepare, decide)
        admission = Admission(**json.loads(answer))
        if admission.wait_secs <= 0:
            return admission
        logger.warning("waiting %.1f s to see whether the last owner of the root is alive", admission.wait_secs)
        time.sleep(admission.wait_secs)


def _own_root(session: Session, retention: RetentionWorker) -> float:
    """Return 0 when this process may write records here, or how long to wait for the last owner, in seconds."""
    if not session.owns_root:
        return 0.0
    answer = session.owner.acquire()
    if isinstance(answer, Wait):
        return answer.secs
    if isinstance(answer, Refused):
        raise answer.to_error(session.options.root)
    if answer.is_new:
        for line in session.committer.recover():
            logger.warning("%s", line)
        retention.delete_soon()
    return 0.0


def admit(
    requests: Sequence[SaveRequest], *, options: ManagerOptions, committer: Committer, lineage: Lineage
) -> Admission:
    """Decide on the primary what becomes of a save.

    Raises:
        DisagreementError: the processes want different things.
        StepExistsError: the step is committed already and is not to be replaced.
    """
    names = ["step", "mode", "format", "on_exists", "blocking"]
    if options.root_scope == "shared":
        names.insert(1, "root")
    for name in names:
        require_same(name, [getattr(request, name) for request in requests], doing="save")
    wait_secs = max(request.wait_secs for request in requests)
    if wait_secs > 0:
        return Admission(wait_secs=wait_secs)
    existing = find_step(committer, requests[0].step)
    # With private roots a step that is not the same everywhere is none: it is written again, in every root.
    everywhere = options.root_scope == "shared" or len({request.existing for request in requests}) == 1
    if existing is not None and everywhere:
        action = lineage.action(requests[0].on_exists, existing)
        if action == "skip":
            return Admission(skip_reason="the step is committed already")
        if action == "error":
            raise _step_exists(existing, lineage, options.root)
    return Admission(sequence=max(request.next_sequence for request in requests))


def find_step(committer: Committer, step: int) -> CommittedStep | None:
    """Return the committed step of this number, if there is one."""
    return next(iter(committer.listing_of(step).steps), None)


def _step_exists(existing: CommittedStep, lineage: Lineage, root: str) -> StepExistsError:
    record = existing.record
    if record.attempt in lineage.committed:
        who, hint = (
            "this run",
            'Save with on_exists="auto" or "skip" to leave it as it is, "replace" to write it again.',
        )
    else:
        who = f"another run ({record.run})"
        hint = 'Restore from it first, save with on_exists="replace" or "skip", or use another root for another run.'
    return StepExistsError(
        f"step {record.step} was committed by {who} on {record.created}",
        step=record.step,
        path=f"{root}/{existing.prefix}",
        outcome="not_committed",
        hint=hint,
    )
