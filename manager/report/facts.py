"""What is known of a root: from commit records, the newest manifests, pins, and the history that its owner kept.

Reads only, and no payload. Every number and text may come from anybody: `trusting` lets through what is one.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint.manager.errors import CheckpointError, StepNotFoundError
from safepoint.manager.history import read_history
from safepoint.manager.progress import QUIET
from safepoint.manager.report.leaves import StepFacts, item_bytes, step_facts
from safepoint.manager.report.trusting import as_number, as_secs, as_text, as_time, as_whole
from safepoint.manager.root_overview import overview
from safepoint.manager.step_reading import StepReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.storage import Storage
    from safepoint.manager.policies import Policy
    from safepoint.manager.progress import Progress
    from safepoint.manager.root_overview import Overview, RootEntry

__all__ = ["FaultFacts", "RestoreFacts", "RootFacts", "RunFacts", "SaveFacts", "collect"]

MAX_MANIFESTS = 200
"""Of so many of the newest steps the sizes by item are shown: a manifest may be large."""

_FAULTS = {
    "SaveFailed": "save failed",
    "RestoreFailed": "restore failed",
    "StepPassedOver": "passed over by a restore",
    "Preempted": "stopped early",
}


@dataclass(kw_only=True)
class SaveFacts:
    """One commit.

    Attributes:
        step: the step.
        attempt: id of the try.
        run: id of the run.
        time: of the commit, in seconds since 1970; None where that is not known.
        is_there: whether it is still in the root.
        num_bytes: of its data; None where that is not known any more.
        own_bytes: of these, what no step before it has, too.
        mode: who wrote, such as "sharded ×4"; "" where that is not known any more.
        format: of the files.
        metrics: for people.
        kept: why it stays.
        left_by: the lower step that a run went back to and committed later, if there is one.
        is_blocking: whether the caller waited for the commit; None where that is not known.
        begin_secs: cutting the graph, meeting, planning.
        stage_secs: laying out and copying.
        write_secs: writing, on the primary.
        commit_secs: waiting for the others, and committing.
        items: bytes by top-level key; None where the manifest was not read.
    """

    step: int
    attempt: str
    run: str
    time: float | None = None
    is_there: bool = True
    num_bytes: int | None = None
    own_bytes: int = 0
    mode: str = ""
    format: str = ""
    metrics: str = ""
    kept: tuple[str, ...] = ()
    left_by: int | None = None
    is_blocking: bool | None = None
    begin_secs: float = 0.0
    stage_secs: float = 0.0
    write_secs: float = 0.0
    commit_secs: float = 0.0
    items: Mapping[str, int] | None = None

    @property
    def secs(self) -> float:
        """From the call of `save` to the commit."""
        return self.begin_secs + self.stage_secs + self.write_secs + self.commit_secs

    @property
    def blocked_secs(self) -> float:
        """For how long of that the caller was held up, as far as that is known."""
        return self.begin_secs + self.stage_secs if self.is_blocking is False else self.secs


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """One run: its first and last commit that are still there, and what it went on from.

    `continued_from` is the step, which may be gone since; None where that is not known any more, or `is_fresh`.
    """

    run: str
    num_commits: int
    first_step: int
    last_step: int
    since: float | None
    until: float | None
    continued_from: int | None
    is_fresh: bool


@dataclass(frozen=True, kw_only=True)
class RestoreFacts:
    """One restore that succeeded."""

    time: float
    run: str
    step: int
    num_bytes: int
    secs: float
    passed_over: int


@dataclass(frozen=True, kw_only=True)
class FaultFacts:
    """Something that went wrong, or ended early; `time` is None for what was found just now."""

    time: float | None
    kind: str
    step: int | None
    text: str
    run: str = ""


@dataclass(kw_only=True)
class RootFacts:
    """A root."""

    root: str
    time: float = field(default_factory=time.time)
    saves: list[SaveFacts] = field(default_factory=list)
    runs: list[RunFacts] = field(default_factory=list)
    restores: list[RestoreFacts] = field(default_factory=list)
    faults: list[FaultFacts] = field(default_factory=list)
    others: list[tuple[str, str, int]] = field(default_factory=list)
    latest: StepFacts | None = None
    policy: str = ""
    has_history: bool = False

    @property
    def kept(self) -> list[SaveFacts]:
        """The commits that are still there, in their order."""
        return [save for save in self.saves if save.is_there]


def collect(storage: Storage, keep: Policy | None = None, *, progress: Progress = QUIET) -> RootFacts:
    """Look at a root.

    Args:
        storage: of the root.
        keep: the policy whose reasons are told; None takes the one that the latest save left in its record.
        progress: told of the bytes of manifests read.

    Raises:
        StorageError: the root cannot be listed.
    """
    shown = overview(storage, keep)  # which takes the recorded policy by itself
    text = "" if keep is None else repr(keep)
    if keep is None and shown.steps:
        text = as_text(_record(shown.steps[-1]).extra.get("keep"))
    history = read_history(storage)
    facts = RootFacts(root=storage.location, policy=text, has_history=bool(history))
    facts.saves = _saves(shown, history)
    facts.runs = _runs([_record(entry) for entry in shown.steps], history)
    facts.restores = [found for line in history if (found := _restore(line)) is not None]
    facts.faults = [*_past_faults(history), *_present_faults(shown)]
    facts.others = [
        (entry.name, entry.kind, entry.num_bytes)
        for entry in shown.entries
        if entry.committed is None and entry.problem is None
    ]
    _read_manifests(storage, shown, facts, progress)
    return facts


def _record(entry: RootEntry) -> CommitRecord:
    assert entry.committed is not None
    return entry.committed.record


def _saves(shown: Overview, history: Sequence[Mapping[str, Any]]) -> list[SaveFacts]:
    told = {as_text(line.get("attempt")): line for line in history if line["event"] == "SaveCommitted"}
    there = [_save(entry, told.pop(_record(entry).attempt, None)) for entry in shown.steps]
    gone = [found for line in told.values() if (found := _removed(line)) is not None]
    # By time where it is known, so that what was removed stands where it was; in the order of commits otherwise.
    order, latest = [], 0.0
    for save in there:
        latest = max(latest, save.time or 0.0)
        order.append((latest, save))
    order += [(save.time or 0.0, save) for save in gone]
    order.sort(key=lambda pair: pair[0])
    return [save for _, save in order]


def _save(entry: RootEntry, told: Mapping[str, Any] | None) -> SaveFacts:
    record = _record(entry)
    timings = record.timings
    blocking = record.extra.get("blocking")
    save = SaveFacts(
        step=record.step,
        attempt=record.attempt,
        run=record.run,
        time=as_time(record.created if told is None else told["time"]),  # the record's is in whole seconds
        num_bytes=record.num_bytes,
        own_bytes=entry.own_bytes,
        mode=f"{record.mode} ×{record.process_count}",
        format=record.format,
        metrics=", ".join(f"{as_text(name)} {value:.4g}" for name, value in sorted(record.metrics.items())),
        kept=tuple(as_text(why) for why in entry.kept),
        left_by=entry.left_by,
        is_blocking=blocking if isinstance(blocking, bool) else None,
    )
    total = as_secs(timings.get("elapsed_secs")) if told is None else as_secs(told.get("secs"))
    return _timed(save, timings, total)


def _timed(save: SaveFacts, timings: Mapping[str, Any], total: float) -> SaveFacts:
    save.begin_secs = as_secs(timings.get("begin_secs"))
    save.stage_secs = as_secs(timings.get("stage_secs"))
    save.write_secs = as_secs(timings.get("write_secs"))
    save.commit_secs = max(0.0, total - save.secs)
    return save


def _removed(line: Mapping[str, Any]) -> SaveFacts | None:
    step = as_whole(line.get("step"))
    if step is None:
        return None
    blocking = line.get("blocking")
    save = SaveFacts(
        step=step,
        attempt=as_text(line.get("attempt")),
        run=as_text(line.get("run")),
        time=as_time(line["time"]),
        is_there=False,
        is_blocking=blocking if isinstance(blocking, bool) else None,
    )
    return _timed(save, line, as_secs(line.get("secs")))


def _runs(records: Sequence[CommitRecord], history: Sequence[Mapping[str, Any]]) -> list[RunFacts]:
    steps = {record.attempt: record.step for record in records}
    by_run: dict[str, list[CommitRecord]] = {}
    for record in records:
        by_run.setdefault(record.run, []).append(record)
    return [
        RunFacts(
            run=run,
            num_commits=len(committed),
            first_step=committed[0].step,
            last_step=committed[-1].step,
            since=as_time(committed[0].created),
            until=as_time(committed[-1].created),
            continued_from=_start(committed[0], steps, history),
            is_fresh=committed[0].parent is None,
        )
        for run, committed in by_run.items()
    ]


def _start(first: CommitRecord, steps: Mapping[str, int], history: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the step that a run went on from, as far as commits that are there, and the history, tell.

    Args:
        first: of its commits that are there.
        steps: of the commits that are there, by attempt.
        history: the oldest first.
    """
    parent = first.parent or ""
    if parent in steps:
        return steps[parent]
    restored = None
    for line in history:
        is_own = as_text(line.get("run")) == first.run
        if is_own and line["event"] == "RestoreDone":
            restored = as_whole(line.get("step"))
        if is_own and line["event"] == "SaveCommitted":
            break  # the parent, or older: what came after it, the run did not begin with
        if parent and as_text(line.get("attempt")) == parent and line["event"] == "SaveCommitted":
            return as_whole(line.get("step"))
    return restored


def _restore(line: Mapping[str, Any]) -> RestoreFacts | None:
    step, when = as_whole(line.get("step")), as_time(line["time"])
    if line["event"] != "RestoreDone" or step is None or when is None:
        return None
    return RestoreFacts(
        time=when,
        run=as_text(line.get("run")),
        step=step,
        num_bytes=as_whole(line.get("num_bytes")) or 0,
        secs=as_secs(line.get("secs")),
        passed_over=as_whole(line.get("passed_over")) or 0,
    )


def _past_faults(history: Sequence[Mapping[str, Any]]) -> list[FaultFacts]:
    faults = []
    for line in history:
        kind = _FAULTS.get(line["event"])
        if kind is None:
            continue
        parts = [as_text(line.get(name)) for name in ("error", "message", "problem", "reason")]
        outcome = as_text(line.get("outcome"))
        text = ": ".join(part for part in parts if part) + (f" ({outcome})" if outcome else "")
        faults.append(
            FaultFacts(
                time=as_number(line["time"]),
                kind=kind,
                step=as_whole(line.get("step")),
                text=text,
                run=as_text(line.get("run")),
            )
        )
    return faults


def _present_faults(shown: Overview) -> list[FaultFacts]:
    return [
        FaultFacts(time=None, kind="unreadable now", step=entry.step, text=f"{entry.name}: {as_text(entry.problem)}")
        for entry in shown.problems
    ]


def _read_manifests(storage: Storage, shown: Overview, facts: RootFacts, progress: Progress) -> None:
    reader = StepReader(storage)
    chosen = shown.steps[-MAX_MANIFESTS:]
    progress.begin("read manifests", sum(_record(entry).manifest_bytes for entry in chosen))
    by_attempt = {save.attempt: save for save in facts.saves}
    for entry in chosen:
        assert entry.committed is not None
        record = entry.committed.record
        try:
            manifest = reader.load_manifest(entry.committed)
        except StepNotFoundError:  # a job that trains there let it go meanwhile
            facts.saves.remove(by_attempt[record.attempt])
        except CheckpointError as error:
            text = f"{entry.name}: {as_text(error.message)}"
            facts.faults.append(FaultFacts(time=None, kind="unreadable now", step=record.step, text=text))
        else:
            by_attempt[record.attempt].items = dict(Counter(item_bytes(manifest)))
            if entry is chosen[-1]:
                facts.latest = step_facts(manifest)
        progress.advance(record.manifest_bytes)
