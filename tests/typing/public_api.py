"""The types of the public API, as users see them: checked by mypy and pyright, never run.

A line that must be refused carries an ignore; the checkers report an ignore that is not needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from safepoint.formats.storage import StorageOptions
from safepoint.manager import (
    AdaptationReport,
    Cast,
    CheckpointError,
    CheckpointManager,
    ConvertedStep,
    ConvertResult,
    ForeignResult,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    Partial,
    PerProcess,
    Policy,
    Preemption,
    Rename,
    RestoreResult,
    RNGState,
    SaveResult,
    StepInfo,
    convert,
    restore_foreign,
)
from safepoint.manager.errors import (
    AsyncSaveError,
    CorruptDataError,
    Outcome,
    PeerFailedError,
    RendezvousTimeoutError,
    StepExistsError,
    StepNotFoundError,
    StructureMismatchError,
)
from safepoint.manager.events import Event, Observer, SaveCommitted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from safepoint.manager.progress import Progress


def opening(root: Path) -> None:
    policy = KeepLast(3) | KeepEvery(10_000) | KeepBest(2, metric="loss", order="min") | KeepAll()
    kept: Policy = policy
    CheckpointManager(root)
    CheckpointManager("runs/x", keep=kept, save_every=10, mode="sharded", deadline_secs=60, root_scope="per_process")
    CheckpointManager(root, unchanged="link")
    CheckpointManager("gs://bucket/run", commit="marker", storage=StorageOptions(deadline_secs=30))
    CheckpointManager(root, commit="copy")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    CheckpointManager(root, unchanged=True)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    CheckpointManager(root, mode="both")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    CheckpointManager(root, kepe=kept)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    CheckpointManager(root, kept)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    KeepBest(2, metric="loss", order="up")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def observing(root: Path) -> None:
    def observe(event: Event) -> None:
        if isinstance(event, SaveCommitted):
            assert_type(event.secs, float)

    seen: list[Event] = []
    observer: Observer = observe
    CheckpointManager(root, observers=[observer, seen.append, print], progress="off")
    CheckpointManager(root, observers=print)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    CheckpointManager(root, progress="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def saving(manager: CheckpointManager, state: dict[str, Any]) -> None:
    result = manager.save(3, state, metrics={"loss": 0.5}, force=True, blocking=False, on_exists="replace")
    assert_type(result, SaveResult)
    assert_type(result.saved, bool)
    assert_type(result.reason, str)
    assert_type(result.num_bytes, int)
    assert_type(result.blocked_secs, float)
    manager.save(3, state, None)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    manager.save("3", state)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    manager.save(3, state, on_exists="keep")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(manager.wait(), None)


def restoring(manager: CheckpointManager, state: Mapping[str, Any]) -> None:
    latest = manager.restore_latest(state)
    assert_type(latest, RestoreResult | None)
    latest.step  # type: ignore[union-attr]  # noqa: B018  # pyright: ignore[reportOptionalMemberAccess]
    result = manager.restore(3, state, items=["model"], keys=["model.layers.*"])
    assert_type(result, RestoreResult)
    assert_type(result.step, int)
    assert_type(manager.restore(3).state, dict[str, Any] | None)
    adapted = manager.restore(3, state, adapt=[Cast("model.*"), Partial(), Rename({"a.*": "b.*"})]).adapted
    assert_type(adapted, AdaptationReport)
    assert_type(adapted.cast, tuple[tuple[str, str, str], ...])
    assert_type(adapted.missing, tuple[str, ...])
    manager.restore(3, state, adapt=["cast"])  # type: ignore[list-item]  # pyright: ignore[reportArgumentType]
    Cast(keys="model.*")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def looking(manager: CheckpointManager) -> None:
    assert_type(manager.steps(), list[StepInfo])
    assert_type(manager.verify(3, reader="orbax"), list[CheckpointError])
    manager.verify(reader="jax")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert_type(manager.latest_step(), int | None)
    with manager as same:
        assert_type(same, CheckpointManager)


def stopping(manager: CheckpointManager) -> None:
    with manager.preemption() as preemption:
        assert_type(preemption, Preemption)
        assert_type(preemption.should_stop(3), bool)


def parts_of_the_state() -> None:
    def merge(parts: Sequence[Any], process_index: int, process_count: int) -> Any:
        return parts[process_index % process_count]

    PerProcess(RNGState())
    PerProcess(0, merge=merge)


def errors(manager: CheckpointManager, state: dict[str, Any]) -> None:
    try:
        manager.save(3, state)
    except RendezvousTimeoutError as error:
        timeout: TimeoutError = error
        assert_type(error.absent, tuple[int, ...] | None)
        print(timeout)
    except PeerFailedError as error:
        assert_type(error.process_index, int | None)
    except StepExistsError as error:
        exists: FileExistsError = error
        print(exists)
    except AsyncSaveError as error:
        assert_type(error.step, int | None)
    except CheckpointError as error:
        assert_type(error.outcome, Outcome | None)
        assert_type(error.hint, str | None)
    try:
        manager.restore(3, state)
    except StepNotFoundError as error:
        assert_type(error.available, tuple[int, ...] | None)
    except StructureMismatchError as error:
        assert_type(error.mismatches, tuple[str, ...] | None)
    except CorruptDataError as error:
        assert_type(error.target_modified, bool | None)


def conversions(progress: Progress) -> None:
    """Reading and writing what others do."""
    read = restore_foreign("run", {"model": {}}, items=["model"], adapt=[Rename({"a.*": "b.*"})], transposed=["b.w"])
    assert_type(read, ForeignResult)
    assert_type(read.num_bytes, int)
    made = convert("run", "other", format="orbax", mode="sharded", step="all", progress=progress)
    assert_type(made, ConvertResult)
    assert_type(made.steps, tuple[ConvertedStep, ...])
    assert_type(made.errors, tuple[CheckpointError, ...])
    assert_type(made.steps[0].step, int | None)
    convert("run", "other", step="latest")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
