"""Processes of one host that restore the same from an object store: it is fetched once, and each gets all of it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from safepoint.manager import CheckpointManager, PerProcess
from safepoint.manager.coordination.transport import GlooTransport
from safepoint.manager.errors import CheckpointError, CorruptDataError, RendezvousTimeoutError

from support.counting_proxy import CountingProxy
from support.http_proxy import Reply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.object_servers import ObjectServer
    from support.process_pool import ProcessPool

NUM_ITEMS = (5 << 20) + 12_345  # two blocks and a half
NUM_SMALL = 50


def make_state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    small = {str(number): torch.full((7,), number + seed, dtype=torch.int32) for number in range(NUM_SMALL)}
    return {
        "large": torch.randint(-(1 << 31), (1 << 31) - 1, (NUM_ITEMS,), generator=generator, dtype=torch.int32),
        "small": small,
    }


def zeros() -> dict[str, Any]:
    small = {str(number): torch.zeros(7, dtype=torch.int32) for number in range(NUM_SMALL)}
    return {"large": torch.zeros(NUM_ITEMS, dtype=torch.int32), "small": small}


def check(state: dict[str, Any], seed: int) -> None:
    wanted = make_state(seed)
    assert torch.equal(state["large"], wanted["large"])
    assert all(torch.equal(state["small"][key], value) for key, value in wanted["small"].items())


class Saved:
    """Two steps in a bucket, and a proxy in front of it that counts.

    Attributes:
        root: of the steps 1 and 2.
        proxy: what clients go through that have `environment`.
        environment: of such a client.
        num_bytes: of the data files of a step.
    """

    def __init__(self, server: ObjectServer, proxy: CountingProxy, prefix: str, **options: Any) -> None:
        self.root = server.url(prefix)
        self.proxy = proxy
        self.environment = server.through(proxy.address)
        with CheckpointManager(self.root, **options) as manager:
            for seed in (1, 2):
                manager.save(seed, make_state(seed))
            storage = manager._session.storage
            (step,) = [step for step in manager._session.committer.list_steps() if step.record.step == 2]
            files = manager._session.committer.load_manifest(step).files
            self.num_bytes = sum(file.num_bytes for file in files)
            assert storage.is_remote


@pytest.fixture(scope="module")
def saved_in_s3(s3: ObjectServer) -> Iterator[Saved]:
    with CountingProxy(s3.address) as proxy:
        yield Saved(s3, proxy, "host sharing/run")


@pytest.fixture
def saved(saved_in_s3: Saved) -> Iterator[Saved]:
    saved_in_s3.proxy.forget()
    yield saved_in_s3
    saved_in_s3.proxy.spoil = lambda _, reply: reply


def restore_case(
    rank: int, root: str, environment: dict[str, str], hosts: str = "", step: int | None = None, into: str = "a target"
) -> tuple[int, int, list[str]]:
    """Return the step, the bytes read by this process, and the meetings; restore into `a target` or `nothing`."""
    os.environ.update(environment)
    meetings: list[str] = []
    with CheckpointManager(root, deadline_secs=60.0) as manager:
        coordinator = manager._session.coordinator
        if hosts:
            coordinator.host = hosts[rank]  # as if the processes ran on several
        coordinator.on_event = meetings.append
        target = zeros() if into == "a target" else None
        restored = manager.restore_latest(target) if step is None else manager.restore(step, target)
        assert restored is not None
        state = target if target is not None else restored.state
        assert state is not None
        check(state, restored.step)
        return restored.step, restored.num_bytes, meetings


@pytest.mark.parametrize("num_processes", [2, 4])
def test_what_all_processes_of_a_host_want_is_fetched_once(
    process_pool: ProcessPool, saved: Saved, num_processes: int
) -> None:
    fetched_once(process_pool, saved, num_processes)


def test_google_is_asked_once_a_host_too(process_pool: ProcessPool, gs: ObjectServer) -> None:
    with CountingProxy(gs.address) as proxy:
        fetched_once(process_pool, Saved(gs, proxy, "host sharing/run"), 2)


def fetched_once(process_pool: ProcessPool, saved: Saved, num_processes: int) -> None:
    found = process_pool.run(restore_case, saved.root, saved.environment, num_processes=num_processes)
    assert saved.proxy.num_bytes == saved.num_bytes, saved.proxy.fetched
    assert [step for step, *_ in found] == [2] * num_processes
    read = [num_bytes for _, num_bytes, _ in found]
    assert sum(read) == saved.num_bytes  # what each read itself, and no more
    assert max(read) - min(read) <= 8 << 20


def test_processes_of_two_hosts_fetch_it_once_a_host(process_pool: ProcessPool, saved: Saved) -> None:
    found = process_pool.run(restore_case, saved.root, saved.environment, "abab", num_processes=4)
    assert saved.proxy.num_bytes == 2 * saved.num_bytes
    read = [num_bytes for _, num_bytes, _ in found]
    assert read[0] + read[2] == read[1] + read[3] == saved.num_bytes


def test_a_process_with_no_other_on_its_host_reads_for_itself(process_pool: ProcessPool, saved: Saved) -> None:
    found = process_pool.run(restore_case, saved.root, saved.environment, "aab", num_processes=3)
    assert found[2][1] == saved.num_bytes
    assert found[0][1] + found[1][1] == saved.num_bytes
    saved.proxy.forget()
    found = process_pool.run(restore_case, saved.root, saved.environment, "ab", num_processes=2)
    assert saved.proxy.num_bytes == 2 * saved.num_bytes
    assert not any("circle" in meeting for _, _, meetings in found for meeting in meetings)


def test_a_restore_without_a_target_shares_it_too(process_pool: ProcessPool, saved: Saved) -> None:
    process_pool.run(restore_case, saved.root, saved.environment, "", 1, "nothing", num_processes=2)
    assert saved.proxy.num_bytes == saved.num_bytes


def test_what_is_encoded_is_handed_on_as_it_is_stored(
    process_pool: ProcessPool, s3: ObjectServer, saved: Saved
) -> None:
    other = Saved(s3, saved.proxy, "host sharing/encoded", format="orbax_zstd")
    fetched = process_pool.run(restore_case, other.root, other.environment, num_processes=2)
    assert sum(num_bytes for _, num_bytes, _ in fetched) <= other.num_bytes
    assert saved.proxy.num_bytes <= other.num_bytes


def sharded_case(rank: int, root: str, environment: dict[str, str], *, is_saving: bool) -> int:
    """Save, or restore, what is sharded over one dimension of a mesh and replicated over the other."""
    os.environ.update(environment)
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(10 << 20, dtype=torch.int32).reshape(2048, -1)
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    replicated = distribute_tensor(whole[:1024] + 1, mesh, [Replicate(), Replicate()])
    with CheckpointManager(root, mode="sharded", deadline_secs=60.0) as manager:
        if is_saving:
            manager.save(1, {"sharded": sharded, "replicated": replicated, "own": PerProcess(torch.ones(9) * rank)})
            return 0
        target = {"sharded": torch.zeros_like(sharded), "replicated": torch.zeros_like(replicated)}
        restored = manager.restore(1, target | {"own": PerProcess(torch.zeros(9))})
        assert torch.equal(target["sharded"].to_local(), sharded.to_local())
        assert torch.equal(target["replicated"].to_local(), replicated.to_local())
        return restored.num_bytes


def save_sharded(rank: int, root: str, environment: dict[str, str]) -> int:
    return sharded_case(rank, root, environment, is_saving=True)


def restore_sharded(rank: int, root: str, environment: dict[str, str]) -> int:
    return sharded_case(rank, root, environment, is_saving=False)


def test_each_shard_is_fetched_once_for_those_who_hold_it(process_pool: ProcessPool, saved: Saved) -> None:
    root = f"{saved.root}-sharded"
    process_pool.run(save_sharded, root, saved.environment, num_processes=4)
    saved.proxy.forget()
    read = process_pool.run(restore_sharded, root, saved.environment, num_processes=4)
    assert sum(read) == saved.proxy.num_bytes
    assert 60 << 20 < sum(read) < 84 << 20  # blocks that lie across two parts are read for each


def parts_case(rank: int, root: str, environment: dict[str, str]) -> int:
    """Both want the large leaf of one state, and only the first process the small ones."""
    os.environ.update(environment)
    with CheckpointManager(root, deadline_secs=60.0) as manager:
        target = {"large": torch.zeros(NUM_ITEMS, dtype=torch.int32)} | (
            {"small": zeros()["small"]} if rank == 0 else {}
        )
        restored = manager.restore(2, target, items=["large", "small"] if rank == 0 else ["large"])
        assert torch.equal(target["large"], make_state(2)["large"])
        assert rank == 1 or int(target["small"]["7"][0]) == 9
        return restored.num_bytes


def test_what_one_wants_alone_it_reads_alone(process_pool: ProcessPool, saved: Saved) -> None:
    read = process_pool.run(parts_case, saved.root, saved.environment, num_processes=2)
    assert sum(read) == saved.proxy.num_bytes < 1.5 * saved.num_bytes


def failing_case(rank: int, root: str, environment: dict[str, str], step: int | None) -> Any:
    try:
        return restore_case(rank, root, environment, step=step)[0]
    except CheckpointError as error:
        return error


def test_damage_that_one_process_reads_is_everybodys_at_once(process_pool: ProcessPool, saved: Saved) -> None:
    spoiled: list[str] = []

    def spoil(path: str, reply: Reply) -> Reply:
        if "/1/" in path:
            return reply
        spoiled.append(path)
        body = bytearray(reply.body)
        body[len(body) // 2] ^= 1
        return Reply(status=reply.status, headers=reply.headers, body=bytes(body))

    saved.proxy.spoil = spoil
    run = process_pool.start(failing_case, saved.root, saved.environment, 2, num_processes=3)
    for error in run.outcomes().values():
        assert isinstance(error, CorruptDataError)
        assert error.target_modified
        assert error.leaf
        assert error.process_index is not None
    assert spoiled
    assert process_pool.run(failing_case, saved.root, saved.environment, None, num_processes=3) == [1, 1, 1]


def broken_case(rank: int, root: str, environment: dict[str, str]) -> int:
    """On one process the connection breaks in the middle of a block."""
    original = GlooTransport.send

    def send(self: GlooTransport, buffer: torch.Tensor, to: int, deadline_secs: float) -> None:
        if buffer.numel() > 1 << 20:
            self.close()
        original(self, buffer, to, deadline_secs)

    if rank == 1:
        GlooTransport.send = send  # type: ignore[method-assign]
    try:
        return restore_case(rank, root, environment)[1]
    finally:
        GlooTransport.send = original  # type: ignore[method-assign]


def test_a_connection_that_breaks_costs_reads_and_nothing_else(process_pool: ProcessPool, saved: Saved) -> None:
    read = process_pool.run(broken_case, saved.root, saved.environment, num_processes=3)
    assert sum(read) == saved.proxy.num_bytes > saved.num_bytes


def killed_case(rank: int, root: str, environment: dict[str, str]) -> str:
    if rank == 1:
        GlooTransport.receive = lambda *_, **__: os._exit(3)  # type: ignore[method-assign, assignment]
    os.environ.update(environment)
    with CheckpointManager(root, deadline_secs=60.0) as manager:
        session = manager._session
        session.options = replace(session.options, deadline_secs=8.0)  # all have come; now none need be waited for long
        with pytest.raises(RendezvousTimeoutError) as caught:
            manager.restore(2, zeros())
    return str(caught.value.absent)


def test_a_process_that_is_killed_while_it_hands_on_is_named_at_the_deadline(
    process_pool: ProcessPool, saved: Saved
) -> None:
    run = process_pool.start(killed_case, saved.root, saved.environment, num_processes=3)
    assert run.results(ranks=[0, 2]) == ["(1,)", "(1,)"]


def private_case(rank: int, root: str, environment: dict[str, str]) -> list[str]:
    os.environ.update(environment)
    meetings: list[str] = []
    with CheckpointManager(f"{root}/{rank}", root_scope="per_process", deadline_secs=60.0) as manager:
        manager.save(1, {"weights": torch.ones(9)})
        manager._session.coordinator.on_event = meetings.append
        manager.restore(1, {"weights": torch.zeros(9)})
    return meetings


def test_roots_of_their_own_are_never_shared(process_pool: ProcessPool, saved: Saved) -> None:
    root = f"{saved.root}-private"
    for meetings in process_pool.run(private_case, root, saved.environment, num_processes=2):
        assert "meet:restore-read" in meetings
        assert not any("hosts" in meeting or "circle" in meeting for meeting in meetings)
