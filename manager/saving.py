"""One save, step by step: sync, agree, plan, stage, write, agree, commit, retain, meet (docs/architecture.md).

Owns the order of things and what becomes of an attempt when one of them fails. Who writes what is decided in
`directing`, how a step becomes visible in `commit`.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from safepoint.manager.admission import admit_save, find_step
from safepoint.manager.collecting import paused_collection
from safepoint.manager.concluding import conclude
from safepoint.manager.coordination import Coordinator, Transport, run_together
from safepoint.manager.errors import (
    CheckpointError,
    DisagreementError,
    Outcome,
    PeerFailedError,
    RendezvousTimeoutError,
    StorageError,
)
from safepoint.manager.file_bytes import has_room, stage_files
from safepoint.manager.manifesting import assemble_manifest, check_written, commit_record
from safepoint.manager.part_writing import write_part
from safepoint.manager.planning import lay_out_files, plan_together
from safepoint.manager.policy_text import policy_text
from safepoint.manager.replicas import compare_replicas
from safepoint.manager.results import SaveResult
from safepoint.manager.sources import GatherSource, LiveSource, Source, send_parts
from safepoint.manager.writing import PlannedFile, WriteReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from safepoint.formats.manifest import Manifest, TreePath
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.commit import CommittedStep
    from safepoint.manager.directing import Direction, SaveDecision
    from safepoint.manager.policies import OnExists
    from safepoint.manager.retention import RetentionWorker
    from safepoint.manager.session import Session
    from safepoint.manager.staging import HostSlab
    from safepoint.manager.state import FlatState

__all__ = ["SaveOperation"]

logger = logging.getLogger("safepoint")

_T = TypeVar("_T")


@dataclass(kw_only=True)
class SaveOperation:
    """One due save of one process.

    `begin` and `stage` run on the caller's thread; `complete` runs there too, or behind the training loop.
    """

    session: Session
    on_exists: OnExists
    blocking: bool
    """Also where there is no memory for a copy of what is saved; known from `stage` on."""
    slab: HostSlab
    retention: RetentionWorker
    check: Callable[[], tuple[int, dict[str, float]]]
    """Returns the checked step and metrics, or raises what the others must hear of (a failed earlier save, say)."""
    step: int = field(init=False)
    metrics: dict[str, float] = field(init=False)
    direction: Direction = field(init=False)
    flat: FlatState = field(init=False)
    timings: dict[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    """Data bytes that this process writes; known from `stage` on; with links, at most so many until then."""
    removed: list[int] = field(default_factory=list)
    """Steps that retention let go after the commit."""
    _began: float = 0.0
    _attempt: str | None = None
    """Known before anything of it is made, so that whatever ends the save can take it back."""
    _files: list[PlannedFile] = field(default_factory=list)
    _source: Source | Sequence[memoryview] | None = None
    _transport: Transport | None = None
    _stage_error: Exception | None = None
    _report: WriteReport | None = None
    _manifest: Manifest | None = None
    _sequence: int = 0
    _agreed: bool = False
    _published: bool = False
    _decision: SaveDecision | None = None
    _replaced: CommittedStep | None = None

    # -- 1 sync, 2 plan ----------------------------------------------------------------------------------------------

    def begin(self, state: Mapping[str, Any]) -> str | None:
        """Cut the graph, agree on what is to be saved, and learn this process's part of it.

        Called by: all processes.

        Returns:
            Why nothing is to be saved; None when the step is to be written.
        """
        self._began = time.monotonic()
        try:
            admission = admit_save(
                self.session,
                self._checked_step,
                on_exists=self.on_exists,
                blocking=self.blocking,
                retention=self.retention,
            )
            if admission.skip_reason is None:
                self._sequence = admission.sequence
                self._plan(state)
                self._compare_replicas()
        except BaseException as error:
            if self._attempt is not None:
                self.session.settle(self.step, self._attempt, otherwise="not_committed")
            if isinstance(error, CheckpointError):
                error.outcome = "not_committed"
                if not isinstance(error, DisagreementError):  # which may be about the step itself
                    error.with_context(step=getattr(self, "step", None))
            raise
        self.timings["begin_secs"] = time.monotonic() - self._began
        return admission.skip_reason

    def _checked_step(self) -> int:
        self.step, self.metrics = self.check()
        return self.step

    def _plan(self, state: Mapping[str, Any]) -> None:
        session = self.session

        def begin(attempt: str) -> None:
            self._attempt = attempt
            if session.options.root_scope == "shared":
                session.committer.begin(self.step, attempt)

        planned = plan_together(session, state, begin)
        self.flat, self.direction, self._decision = planned.flat, planned.direction, planned.decision
        self._attempt = planned.direction.attempt

    def _compare_replicas(self) -> None:
        options = self.session.options
        if options.check_replicas == "trust" or self.session.coordinator.process_count == 1:
            return
        compare_replicas(
            self.session.coordinator, self.flat.arrays, self.direction.compares, deadline_secs=options.deadline_secs
        )

    # -- 3 stage -----------------------------------------------------------------------------------------------------

    def stage(self) -> None:
        """Lay out this process's files and, for an async save, copy what it will write.

        Called by: all processes. A failure is kept for `complete`, which brings it to the others.
        """
        started = time.monotonic()
        try:
            self._stage()
        except Exception as error:  # noqa: BLE001 - raised again by `complete`, on every process
            self._stage_error = error
            self._close_transport()
        except BaseException as error:  # an interrupt ends the save here
            self._close_transport()
            self._fail(error)
            raise
        self.timings["stage_secs"] = time.monotonic() - started

    def _stage(self) -> None:
        session = self.session
        coordinator = session.coordinator
        options = session.options
        direction = self.direction
        if options.root_scope == "per_process":
            session.committer.begin(self.step, direction.attempt)
        self._files = lay_out_files(session, direction, self._decision, self._specs(), self.metrics)
        self.num_bytes = sum(piece.num_bytes for file in self._files for piece in file.pieces)
        if direction.gathers:
            self._transport = coordinator.open_transport(deadline_secs=options.deadline_secs)
            self._source = GatherSource(
                self.flat.arrays,
                self._transport,
                process_index=coordinator.process_index,
                deadline_secs=options.deadline_secs,
            )
        else:
            self._source = LiveSource(self.flat.arrays)
        self.blocking = self.blocking or not has_room(self.slab, self._files, step=self.step)
        if not self.blocking:
            self._send()
            self._source = stage_files(self._files, self._source, self.slab, self._advance)
            for leaf in self.flat.arrays.values():
                leaf.release()

    def _specs(self) -> Mapping[TreePath, ArraySpec]:
        if self._decision is not None and self.session.options.root_scope == "shared":
            return self._decision.specs
        return {path: leaf.spec for path, leaf in self.flat.arrays.items()}

    def _send(self) -> None:
        if self._transport is not None:
            send_parts(
                self.direction.sends,
                self.flat.arrays,
                self._transport,
                deadline_secs=self.session.options.deadline_secs,
            )

    def _close_transport(self) -> None:
        """Hang up after a failure here, so that whoever waits for a transfer learns at once that none will come."""
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    # -- 4 write, 5 agree, 6 commit, 7 retain, 8 meet ----------------------------------------------------------------

    def complete(self, coordinator: Coordinator) -> None:
        """Write, agree, commit, retain, and meet once more.

        Called by: all processes; on the caller's thread, or on the one behind an async save.

        Raises:
            CheckpointError: the save failed here or elsewhere; `outcome` says what became of the step.
        """
        try:
            self._write(coordinator)
            self._agreed = True
            self._commit(coordinator)
        except BaseException as error:
            self._fail(error)
            raise
        self.session.remember_commit(self.direction.attempt)

    def _write(self, coordinator: Coordinator) -> None:
        session = self.session
        started = time.monotonic()

        def work() -> bytes:
            if self._stage_error is not None:
                raise self._stage_error
            try:
                if self.blocking:
                    self._send()
                source = self._source
                assert source is not None, "complete() before stage()"
                report = write_part(
                    session, self.direction, self.step, self._files, source, self._specs(), self._advance
                )
            except BaseException as error:
                self._close_transport()
                if isinstance(error, StorageError):
                    raise session.committer.lost_or(error, self.step, self._prefix) from error
                raise
            self._report = report
            if session.links is not None:
                self.num_bytes = report.data_bytes(written_by=self.direction.attempt)
            self.timings["write_secs"] = time.monotonic() - started
            return b"" if coordinator.is_primary else json.dumps(report.to_json()).encode()

        @paused_collection()
        def decide(payloads: Sequence[bytes]) -> bytes:
            # The manifest is made here, so that a gap in it is everybody's error, before anything is published.
            reports = [_required(self._report, "a commit without a report")]
            reports += [WriteReport.from_json(json.loads(payload)) for payload in payloads[1:]]
            if session.options.root_scope == "shared":
                decision = _required(self._decision, "a decision on another process than the primary")
                reports = conclude(session, reports, self.direction, decision, self.metrics, step=self.step)
                self._manifest = assemble_manifest(
                    reports,
                    self._specs(),
                    decision.structure,
                    direction=self.direction,
                    step=self.step,
                    file_format=session.options.format,
                    memo=session.memos.leaves,
                )
                check_written(session.storage, self._prefix, self._manifest.files)
            return b""

        run_together(coordinator, "save-written", session.options.deadline_secs, work, decide)

    def _commit(self, coordinator: Coordinator) -> None:
        session = self.session

        def work() -> bytes:
            if session.owns_root:
                self._publish()
            return b""

        run_together(coordinator, "save-committed", session.options.deadline_secs, work, None)
        if session.options.root_scope == "per_process":
            self._retain()  # not before all have committed: until then an older step is the newest that all have

    def _publish(self) -> None:
        """Make the step visible, and let go of old ones."""
        session = self.session
        options = session.options
        manifest = self._manifest
        if manifest is None:  # a root of this process's own holds what this process wrote
            manifest = assemble_manifest(
                [_required(self._report, "a commit without a report")],
                self._specs(),
                self.flat.nodes,
                direction=self.direction,
                step=self.step,
                file_format=options.format,
                memo=session.memos.leaves,
                process_count=session.coordinator.process_count,
            )
            check_written(session.storage, self._prefix, manifest.files)
        session.owner.verify()
        num_bytes, digest = session.committer.write_manifest(self.step, self.direction.attempt, manifest)
        self.timings["elapsed_secs"] = time.monotonic() - self._began
        record = commit_record(
            manifest,
            manifest_bytes=num_bytes,
            manifest_digest=digest,
            session=session,
            sequence=self._sequence,
            metrics=self.metrics,
            timings=self.timings,
            extra={"blocking": self.blocking, "keep": policy_text(options.keep)},
        )
        self._replaced = session.committer.publish_beside(record, find_step(session.committer, self.step))
        self._published = True
        if options.root_scope == "shared":
            self._retain()

    def _retain(self) -> None:
        """Let go of what the step replaced, and of what no policy keeps.

        The step that this run was restored from may go now: it stayed until this, the first commit after it.
        """
        if self._replaced is not None:
            self.session.committer.drop_replaced(self._replaced)
        self.removed = self.retention.apply(protected={self.direction.attempt})

    def _advance(self, num_bytes: int) -> None:
        """Learn that so many more bytes are staged, or written; see `observed`."""

    # -- what became of it -------------------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> None:
        """Leave nothing behind, and say in the error what became of the step."""
        if self._published and self._takes_back(error):
            outcome: Outcome = "not_committed"
        elif self._published:
            outcome = "committed"
        else:
            # Until all had agreed nobody could publish; after that, or when the primary's word did not come, a step
            # that this process does not see may still be one (a network file system shows a rename late).
            in_doubt = self._agreed or isinstance(error, RendezvousTimeoutError)
            otherwise: Outcome = "unknown" if in_doubt and not self.session.coordinator.is_primary else "not_committed"
            outcome = self.session.settle(self.step, self.direction.attempt, otherwise=otherwise)
        if outcome == "committed":
            self.session.remember_commit(self.direction.attempt)
        elif outcome == "unknown":
            self.session.committed.add(self.direction.attempt)  # if it is found to be one, it is this run's own
        if isinstance(error, CheckpointError):
            error.outcome = outcome
            error.with_context(step=self.step)

    def _takes_back(self, error: BaseException) -> bool:
        """Hide a step that is committed in this process's own root and, as is known, not in another one's."""
        session = self.session
        if session.options.root_scope == "shared" or not isinstance(error, PeerFailedError):
            return False
        committed = find_step(session.committer, self.step)
        return committed is not None and session.committer.hide(committed)

    @property
    def _prefix(self) -> str:
        return self.session.committer.prefix_of(self.step, self.direction.attempt)

    def result(self, *, blocked_secs: float) -> SaveResult:
        """Return what this process did."""
        return SaveResult(
            step=self.step,
            saved=True,
            mode=self.direction.mode,
            mode_reason=self.direction.mode_reason,
            num_bytes=self.num_bytes,
            full_reason="" if self.session.links is None or not self.blocking else self.session.links.reason,
            blocked_secs=blocked_secs,
            path=f"{self.session.options.root}/{self.step}",
        )


def _required(value: _T | None, why: str) -> _T:
    if value is None:
        raise RuntimeError(why)
    return value
