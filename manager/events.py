"""What happens to checkpoints, told to whoever wants to know: one small frozen value for each thing that happened.

    manager = CheckpointManager("runs/gpt", observers=[print])

An observer is any function of one event. It runs on a thread of its own, so that it cannot hold up or harm a save
(`event_stream` has the rules); `str(event)` is one line for a log. Knows nothing of how saves are made.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = [
    "Event",
    "Observer",
    "Preempted",
    "RestoreBegun",
    "RestoreDone",
    "RestoreFailed",
    "SaveBegun",
    "SaveCommitted",
    "SaveFailed",
    "SaveSkipped",
    "SaveStaged",
    "SaveWritten",
    "StepPassedOver",
    "StepsRemoved",
    "WorkProgress",
    "sized",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened on this process.

    Attributes:
        time: when, in seconds since 1970 by this machine's clock; for people, nothing is ordered by it.
        process_index: of this process; set when the event is told.
        process_count: how many processes there are; set when the event is told.
    """

    time: float = field(default_factory=time.time)
    process_index: int = 0
    process_count: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveBegun(Event):
    """All processes have agreed to save a step, and on who writes what.

    Attributes:
        step: the step.
        attempt: id of this try.
        mode: "consolidated" or "sharded".
        mode_reason: why.
        blocking: whether the caller waits for the commit.
        secs: what cutting the graph, meeting and planning took.
    """

    step: int
    attempt: str
    mode: str
    mode_reason: str
    blocking: bool
    secs: float

    def __str__(self) -> str:
        return f"saving step {self.step}, {self.mode}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStaged(Event):
    """This process has copied what it will write: the caller goes on. Of saves with `blocking=False` only.

    Attributes:
        step: the step.
        num_bytes: what this process will write.
        secs: what the copy took.
    """

    step: int
    num_bytes: int
    secs: float

    def __str__(self) -> str:
        return f"staged step {self.step}: {sized(self.num_bytes)} in {self.secs:.2f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveWritten(Event):
    """All processes have written and synced their files.

    Attributes:
        step: the step.
        num_bytes: what this process wrote.
        secs: what its writing took, without the wait for others.
    """

    step: int
    num_bytes: int
    secs: float

    def __str__(self) -> str:
        return f"wrote step {self.step}: {sized(self.num_bytes)} in {self.secs:.2f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCommitted(Event):
    """The step is committed, and all processes know.

    Attributes:
        step: the step.
        attempt: id of the try that made it.
        blocking: whether the caller waited for this.
        num_bytes: what this process wrote.
        secs: from the call of `save` until now.
        blocked_secs: for how long of that the caller was held up.
        begin_secs: of `secs`, what cutting the graph, meeting and planning took.
        stage_secs: laying out files and, with `blocking=False`, copying.
        write_secs: what this process's writing took.
        metrics: as given to the save.
    """

    step: int
    attempt: str
    blocking: bool
    num_bytes: int
    secs: float
    blocked_secs: float
    begin_secs: float
    stage_secs: float
    write_secs: float
    metrics: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        held = "" if self.blocking else f", of which {self.blocked_secs:.2f} s held up the caller"
        return f"step {self.step} is committed: {sized(self.num_bytes)} in {self.secs:.2f} s{held}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSkipped(Event):
    """A due step was not saved, on purpose.

    Attributes:
        step: the step.
        reason: why.
    """

    step: int
    reason: str

    def __str__(self) -> str:
        return f"step {self.step} was not saved: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed(Event):
    """A save failed. The error itself is raised from `save`, or from the next `save`, `wait` or `close`.

    Attributes:
        step: the step, if it was known.
        error: name of the error's type.
        message: its text.
        outcome: what became of the step: "not_committed", "committed" or "unknown"; None where nothing was tried.
    """

    step: int | None
    error: str
    message: str
    outcome: str | None

    def __str__(self) -> str:
        return f"the save of step {self.step} failed: {self.error}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsRemoved(Event):
    """Retention let steps go; on the process that owns the root.

    Attributes:
        steps: their numbers.
    """

    steps: tuple[int, ...]

    def __str__(self) -> str:
        return f"no policy keeps step(s) {', '.join(map(str, self.steps))} any more"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreBegun(Event):
    """The processes have chosen the step to restore, and each has found that it fits.

    Attributes:
        step: the step.
        num_bytes: about what this process is going to get, read by itself or by another process of its host.
    """

    step: int
    num_bytes: int

    def __str__(self) -> str:
        return f"restoring step {self.step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreDone(Event):
    """A step is restored, on all processes.

    Attributes:
        step: the step.
        attempt: id of the try that made it.
        num_bytes: what this process read from the storage itself.
        secs: from the call until now.
        passed_over: how many newer steps were not sound.
    """

    step: int
    attempt: str
    num_bytes: int
    secs: float
    passed_over: int = 0

    def __str__(self) -> str:
        return f"step {self.step} is restored: {sized(self.num_bytes)} in {self.secs:.2f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPassedOver(Event):
    """`restore_latest` found a step that is not sound, and falls back to an older one.

    Attributes:
        step: the step.
        problem: what is wrong with it.
    """

    step: int
    problem: str

    def __str__(self) -> str:
        return f"step {self.step} is not sound: {self.problem}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreFailed(Event):
    """A restore failed; the error itself is raised from the call.

    Attributes:
        step: the step asked for; None for the latest.
        error: name of the error's type.
        message: its text.
    """

    step: int | None
    error: str
    message: str

    def __str__(self) -> str:
        return f"the restore failed: {self.error}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preempted(Event):
    """The processes have agreed to stop: `should_stop` has said so to this one.

    Attributes:
        step: the last step.
        reason: why, such as "SIGTERM on process 1".
    """

    step: int
    reason: str

    def __str__(self) -> str:
        return f"stopping after step {self.step}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkProgress(Event):
    """How far work is that takes longer than a second; told about once a second.

    Attributes:
        what: the work: "save", "stage", "restore" or "verify".
        step: the step, if it is about one.
        done_bytes: so many are done.
        total_bytes: of about so many.
        secs: since the work began.
        rate: bytes per second, of late.
        is_sum: whether the bytes are those of all processes that are at it, and not of this one alone.
    """

    what: str
    step: int | None
    done_bytes: int
    total_bytes: int
    secs: float
    rate: float
    is_sum: bool = False

    @property
    def left_secs(self) -> float | None:
        """About how much longer it takes, in seconds; None where nothing moves."""
        return (self.total_bytes - self.done_bytes) / self.rate if self.rate > 0 else None

    def __str__(self) -> str:
        doing = _DOING.get(self.what, self.what)
        about = doing if self.step is None else f"{doing} step {self.step}"
        left = "" if self.left_secs is None else f", {_clock(self.left_secs)} left"
        done, total = sized(self.done_bytes), sized(self.total_bytes)
        return f"{about}: {done} of {total}, {sized(int(self.rate))}/s{left}"


_DOING = {"save": "saving", "stage": "staging", "restore": "restoring", "verify": "verifying"}

Observer = Callable[[Event], object]
"""Told of events, one at a time; what it returns is not looked at."""


def sized(num_bytes: int) -> str:
    """Return a number of bytes for people, in powers of 1000: `1.5 GB`."""
    value = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":  # noqa: PLR2004 - what rounds to fewer than four digits
            break
        value /= 1000
    if unit == "bytes":
        return "1 byte" if num_bytes == 1 else f"{num_bytes} bytes"
    return f"{value:.3g} {unit}"


def _clock(secs: float) -> str:
    minutes, rest = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}" if minutes else f"{rest} s"
