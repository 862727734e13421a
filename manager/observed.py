"""A save and a restore that tell what happens to them: the same operations, with events and measured work around them.

Owns which event is told when. Changes nothing of what the operations do.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint.manager.events import (
    RestoreBegun,
    RestoreDone,
    RestoreFailed,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    SaveSkipped,
    SaveStaged,
    SaveWritten,
    StepPassedOver,
    StepsRemoved,
)
from safepoint.manager.fetching import num_fetched_bytes
from safepoint.manager.restoring import Latest, RestoreOperation
from safepoint.manager.saving import SaveOperation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from safepoint.manager.choosing import Candidate
    from safepoint.manager.coordination import Coordinator
    from safepoint.manager.errors import CheckpointError
    from safepoint.manager.metering import Work
    from safepoint.manager.restoring import Prepared
    from safepoint.manager.results import RestoreResult

__all__ = ["ObservedRestore", "ObservedSave"]


@dataclass(kw_only=True)
class ObservedSave(SaveOperation):
    """One due save of one process, told about."""

    _started: float = field(default_factory=time.monotonic)
    _blocked_secs: float | None = None
    _work: Work | None = None

    def begin(self, state: Mapping[str, Any]) -> str | None:
        """See `SaveOperation.begin`."""
        try:
            reason = super().begin(state)
        except BaseException as error:
            self._tell_failure(error)
            raise
        if reason is not None:
            self.session.telling.tell(SaveSkipped(step=self.step, reason=reason))
        else:
            self._tell_begun()
        return reason

    def _tell_begun(self) -> None:
        direction = self.direction
        self.session.telling.tell(
            SaveBegun(
                step=self.step,
                attempt=direction.attempt,
                mode=direction.mode,
                mode_reason=direction.mode_reason,
                blocking=self.blocking,
                secs=self.timings["begin_secs"],
            )
        )

    def stage(self) -> None:
        """See `SaveOperation.stage`."""
        try:
            with self.session.telling.work("stage", 0, step=self.step, is_attended=True) as self._work:
                super().stage()
        except BaseException as error:
            self._tell_failure(error)
            raise
        if not self.blocking:
            self._blocked_secs = time.monotonic() - self._started
            if self._stage_error is None:
                told = SaveStaged(step=self.step, num_bytes=self.num_bytes, secs=self.timings["stage_secs"])
                self.session.telling.tell(told)

    def complete(self, coordinator: Coordinator) -> None:
        """See `SaveOperation.complete`."""
        try:
            super().complete(coordinator)
        except BaseException as error:
            self._tell_failure(error)
            raise
        secs = time.monotonic() - self._started
        self.session.telling.tell(
            SaveCommitted(
                step=self.step,
                attempt=self.direction.attempt,
                blocking=self.blocking,
                num_bytes=self.num_bytes,
                secs=secs,
                blocked_secs=secs if self._blocked_secs is None else self._blocked_secs,
                begin_secs=self.timings["begin_secs"],
                stage_secs=self.timings["stage_secs"],
                write_secs=self.timings["write_secs"],
                metrics=tuple(self.metrics.items()),
            )
        )
        if self.removed:
            self.session.telling.tell(StepsRemoved(steps=tuple(self.removed)))

    def _write(self, coordinator: Coordinator) -> None:
        telling = self.session.telling
        shared = f"save-{self.direction.attempt}"
        with telling.work(
            "save", self.num_bytes, step=self.step, shared=shared, is_attended=self.blocking
        ) as self._work:
            super()._write(coordinator)
        told = SaveWritten(step=self.step, num_bytes=self.num_bytes, secs=self.timings["write_secs"])
        telling.tell(told)

    def _advance(self, num_bytes: int) -> None:
        if self._work is not None:
            self._work.total_bytes = self.num_bytes  # of a stage it is not known at its beginning
            self._work.advance(num_bytes)

    def _tell_failure(self, error: BaseException) -> None:
        self.session.telling.tell(
            SaveFailed(
                step=getattr(self, "step", None),
                error=type(error).__name__,
                message=str(error),
                outcome=getattr(error, "outcome", None),
            )
        )


@dataclass(kw_only=True)
class ObservedRestore(RestoreOperation):
    """One restore of one process, told about."""

    _started: float = field(default_factory=time.monotonic)
    _work: Work | None = None
    _reading: ExitStack = field(default_factory=ExitStack)

    def run(self) -> RestoreResult | None:
        """See `RestoreOperation.run`."""
        telling = self.session.telling
        try:
            result = super().run()
        except BaseException as error:
            step = None if isinstance(self.step, Latest) else self.step
            telling.tell(RestoreFailed(step=step, error=type(error).__name__, message=str(error)))
            raise
        if result is not None and self.session.restored is not None:
            telling.tell(
                RestoreDone(
                    step=result.step,
                    attempt=self.session.restored.attempt,
                    num_bytes=result.num_bytes,
                    secs=time.monotonic() - self._started,
                    passed_over=len(result.skipped),
                )
            )
        return result

    def _pass_over(self, chosen: Candidate, problem: CheckpointError) -> None:
        super()._pass_over(chosen, problem)
        self.session.telling.tell(StepPassedOver(step=chosen.step, problem=str(problem)))

    def _together(self, name: str, work: Callable[[], bytes]) -> CheckpointError | None:
        with self._reading:
            return super()._together(name, work)

    def _read(self, prepared: Prepared) -> bytes:
        chosen = prepared.candidate
        total = num_fetched_bytes(prepared.fetches)
        telling = self.session.telling
        telling.tell(RestoreBegun(step=chosen.step, num_bytes=total))
        # All processes restore the same attempts in the same order, so this names one restore.
        shared = f"restore-{chosen.attempt}-{self.session.num_restores}"
        self.session.num_restores += 1
        # Until the others have read, too: only then does the meeting end, and with it the work.
        self._work = self._reading.enter_context(
            telling.work("restore", total, step=chosen.step, shared=shared, is_attended=True)
        )
        return super()._read(prepared)

    def _advance(self, num_bytes: int) -> None:
        if self._work is not None:
            self._work.advance(num_bytes)
