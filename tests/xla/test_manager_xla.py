"""Saving and restoring on real torch_xla on the CPU: SPMD meshes, several processes, replicas that are threads.

A case is a process of its own: the number of devices is fixed when XLA starts, and a wedged runtime ends with it.
"""

# ruff: noqa: PLC0415 - a case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.timeout(240),
]

CASE_SECS = 150
DEADLINE_SECS = 60.0
MODES = ("consolidated", "sharded")

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype, tuple[str | None, ...]]] = {
    "even": ((8, 16), torch.float32, ("a", "b")),
    "uneven": ((7, 5), torch.bfloat16, ("a", "b")),
    "swapped": ((6, 9), torch.float32, ("b", "a")),
    "partial": ((5, 6), torch.bfloat16, (None, "b")),
    "thin": ((2, 3), torch.int32, ("a", None)),
    "vector": ((13,), torch.float32, ("b",)),
    "cube": ((3, 4, 5), torch.float32, (None, "a", "b")),
    "replicated": ((4, 4), torch.float32, (None, None)),
}


def start(case: str, *args: str, **environment: str) -> subprocess.Popen[str]:
    settings = {"PJRT_DEVICE": "CPU", "RES_OPTIONS": "timeout:1 attempts:1", **environment}
    return subprocess.Popen(
        [sys.executable, __file__, case, *args],
        env={**os.environ, **settings},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(*processes: subprocess.Popen[str]) -> list[Any]:
    """Return what each case printed last."""
    outputs = []
    try:
        for process in processes:
            stdout, stderr = process.communicate(timeout=CASE_SECS)
            assert process.returncode == 0, f"{stdout[-1000:]}\n{stderr[-4000:]}"
            outputs.append(json.loads(stdout.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return outputs


def run(case: str, *args: str, devices: int = 1) -> Any:
    return finish(start(case, *args, CPU_NUM_DEVICES=str(devices)))[0]


def expected(name: str) -> torch.Tensor:
    shape, dtype, _ = SHAPES[name]
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32).reshape(shape) - 3 * len(name)).to(dtype)


def spmd_mesh(shape: tuple[int, int]) -> Any:
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    xr.use_spmd()
    return xs.Mesh(np.arange(shape[0] * shape[1]), shape, ("a", "b"))


def make_state(mesh: Any, *, zeros: bool) -> dict[str, Any]:
    """Return sharded leaves, a module with sharded parameters, its optimizer, and values of the host."""
    import torch_xla
    import torch_xla.distributed.spmd as xs

    device = torch_xla.device()
    leaves: dict[str, Any] = {}
    for name, (_, _, spec) in SHAPES.items():
        data = torch.zeros_like(expected(name)) if zeros else expected(name)
        leaves[name] = data.to(device)
        xs.mark_sharding(leaves[name], mesh, spec)
    torch.manual_seed(1 if zeros else 0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3)).to(device)
    xs.mark_sharding(model[0].weight, mesh, ("b", "a"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5 if zeros else 0.01)
    return {
        "leaves": leaves,
        "model": model,
        "optimizer": optimizer,
        "lazy": torch.zeros(4, 4, device=device) if zeros else torch.ones(4, 4, device=device),
        "host": torch.zeros(5) if zeros else torch.arange(5.0),
        "count": 0 if zeros else 41,
    }


def train(state: dict[str, Any], num_steps: int, first: int) -> list[float]:
    import torch_xla

    device = torch_xla.device()
    losses = []
    for step in range(first, first + num_steps):
        batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).to(device)
        loss = state["model"](batch).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def check_leaves(leaves: dict[str, Any]) -> None:
    for name, leaf in leaves.items():
        actual = leaf.cpu()
        assert actual.dtype == SHAPES[name][1], name
        assert torch.equal(actual, expected(name)), (name, actual, expected(name))


# -- one process, SPMD ----------------------------------------------------------------------------------------------


def case_save(root: str, rows: str, columns: str) -> Any:
    from safepoint.manager import CheckpointManager

    state = make_state(spmd_mesh((int(rows), int(columns))), zeros=False)
    train(state, 3, 0)
    state["lazy"] = state["lazy"] * 2 + 1  # pending until the manager cuts the graph
    for mode in MODES:
        with CheckpointManager(f"{root}/{mode}", mode=mode) as manager:  # type: ignore[arg-type]
            assert manager.save(3, state, blocking=False).mode == mode
    check_leaves(state["leaves"])  # the live state is as it was
    return train(state, 3, 3)


def case_restore(root: str, rows: str, columns: str) -> Any:
    import torch_xla

    from safepoint.manager import CheckpointManager

    mesh = spmd_mesh((int(rows), int(columns)))
    losses = []
    for mode in MODES:
        state = make_state(mesh, zeros=True)
        specs = {name: torch_xla._XLAC._get_xla_sharding_spec(leaf) for name, leaf in state["leaves"].items()}
        with CheckpointManager(f"{root}/{mode}") as manager:
            restored = manager.restore_latest(state)
        assert restored is not None
        assert restored.step == 3
        check_leaves(state["leaves"])
        for name, leaf in state["leaves"].items():
            assert torch_xla._XLAC._get_xla_sharding_spec(leaf) == specs[name], name
        assert state["lazy"].cpu().tolist() == [[3.0] * 4] * 4
        assert torch.equal(state["host"], torch.arange(5.0))
        assert state["count"] == 41
        assert state["optimizer"].param_groups[0]["lr"] == 0.01
        moments = state["optimizer"].state[state["model"][0].weight]["exp_avg"]
        assert torch_xla._XLAC._get_xla_sharding_spec(moments) == torch_xla._XLAC._get_xla_sharding_spec(
            state["model"][0].weight
        )
        losses.append(train(state, 3, 3))
    return losses


def case_restore_plain(root: str) -> Any:
    """Restore without XLA in the process."""
    from safepoint.manager import CheckpointManager

    for mode in MODES:
        leaves = {name: torch.zeros_like(expected(name)) for name in SHAPES}
        with CheckpointManager(f"{root}/{mode}") as manager:
            manager.restore(3, {"leaves": leaves}, items=["leaves"])
        for name, leaf in leaves.items():
            assert torch.equal(leaf, expected(name)), name
    return "torch_xla" in sys.modules


@pytest.mark.parametrize(
    ("saved", "restored"), [((4, 2), (2, 4)), ((4, 2), (2, 2)), ((2, 2), (8, 1)), ((1, 4), (1, 4))]
)
def test_one_mesh_restores_what_another_saved_in_both_modes(
    tmp_path: Path, saved: tuple[int, int], restored: tuple[int, int]
) -> None:
    went_on = run("save", str(tmp_path), *map(str, saved), devices=saved[0] * saved[1])
    for losses in run("restore", str(tmp_path), *map(str, restored), devices=restored[0] * restored[1]):
        if saved == restored:
            assert losses == went_on
        else:  # sums are taken in another order
            assert losses == pytest.approx(went_on, rel=1e-5)
    assert run("restore_plain", str(tmp_path)) is False


def save_step(manager: Any, step: int) -> None:
    manager.save(step, {"x": step})


def case_random(root: str) -> Any:
    """Draw on the device in a run that saves, and in one that does not."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    from safepoint.manager import CheckpointManager

    def draw(save: Callable[[int], None]) -> list[float]:
        xm.set_rng_state(7)
        drawn = []
        for step in range(6):
            value = torch.nn.functional.dropout(torch.ones(64, device=torch_xla.device())).sum()
            torch_xla.sync()
            drawn.append(value.item())
            save(step)
        return drawn

    with CheckpointManager(root) as manager:
        return [draw(lambda _: None), draw(lambda step: save_step(manager, step))]


def test_a_run_that_saves_draws_the_same_numbers_as_one_that_does_not(tmp_path: Path) -> None:
    without, with_saves = run("random", str(tmp_path))
    assert len(set(without)) > 1
    assert with_saves == without


# -- the order of things --------------------------------------------------------------------------------------------


def record(events: list[tuple[str, float]], slow_sync_secs: float) -> None:
    """Record, with the time of all processes of this machine, when what happens first and last matters."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    from safepoint.manager import sources

    def note(name: str, call: Callable[..., Any], delay_secs: float = 0.0) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            time.sleep(delay_secs)
            events.append((f"{name}({', '.join(f'{key}={value}' for key, value in kwargs.items())})", time.monotonic()))
            return call(*args, **kwargs)

        return recorded

    torch_xla.sync = note("sync", torch_xla.sync, slow_sync_secs)
    xm.wait_device_ops = note("wait_device_ops", xm.wait_device_ops)
    sources.prefetch = note("read", sources.prefetch)
    xlac = torch_xla._XLAC
    for name in ("_xla_get_cpu_tensors", "_get_local_shards", "_get_local_shard_replica_and_indices"):
        setattr(xlac, name, note("inspect" if name.endswith("indices") else "read", getattr(xlac, name)))


def own_half(rank: int, count: int) -> None:
    """Let this process hold its part of each sharded leaf only.

    On several hosts each would. Here every process has a mesh of its own over the whole of it, so the test assigns
    the regions; everything after that is real.
    """
    from safepoint.manager import planning

    flatten = planning.flatten

    def flatten_own(*args: Any, **kwargs: Any) -> Any:
        flat = flatten(*args, **kwargs)
        for leaf in flat.arrays.values():
            if leaf.spec.kind == "xla_sharded" and len(leaf.spec.regions) >= count:
                leaf.spec = replace(leaf.spec, regions=leaf.spec.regions[rank::count])
        return flat

    planning.flatten = flatten_own


def case_order(root: str, rank: str, count: str, port: str) -> Any:
    import torch.distributed as dist

    from safepoint.manager import CheckpointManager

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(count))
    state = make_state(spmd_mesh((2, 2)), zeros=False)
    own_half(int(rank), int(count))
    recorded: dict[str, list[tuple[str, float]]] = {}
    for mode in MODES:
        with CheckpointManager(f"{root}/{mode}", mode=mode, deadline_secs=DEADLINE_SECS) as manager:  # type: ignore[arg-type]
            events: list[tuple[str, float]] = []
            manager._coordinator.on_event = lambda name, log=events: log.append((name, time.monotonic()))
            if mode == MODES[0]:
                record(shared_events := [], slow_sync_secs=0.7 * int(rank))
            shared_events.clear()
            state["lazy"] = state["lazy"] + 1
            manager.save(1, state)
            recorded[mode] = sorted(events + shared_events, key=lambda event: event[1])
    dist.destroy_process_group()
    return recorded


def test_the_graph_is_cut_and_all_have_met_before_anything_is_read_in_both_modes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    count = 2
    processes = [
        start("order", str(tmp_path), str(rank), str(count), port, CPU_NUM_DEVICES="4") for rank in range(count)
    ]
    recorded = finish(*processes)
    for mode in MODES:
        orders = [[name for name, _ in process[mode]] for process in recorded]
        cut_at = []
        for process, order in zip(recorded, orders, strict=True):
            assert order[:4] == ["sync_devices", "sync(wait=True)", "wait_device_ops()", "meet:save-begin"], order
            assert order.index("meet:save-begin") < order.index("inspect()") < order.index("meet:save-plan"), order
            meetings = [name for name in order if name.startswith("meet:save-")]
            assert meetings == ["meet:save-begin", "meet:save-plan", "meet:save-written", "meet:save-committed"]
            cut_at.append(max(at for name, at in process[mode] if name == "wait_device_ops()"))
        for process, order in zip(recorded, orders, strict=True):
            assert "read()" in order, order
            first_look = min(at for name, at in process[mode] if name in ("read()", "inspect()"))
            assert first_look > max(cut_at), (mode, order)  # process 1 cuts its graph 0.7 s later than process 0
            assert order.index("read()") > order.index("meet:save-plan")
    # What the two saved, each with a mesh of its own, restores on one.
    files = run("restore_leaves", str(tmp_path), devices=4)
    assert files == ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]


def case_restore_leaves(root: str) -> Any:
    from safepoint.manager import CheckpointManager

    mesh = spmd_mesh((1, 4))
    for mode in MODES:
        state = make_state(mesh, zeros=True)
        with CheckpointManager(f"{root}/{mode}") as manager:
            manager.restore_latest(state, items=["leaves"])
        check_leaves(state["leaves"])
    return sorted(path.name for path in Path(root, "sharded", "1").glob("*.safetensors"))


# -- replicas that are threads of one process -----------------------------------------------------------------------


class Exchange:
    """Stands in for `xm.rendezvous`: its collectives deadlock between CPU replicas on few cores and abort."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=60)
        self._brought: dict[int, bytes] = {}

    def __call__(self, tag: str, payload: bytes = b"", replicas: Any = ()) -> list[bytes]:
        import torch_xla.runtime as xr

        del tag, replicas
        self._brought[xr.global_ordinal()] = payload
        self._barrier.wait()
        gathered = [self._brought[ordinal] for ordinal in sorted(self._brought)]
        self._barrier.wait()
        return gathered


EXCHANGE = Exchange(int(os.environ.get("CPU_NUM_DEVICES", "1")))


def replica(index: int, root: str) -> None:
    import torch_xla
    import torch_xla.core.xla_model as xm

    from safepoint.manager import CheckpointManager

    xm.rendezvous = EXCHANGE
    results = {}
    weight = torch.arange(12.0).reshape(3, 4).to(torch_xla.device()) + 1  # pending until the manager cuts the graph
    for mode in MODES:
        with CheckpointManager(f"{root}/{mode}", mode=mode, deadline_secs=30) as manager:  # type: ignore[arg-type]
            result = manager.save(1, {"weight": weight})
            target = {"weight": torch.zeros(3, 4, device=torch_xla.device())}
            manager.restore_latest(target)
            same = torch.equal(target["weight"].cpu(), torch.arange(12.0).reshape(3, 4) + 1)
        results[mode] = [result.mode, result.num_bytes, same]
    Path(root, f"told-{index}.json").write_text(json.dumps(results))


def case_replicas(root: str) -> Any:
    import torch_xla.distributed.xla_multiprocessing as xmp

    xmp.spawn(replica, args=(root,))
    return [json.loads(told.read_text()) for told in sorted(Path(root).glob("told-*.json"))]


def test_replica_threads_of_one_process_save_once_and_restore(tmp_path: Path) -> None:
    told = run("replicas", str(tmp_path), devices=2)
    assert len(told) == 2
    for mode in MODES:
        assert [results[mode][0] for results in told] == [mode, mode]
        assert sum(results[mode][1] for results in told) == 48  # one writer, not two
        assert all(results[mode][2] for results in told)


if __name__ == "__main__":
    print(json.dumps(globals()[f"case_{sys.argv[1]}"](*sys.argv[2:])))  # noqa: T201 - how a case answers
    sys.stdout.flush()
    os._exit(0)  # XLA's threads end with the process, not before it
