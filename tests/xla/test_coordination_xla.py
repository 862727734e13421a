"""Coordination beside the real torch_xla on the CPU. A case is a process of its own: a wedged runtime ends with it."""

# ruff: noqa: PLC0415 - a case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.timeout(120),
]

CASE_SECS = 90
DEADLINE_SECS = 30


def start(case: str, **environment: str) -> subprocess.Popen[str]:
    settings = {"PJRT_DEVICE": "CPU", "RES_OPTIONS": "timeout:1 attempts:1", **environment}
    return subprocess.Popen(
        [sys.executable, __file__, case],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Any:
    """Return what the case printed last."""
    try:
        stdout, stderr = process.communicate(timeout=CASE_SECS)
    finally:
        process.kill()
    assert process.returncode == 0, stderr[-4000:]
    return json.loads(stdout.splitlines()[-1])


def record_sync() -> list[str]:
    """Let the two calls be recorded in their order, and be made."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    events: list[str] = []
    sync, wait_device_ops = torch_xla.sync, xm.wait_device_ops

    def recorded_sync(*, wait: bool = False) -> None:
        events.append(f"sync(wait={wait})")
        sync(wait=wait)

    def recorded_wait(*args: Any) -> None:
        events.append("wait_device_ops")
        wait_device_ops(*args)

    torch_xla.sync, xm.wait_device_ops = recorded_sync, recorded_wait
    return events


# One process.


def case_not_initialized() -> Any:
    import torch_xla

    from safepoint.manager.coordination import detect_coordinator

    events = record_sync()
    coordinator = detect_coordinator(deadline_secs=DEADLINE_SECS)
    coordinator.sync_devices()
    return coordinator.description, events, torch_xla._XLAC._xla_runtime_is_initialized()


def test_a_runtime_that_was_not_started_is_neither_synced_nor_started() -> None:
    assert finish(start("not_initialized")) == ["one process", [], False]


def case_one_process() -> Any:
    import torch
    import torch_xla

    from safepoint.manager.coordination import detect_coordinator

    lazy = torch.ones(4, device=torch_xla.device()) * 2
    events = record_sync()
    coordinator = detect_coordinator(deadline_secs=DEADLINE_SECS)
    coordinator.on_event = events.append
    coordinator.sync_devices()
    coordinator.meet("save", b"", deadline_secs=DEADLINE_SECS)
    return coordinator.description, events, lazy.sum().item()


def test_the_lazy_graph_is_cut_and_waited_for_in_this_order() -> None:
    events = ["sync_devices", "sync(wait=True)", "wait_device_ops", "meet:save"]
    assert finish(start("one_process")) == ["one process", events, 8.0]


def case_spmd() -> Any:
    import numpy as np
    import torch
    import torch_xla
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    from safepoint.manager.coordination import detect_coordinator

    xr.use_spmd()
    mesh = xs.Mesh(np.arange(4), (4,), ("x",))
    tensor = torch.arange(8.0).to(torch_xla.device())
    xs.mark_sharding(tensor, mesh, ("x",))
    result = tensor + 1
    coordinator = detect_coordinator(deadline_secs=DEADLINE_SECS)
    coordinator.sync_devices()
    sharding = torch_xla._XLAC._get_xla_sharding_spec(result)
    return coordinator.description, coordinator.process_count, sharding != ""


def test_one_spmd_process_is_one_process_and_its_sharding_is_known_after_the_sync() -> None:
    assert finish(start("spmd", CPU_NUM_DEVICES="4")) == ["one process", 1, True]


def test_several_spmd_processes_without_a_place_to_meet_are_told_what_to_add() -> None:
    """Only the counts are made up: one machine has no devices of other hosts."""
    from safepoint.manager.coordination import xla
    from safepoint.manager.errors import InvalidArgumentError

    xla._refuse_several_hosts(4, 4)
    with pytest.raises(InvalidArgumentError, match=r'init_process_group\("gloo"\)(?s:.*)store="host:port"'):
        xla._refuse_several_hosts(8, 4)


# Replicas: several threads of one process.


class Exchange:
    """Stands in for xm.rendezvous, which is two cross-replica collectives: those abort on a machine of few cores."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=DEADLINE_SECS)
        self._brought: dict[int, bytes] = {}

    def __call__(self, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
        import torch_xla.runtime as xr

        del tag, replicas
        self._brought[xr.global_ordinal()] = payload
        self._barrier.wait()
        return [self._brought[ordinal] for ordinal in sorted(self._brought)]


EXCHANGE = Exchange(int(os.environ.get("CPU_NUM_DEVICES", "1")))


def replica(_: int, folder: str) -> None:
    import torch
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    from safepoint.manager.coordination import detect_coordinator
    from safepoint.manager.errors import RendezvousTimeoutError

    xm.rendezvous = EXCHANGE
    lazy = torch.ones(2, device=torch_xla.device()) + 1
    coordinator = detect_coordinator(deadline_secs=DEADLINE_SECS)
    index = coordinator.process_index
    assert (index, coordinator.process_count) == (xr.global_ordinal(), xr.world_size())
    coordinator.sync_devices()
    own = f"{index}:{lazy.sum().item():g}".encode()
    together = coordinator.meet("save", own, deadline_secs=DEADLINE_SECS, decide=b" ".join)
    absent = None
    if index == 1:
        time.sleep(2.5)
    else:
        with pytest.raises(RendezvousTimeoutError) as caught:
            coordinator.meet("alone", b"", deadline_secs=1)
        absent = caught.value.absent
    again = coordinator.meet("again", str(index).encode(), deadline_secs=DEADLINE_SECS, decide=b"".join)
    coordinator.close()
    told = [coordinator.description, together.decode(), absent, again.decode()]
    Path(folder, str(index)).write_text(json.dumps(told))


def case_replicas() -> Any:
    import torch_xla.distributed.xla_multiprocessing as xmp

    with tempfile.TemporaryDirectory() as folder:
        xmp.spawn(replica, args=(folder,))
        return [json.loads(told.read_text()) for told in sorted(Path(folder).iterdir())]


def test_replica_threads_of_one_process_meet_and_name_the_absent() -> None:
    """A threading.Barrier stands in for the one use of xm.rendezvous; all else is real."""
    expected = ["XLA, 3 replicas", "0:4 1:4 2:4"]
    assert finish(start("replicas", CPU_NUM_DEVICES="3")) == [
        [*expected, [1], "012"],
        [*expected, None, "012"],
        [*expected, [1], "012"],
    ]


# Several hosts: SPMD clients, each with a mesh of its own, met through gloo's store.


def case_spmd_beside_gloo() -> Any:
    import torch
    import torch.distributed as dist
    import torch_xla
    import torch_xla.runtime as xr

    from safepoint.manager.coordination import detect_coordinator

    xr.use_spmd()
    lazy = torch.ones(2, device=torch_xla.device()) + 1
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["PLACE"], rank=rank, world_size=count)
    events = record_sync()
    with detect_coordinator(deadline_secs=DEADLINE_SECS) as coordinator:
        coordinator.sync_devices()
        together = coordinator.meet("save", b"%d" % rank, deadline_secs=DEADLINE_SECS, decide=b"+".join)
        result = coordinator.description, coordinator.process_index, together.decode(), events, lazy.sum().item()
    dist.destroy_process_group()
    return result


def test_spmd_processes_meet_beside_gloo_and_every_one_is_synced(tmp_path: Path) -> None:
    common = {"CPU_NUM_DEVICES": "4", "WORLD_SIZE": "2", "PLACE": f"file://{tmp_path / 'group'}"}
    running = [start("spmd_beside_gloo", RANK=str(rank), **common) for rank in range(2)]
    for rank, process in enumerate(running):
        synced = ["sync(wait=True)", "wait_device_ops"]
        assert finish(process) == ["torch.distributed, 2 processes", rank, "0+1", synced, 4.0]


if __name__ == "__main__":
    print(json.dumps(globals()[f"case_{sys.argv[1]}"]()))  # noqa: T201 - the answer to `finish`
