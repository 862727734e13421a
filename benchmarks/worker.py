"""One process of the suite `processes`: saves and restores its part of a sharded state, in step with the others."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.limits import RawFile
from benchmarks.ours import KEEPS
from benchmarks.settings import drop_from_cache
from benchmarks.states import num_bytes_of, transformer_state
from safepoint.manager import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Callable


dist: Any = importlib.import_module("torch.distributed")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")


def main(directory: Path, count: int, state_bytes: int, rounds: int, restore_rounds: int, rank: int) -> None:
    """Race, and let process 0 print what was measured."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    mesh = DeviceMesh("cpu", list(range(count)))
    state = transformer_state(state_bytes)
    num_bytes = num_bytes_of(state)
    sharded: dict[str, Any] = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}
    replicated = {name: tensor for name, tensor in state.items() if name.startswith(("blocks.0", "blocks.1."))}
    del state
    manager = CheckpointManager(directory / "ours", mode="sharded")
    raw = RawFile(num_bytes // count)
    step = 0

    def ours() -> None:
        nonlocal step
        step += 1
        manager.save(step, {"model": sharded})

    raw_path = directory / f"raw-{rank}"
    dcp_path = directory / "dcp"
    runs: dict[str, tuple[Callable[[], object], Callable[[], Path], str]] = {
        "safepoint": (ours, lambda: directory / "ours" / str(step), KEEPS),
        "raw O_DIRECT + fsync": (
            lambda: raw.write(raw_path, flags=os.O_DIRECT),
            lambda: raw_path,
            "files are synced; no digests",
        ),
        "DCP": (lambda: _dcp_save(sharded, dcp_path), lambda: dcp_path, "files are synced, directories are not"),
    }
    secs: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (run, path, _) in runs.items():
            dist.barrier()
            started = time.perf_counter()
            run()
            dist.barrier()
            if number:
                secs[name].append(time.perf_counter() - started)
            _remove(path(), mine=rank == 0 or name.startswith("raw"))
    restores, device_bytes = _restores(manager, sharded, directory, restore_rounds, rank)
    result = manager.save(step + 1, {"model": replicated})
    largest = max(tensor.numel() * 4 for tensor in replicated.values())
    shares: list[Any] = [None] * count
    dist.all_gather_object(shares, result.num_bytes)
    manager.close()
    if rank == 0:
        found = {
            "secs": secs,
            "num_bytes": num_bytes,
            "restores": restores,
            "device_bytes": device_bytes / num_bytes,
            "unevenness": (max(shares) - min(shares)) / largest,
            "keeps": {name: keeps for name, (_, _, keeps) in runs.items()},
        }
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def _restores(
    manager: CheckpointManager, sharded: dict[str, Any], directory: Path, rounds: int, rank: int
) -> tuple[dict[str, dict[str, list[float]]], float]:
    """Race restores onto the saved shards, onto others, and whole on every process.

    Returns:
        Seconds by title and contender; and the bytes that all processes together had from the device in a cold restore
        of the whole state by each.
    """
    step, path = 1 << 20, directory / "dcp"
    manager.save(step, {"model": sharded})
    dist.barrier()
    if rounds:
        _dcp_save(sharded, path)
    mesh = next(iter(sharded.values())).device_mesh
    last = {name: Shard(tensor.ndim - 1) for name, tensor in sharded.items()}
    whole = {name: torch.zeros(tensor.shape) for name, tensor in sharded.items()}
    targets: dict[str, dict[str, Any]] = {
        "onto the same shards": {name: torch.zeros_like(tensor) for name, tensor in sharded.items()},
        "onto shards of the last dimension": {
            name: distribute_tensor(whole[name], mesh, [placement]) for name, placement in last.items()
        },
        "whole on every process": whole,
    }
    found: dict[str, dict[str, list[float]]] = {}
    for title, target in targets.items() if rounds else ():
        runs: dict[str, Callable[[], object]] = {
            "safepoint": functools.partial(manager.restore, step, {"model": target}),
            "DCP": functools.partial(_dcp_load, target, path),
        }
        found[title] = {name: [_timed(run) for _ in range(rounds + 1)][1:] for name, run in runs.items()}
    if rank == 0:
        drop_from_cache(directory / "ours")
    dist.barrier()
    before = _device_bytes()
    manager.restore(step, {"model": whole})
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, _device_bytes() - before)
    if rounds:
        _remove(path, mine=rank == 0)
    return found, sum(shares)


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - started


def _device_bytes() -> int:
    """Return the bytes that this process had from block devices; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


def _dcp_load(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.FileSystemReader(path))


def _dcp_save(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path, thread_count=2))


def _remove(path: Path, *, mine: bool) -> None:
    dist.barrier()
    if mine:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    dist.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
