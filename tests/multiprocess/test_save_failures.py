"""What every process is told when one of several disagrees, fails, is absent, or finds damage."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from safepoint.manager import CheckpointManager, KeepLast
from safepoint.manager.errors import (
    CheckpointError,
    CorruptDataError,
    DisagreementError,
    InvalidArgumentError,
    PeerFailedError,
    RendezvousTimeoutError,
    StorageError,
    StructureMismatchError,
    UnsupportedValueError,
)

from support.sharded_states import check_state, make_state

if TYPE_CHECKING:
    from support.process_pool import PoolView, ProcessPool
    from support.roots import Root

DEADLINE_SECS = 20.0


def open_manager(root: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"deadline_secs": DEADLINE_SECS, **options})


# -- everybody gets the same answer ---------------------------------------------------------------------------------


def error_of(call: Any, *args: Any, **kwargs: Any) -> CheckpointError:
    started = time.monotonic()
    try:
        call(*args, **kwargs)
    except CheckpointError as error:
        error.add_note(f"{time.monotonic() - started}")
        return error
    raise AssertionError("did not raise")


def disagreeing_case(rank: int, root: str, what: str) -> tuple[str, str]:
    if what in ("root", "mode of the manager"):
        options = {"mode": ["sharded", "consolidated"][rank]} if what != "root" else {}
        own = f"{root}/{rank}" if what == "root" else root
        error = error_of(open_manager, own, **options)
        return type(error).__name__, str(error)
    with open_manager(root) as manager:
        if what == "step":
            error = error_of(manager.save, 5 + rank, {"x": 1})
        elif what == "dtype":
            error = error_of(manager.save, 5, {"x": torch.zeros(3, dtype=[torch.float32, torch.float16][rank])})
        elif what == "shape":
            error = error_of(manager.save, 5, {"x": torch.zeros(3 + rank)})
        elif what == "value":
            error = error_of(manager.save, 5, {"x": rank})
        elif what == "blocking":
            error = error_of(manager.save, 5, {"x": 1}, blocking=rank == 0)
        elif what == "restored step":
            manager.save(5, {"x": 1})
            manager.save(6, {"x": 1})
            error = error_of(manager.restore, 5 + rank)
        else:
            raise AssertionError(what)
        if what != "restored step":
            assert error.outcome == "not_committed"
        manager.save(8, {"x": 1})  # the manager is still of use
    return type(error).__name__, str(error)


@pytest.mark.parametrize(
    "what", ["root", "mode of the manager", "step", "dtype", "shape", "value", "blocking", "restored step"]
)
def test_a_disagreement_is_one_error_on_every_process(pool2: PoolView, tmp_path: Path, what: str) -> None:
    (first, text), (second, other) = pool2.run(disagreeing_case, str(tmp_path), what)
    assert first == second == "DisagreementError"
    assert text == other
    assert "0" in text
    assert "1" in text


def one_fails_case(rank: int, root: str, what: str, failing: int) -> tuple[str, str, int | None]:
    with open_manager(root) as manager:
        manager.save(1, {"x": torch.ones(4)})
        if what == "unsupported value":
            error = error_of(manager.save, 2, {"x": (lambda: None) if rank == failing else 1})
        elif what == "bad step":
            error = error_of(manager.save, -1 if rank == failing else 2, {"x": 1})
        elif what == "mismatch":
            error = error_of(manager.restore, 1, {"x": torch.ones(5 if rank == failing else 4)})
        else:
            raise AssertionError(what)
        assert [info.step for info in manager.steps()] == [1]
        manager.save(3, {"x": 1})
    return type(error).__name__, str(error), error.process_index


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("unsupported value", UnsupportedValueError),
        ("bad step", InvalidArgumentError),
        ("mismatch", StructureMismatchError),
    ],
)
def test_one_failing_process_is_named_on_all_others_at_once(
    pool3: PoolView, tmp_path: Path, what: str, kind: type, failing: int
) -> None:
    outcomes = pool3.run(one_fails_case, str(tmp_path), what, failing)
    for rank, (name, text, process) in enumerate(outcomes):
        if rank == failing:
            assert name == kind.__name__
        else:
            assert name == PeerFailedError.__name__
            assert process == failing
            assert kind.__name__ in text


def full_disk_case(rank: int, root: str, mode: Any, failing: int) -> tuple[str, str, str | None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_manager(root, mode=mode) as manager:
        state = make_state((3,)) | {f"big{i}": torch.ones(50_000) for i in range(6)}
        manager.save(1, make_state((3,)))
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        error = error_of(manager.save, 2, state)
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [info.step for info in manager.steps()] == [1]
        assert manager.save(2, state).saved
    return type(error).__name__, str(error), error.outcome


@pytest.mark.parametrize(("mode", "failing"), [("sharded", 0), ("sharded", 1), ("consolidated", 0)])
def test_a_write_that_fails_on_one_process_commits_nothing_and_leaves_nothing(
    pool3: PoolView, tmp_path: Path, mode: str, failing: int
) -> None:
    outcomes = pool3.run(full_disk_case, str(tmp_path), mode, failing)
    for rank, (name, text, outcome) in enumerate(outcomes):
        assert outcome == "not_committed"
        assert name == (StorageError if rank == failing else PeerFailedError).__name__
        assert "StorageError" in text or rank == failing, text
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", ".safepoint"}


# -- nobody is waited for without end -------------------------------------------------------------------------------


def lone_case(rank: int, root: str) -> tuple[float, tuple[int, ...] | None, str]:
    manager = open_manager(root, deadline_secs=3.0)
    if rank != 1:
        return 0.0, None, ""
    started = time.monotonic()
    error = error_of(manager.save, 1, {"x": 1})
    assert isinstance(error, RendezvousTimeoutError)
    assert error.outcome == "not_committed"
    return time.monotonic() - started, error.absent, str(error)


def test_a_save_called_by_one_process_of_three_names_the_other_two_in_time(pool3: PoolView, tmp_path: Path) -> None:
    secs, absent, text = pool3.run(lone_case, str(tmp_path))[1]
    assert secs < 5
    assert absent == (0, 2)
    assert "0, 2" in text


def stopped_primary_case(rank: int, root: str, signals: str) -> tuple[float, tuple[int, ...] | None]:
    manager = open_manager(root, deadline_secs=3.0)
    manager.save(0, {"x": 0})
    Path(signals, f"ready-{rank}").touch()
    while not Path(signals, "go").exists():
        time.sleep(0.01)
    if rank != 1:
        return 0.0, None
    started = time.monotonic()
    error = error_of(manager.save, 1, {"x": 1})
    assert isinstance(error, RendezvousTimeoutError)
    return time.monotonic() - started, error.absent


def test_a_stopped_primary_is_named_in_time(process_pool: ProcessPool, tmp_path: Path) -> None:
    signals = tmp_path / "signals"
    signals.mkdir()
    run = process_pool.start(stopped_primary_case, str(tmp_path / "root"), str(signals), num_processes=3)
    give_up = time.monotonic() + 60
    while len(list(signals.glob("ready-*"))) < 3 and time.monotonic() < give_up:
        time.sleep(0.01)
    process_pool.pause(0)
    (signals / "go").touch()
    try:
        secs, absent = run.outcomes(ranks=[1])[1]
    finally:
        process_pool.resume(0)
        process_pool.replace()
    assert secs < 5
    assert absent == (0, 2)


def half_committed_case(rank: int, root: str) -> tuple[str, list[int], int, list[int]]:
    """Let the commit of step 2 fail on the disk of process 1 alone, after that of process 0 succeeded."""
    own = f"{root}/disk{rank}"
    with open_manager(own, root_scope="per_process", keep=KeepLast(1)) as manager:
        manager.save(1, make_state((2,), seed=1))
        if rank == 1:
            Path(own, "2").write_text("in the way")
            manager._session.committer.begin = lambda step, attempt: Path(own, f"{step}.tmp-{attempt}").mkdir()  # type: ignore[method-assign, assignment, return-value]
        error = error_of(manager.save, 2, make_state((2,), seed=2))
        left = [info.step for info in manager.steps()]
        state = make_state((2,), zeros=True)
        restored = manager.restore_latest(state)
        assert restored is not None
        check_state(state, seed=restored.step)
        if rank == 1:
            Path(own, "2").unlink()
            del manager._session.committer.begin
        manager.save(2, make_state((2,), seed=2))
        return str(error.outcome), left, restored.step, [info.step for info in manager.steps()]


def test_a_commit_that_fails_in_one_private_root_is_taken_back_in_the_others(pool2: PoolView, tmp_path: Path) -> None:
    assert pool2.run(half_committed_case, str(tmp_path)) == [("not_committed", [1], 1, [2])] * 2


# -- damage ---------------------------------------------------------------------------------------------------------


def damaged_case(_rank: int, root: Root) -> tuple[int, str]:
    state = make_state((2,), zeros=True)
    with root.manager() as manager:
        restored = manager.restore_latest(state)
        assert restored is not None
        check_state(state)
        error = error_of(manager.restore, 8, make_state((2,), zeros=True))
    assert isinstance(error, CorruptDataError)
    assert error.target_modified
    return restored.step, str(error)


def test_damage_that_one_process_reads_makes_all_fall_back_together(pool2: PoolView, root: Root) -> None:
    pool2.run(save_case, root)
    pool2.run(save_next_case, root)
    files = root.files_of(8)
    entry = json.loads(root.read(f"{files}/manifest.json"))
    shards = {shard["key"]: shard for leaf in entry["leaves"] for shard in leaf["shards"] if shard["file"] == 1}
    damaged = next(shard for key, shard in shards.items() if "uneven" in key)
    path = f"{files}/{entry['files'][1]['path']}"
    data = bytearray(root.read(path))
    data[damaged["offset"]] ^= 0x10
    root.storage.replace(path, bytes(data))
    for step, text in pool2.run(damaged_case, root):
        assert step == 7
        assert "shard-00001-of-00002" in text


def save_next_case(_rank: int, root: Root) -> None:
    with root.manager(mode="sharded") as manager:
        manager.restore_latest(make_state((2,), zeros=True))
        manager.save(8, make_state((2,), seed=1))


def save_case(_rank: int, root: Root) -> None:
    with root.manager(mode="sharded") as manager:
        manager.save(7, make_state((2,)))


def replicas_case(rank: int, root: str) -> tuple[str | None, str | None, list[int]]:
    state = {"same": torch.ones(4), "buffer": torch.full((3,), float(rank // 2)), **make_state((3,))}
    with open_manager(f"{root}/strict", check_replicas="error") as manager:
        error = error_of(manager.save, 1, state)
        assert isinstance(error, DisagreementError)
        assert manager.save(2, {"same": torch.ones(4), **make_state((3,))}).saved
        steps = [info.step for info in manager.steps()]
    with open_manager(f"{root}/trusting") as manager:
        assert manager.save(1, state).saved
    return error.leaf, str(error), steps


def test_replicas_that_differ_are_named_where_that_is_asked_for(pool3: PoolView, tmp_path: Path) -> None:
    for leaf, text, steps in pool3.run(replicas_case, str(tmp_path)):
        assert leaf == "buffer"
        assert "process(es) 0, 1 differ from those of process(es) 2" in str(text)
        assert steps == [2]
    assert {path.name for path in (tmp_path / "strict").iterdir()} == {"2", ".safepoint"}


def too_early_case(rank: int, root: str) -> list[str]:
    """Open the manager before the process group is there."""
    group_is_there, dist.is_initialized = dist.is_initialized, lambda: False
    manager = CheckpointManager(f"{root}/{rank}")
    dist.is_initialized = group_is_there
    texts = [str(error_of(manager.save, 1, {"x": 1})), str(error_of(manager.restore_latest, {"x": 1}))]
    assert manager.steps() == []
    return texts


def test_a_manager_that_was_opened_before_the_process_group_refuses_to_save_alone(
    pool2: PoolView, tmp_path: Path
) -> None:
    for texts in pool2.run(too_early_case, str(tmp_path)):
        assert all("init_process_group" in text for text in texts)
