"""Several processes and one bucket: who writes what, who is named when one fails, and what is left then."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.errors import StorageError
from safepoint.formats.storage import Storage, open_storage
from safepoint.manager import CheckpointManager, session
from safepoint.manager.errors import CheckpointError, DisagreementError, PeerFailedError
from safepoint.manager.unsettled import read_marks

from support.faulty_storage import Fail, FaultyStorage
from support.process_pool import after_case
from support.sharded_states import check_state, make_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.object_servers import ObjectServer
    from support.process_pool import ProcessPool

PART_BYTES = 48 << 10


def opened(environment: dict[str, str], wrap: Callable[[Storage], Storage] = lambda storage: storage) -> None:
    """Lead this process of the pool to the server, and cut files small."""
    os.environ.update(environment)

    def small(root: str, *options: Any) -> Storage:
        storage = open_storage(root, *options)
        storage.part_bytes = PART_BYTES
        return wrap(storage)

    session.open_storage = small  # type: ignore[assignment]
    after_case(lambda: setattr(session, "open_storage", open_storage))


def large(seed: int) -> torch.Tensor:
    return torch.arange(30_000, dtype=torch.float32) + seed


def save_case(rank: int, root: str, environment: dict[str, str], mode: Any, mesh: tuple[int, ...]) -> str:
    del rank
    opened(environment)
    with CheckpointManager(root, mode=mode, deadline_secs=30.0) as manager:
        for seed in (1, 2):
            manager.save(seed, make_state(mesh, seed=seed) | {"large": large(seed)}, blocking=seed == 1)
        manager.wait()
        return str(manager.verify())


def restore_case(rank: int, root: str, environment: dict[str, str], mesh: tuple[int, ...]) -> int:
    del rank
    opened(environment)
    with CheckpointManager(root, deadline_secs=30.0) as manager:
        state = make_state(mesh, zeros=True) | {"large": torch.zeros(30_000)}
        restored = manager.restore_latest(state)
        assert restored is not None
        assert torch.equal(state["large"], large(2))
        check_state(state, seed=2)
        return restored.step


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_what_several_processes_saved_in_a_bucket_any_number_restores(
    process_pool: ProcessPool, object_server: ObjectServer, unused_prefix: str, mode: str
) -> None:
    root, environment = object_server.url(unused_prefix), dict(object_server.environment)
    assert process_pool.run(save_case, root, environment, mode, (3,), num_processes=3) == ["[]"] * 3
    for mesh in ((2,), ()):
        count = mesh[0] if mesh else 1
        restored = process_pool.run(restore_case, root, environment, mesh, num_processes=count)
        assert restored == [2] * count
    storage = open_storage(root)
    assert read_marks(storage) == []
    assert {entry.name for entry in storage.list("")} == {"1", "2", ".safepoint"}


def failing_case(rank: int, root: str, environment: dict[str, str], failing: int) -> tuple[str, str | None]:
    faulty: list[FaultyStorage] = []

    def wrap(storage: Storage) -> Storage:
        faulty.append(FaultyStorage(storage, fault=Fail(), only={"writer.finish"}))
        return faulty[0]

    opened(environment, wrap)
    with CheckpointManager(root, mode="sharded", deadline_secs=30.0) as manager:
        manager.save(1, {"large": large(1), "rank": 0})
        if rank == failing:
            faulty[0]._at = faulty[0].num_calls + 1
        state = make_state((2,)) | {"large": large(2)}
        with pytest.raises(CheckpointError) as caught:
            manager.save(2, state)
        assert [info.step for info in manager.steps()] == [1]
        faulty[0]._at = None
        assert manager.save(2, state).saved
        assert manager.save(3, state).saved
    return type(caught.value).__name__, caught.value.outcome


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_on_one_process_commits_nothing_and_leaves_nothing(
    process_pool: ProcessPool, object_server: ObjectServer, unused_prefix: str, failing: int
) -> None:
    root = object_server.url(unused_prefix)
    outcomes = process_pool.run(failing_case, root, dict(object_server.environment), failing, num_processes=2)
    for rank, (name, outcome) in enumerate(outcomes):
        assert outcome == "not_committed"
        assert name == (StorageError if rank == failing else PeerFailedError).__name__
    storage = open_storage(root)
    assert read_marks(storage) == []
    assert {entry.name for entry in storage.list("")} == {"1", "2", "3", ".safepoint"}
    for step in "123":
        assert sum(entry.is_dir for entry in storage.list(step)) == 1


def other_bucket_case(rank: int, root: str, environment: dict[str, str]) -> str:
    opened(environment)
    if rank == 1:  # an environment that leads elsewhere: the same name, another place
        opened(environment, lambda _: open_storage("memory://elsewhere"))
    with pytest.raises(DisagreementError) as caught:
        CheckpointManager(root, deadline_secs=30.0)
    return str(caught.value)


def test_processes_that_do_not_see_one_bucket_are_told_before_anything_is_written(
    process_pool: ProcessPool, object_server: ObjectServer, unused_prefix: str
) -> None:
    told = process_pool.run(
        other_bucket_case, object_server.url(unused_prefix), dict(object_server.environment), num_processes=2
    )
    assert all("do not share this root: process(es) 1" in text for text in told)
