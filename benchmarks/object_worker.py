"""One contender, one round, in a process of its own, so that no peak of memory hides in what another left behind.

Prints what was measured as JSON. Reading back is checked bit by bit, outside the clock.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.measuring import Contender, Sample, measure_once
from benchmarks.object_peers import CLIENTS

if TYPE_CHECKING:
    from collections.abc import Callable

PART_BYTES = 64 << 20


def main(name: str, url: str, num_bytes: int) -> None:
    """Store and read back `num_bytes`."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    run = _checkpoint if name in CHECKPOINTS else _files
    samples = run(name, url, num_bytes)
    sys.stdout.write(json.dumps({kind: asdict(sample) for kind, sample in samples.items()}) + "\n")


def _files(name: str, url: str, num_bytes: int) -> dict[str, Sample]:
    generator = np.random.default_rng(0)
    parts = [generator.integers(0, 256, PART_BYTES, dtype=np.uint8) for _ in range(max(1, num_bytes // PART_BYTES))]
    small = [np.arange(1000, dtype=np.uint8)]
    warm = CLIENTS[name](f"{url}/warm")
    warm.put(small)
    warm.get(small)
    client = CLIENTS[name](f"{url}/parts")
    target = [np.ones_like(part) for part in parts]
    put = measure_once(Contender(name=name, run=lambda: client.put(parts)))
    get = measure_once(Contender(name=name, run=lambda: client.get(target)))
    _check(all((a == b).all() for a, b in zip(parts, target, strict=True)))
    return {"put": put, "get": get}


def _checkpoint(name: str, url: str, num_bytes: int) -> dict[str, Sample]:
    from benchmarks.states import transformer_state, zeros_like

    state = transformer_state(num_bytes)
    small = transformer_state(1 << 20)
    save, load = CHECKPOINTS[name](url)
    save(0, small)
    load(0, zeros_like(small))
    target = zeros_like(state)
    put = measure_once(Contender(name=name, run=lambda: save(1, state)))
    get = measure_once(Contender(name=name, run=lambda: load(1, target)))
    _check(all((target[key] == tensor).all() for key, tensor in state.items()))
    return {"put": put, "get": get}


def _manager(url: str) -> tuple[Callable[[int, Any], None], Callable[[int, Any], None]]:
    from safepoint.manager import CheckpointManager

    manager = CheckpointManager(f"{url}/ours")

    def save(step: int, state: Any) -> None:
        manager.save(step, {"model": state})

    def load(step: int, state: Any) -> None:
        manager.restore(step, {"model": state})

    return save, load


def _dcp(url: str) -> tuple[Callable[[int, Any], None], Callable[[int, Any], None]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

    def save(step: int, state: Any) -> None:
        dcp.save(state, storage_writer=FsspecWriter(f"{url}/dcp/{step}", thread_count=8), no_dist=True)

    def load(step: int, state: Any) -> None:
        dcp.load(state, storage_reader=FsspecReader(f"{url}/dcp/{step}"), no_dist=True)

    return save, load


CHECKPOINTS: dict[str, Callable[[str], tuple[Callable[[int, Any], None], Callable[[int, Any], None]]]] = {
    "safepoint": _manager,
    "DCP through fsspec": _dcp,
}


def _check(same: bool) -> None:  # noqa: FBT001 - one fact
    if not same:
        raise SystemExit("what came back is not what was stored")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
