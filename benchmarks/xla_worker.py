"""The process of the suite `xla`."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.ours import KEEPS, OpenRoot
from benchmarks.states import num_bytes_of, transformer_state
from safepoint.manager.adapters import prefetch, wrap_array
from safepoint.manager.sources import batches, region_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def main(directory: Path, state_bytes: int, rounds: int) -> None:
    """Race, and print what was measured."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla

    device = torch_xla.device()
    host = transformer_state(state_bytes)
    state = {name: tensor.to(device) for name, tensor in host.items()}
    torch_xla.sync(wait=True)
    root = OpenRoot(directory / "ours")

    def one_by_one() -> None:
        for tensor in state.values():
            tensor.cpu()

    def ours() -> None:
        root.save(state)
        root.forget()

    runs: dict[str, tuple[Callable[[], None], str]] = {
        "staging in batches": (lambda: _stage(state), "nothing is written"),
        ".cpu() one by one": (one_by_one, "nothing is written"),
        "safepoint, whole save": (ours, KEEPS),
    }
    absent = {}
    try:
        runs["torch_xla.experimental.distributed_checkpoint"] = (_xla_manager(directory, state), "files are synced")
    except Exception as error:  # noqa: BLE001 - experimental: whatever it needs and lacks
        absent["torch_xla.experimental.distributed_checkpoint"] = f"{type(error).__name__}: {error}"
    secs: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, (run, _) in runs.items():
            started = time.perf_counter()
            run()
            if number:
                secs[name].append(time.perf_counter() - started)
    root.close()
    found = {
        "secs": secs,
        "num_bytes": num_bytes_of(host),
        "keeps": {name: keeps for name, (_, keeps) in runs.items()},
        "absent": absent,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def _stage(state: dict[str, torch.Tensor]) -> None:
    leaves = [leaf for name, tensor in state.items() if (leaf := wrap_array(tensor, (name,))) is not None]
    for batch in batches(leaves, lambda leaf: region_bytes(leaf.spec, leaf.spec.regions[0])):
        prefetch(batch)
        for leaf in batch:
            leaf.read(leaf.spec.regions[0])


def _xla_manager(directory: Path, state: dict[str, torch.Tensor]) -> Callable[[], None]:
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager

    dist: Any = importlib.import_module("torch.distributed")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    path = directory / "theirs"
    manager = CheckpointManager(str(path), save_interval=1)
    step = 0

    def run() -> None:
        nonlocal step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            manager.save(step, {"model": state}, force=True)
        shutil.rmtree(path / str(step))
        step += 1

    run()
    return run


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
