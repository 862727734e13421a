"""What torch_xla itself wrote, read into tensors that are sharded over a mesh of XLA's CPU devices.

In a process of its own: the number of devices is fixed when XLA starts.
"""

# ruff: noqa: PLC0415 - the case imports XLA in its own process, and this file is read where XLA is not installed

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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
Layout = dict[str, tuple[str | tuple[str, ...] | None, ...]]
SHARED = Path(__file__).parent.parent / "compat" / "foreign"


def test_what_torch_xla_wrote_is_restored_onto_another_mesh(tmp_path: Path) -> None:
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8"}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def leaves() -> dict[str, torch.Tensor]:
    return {
        "even": torch.arange(64.0).reshape(16, 4),
        "uneven": torch.arange(35).reshape(7, 5).to(torch.bfloat16),
        "vector": torch.arange(13, dtype=torch.int32),
        "replicated": torch.arange(3.0),
    }


def sharded(make: Callable[[torch.Tensor], torch.Tensor], mesh: Any, layout: Layout) -> dict[str, Any]:
    """Return the leaves on the devices of a mesh."""
    import torch_xla
    import torch_xla.distributed.spmd as xs

    found = {name: make(value).to(torch_xla.device()) for name, value in leaves().items()}
    for name, axes in layout.items():
        xs.mark_sharding(found[name], mesh, axes)
    return found


def main(folder: Path) -> None:
    import numpy as np
    import torch.distributed as dist
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints
    from torch_xla.experimental.distributed_checkpoint import CheckpointManager as Theirs

    from safepoint.manager import Cast, convert, restore_foreign
    from safepoint.manager.errors import CorruptDataError

    xr.use_spmd()
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    mesh = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
    other = xs.Mesh(np.arange(8)[::-1].copy(), (2, 4), ("a", "b"))
    layout: Layout = {"even": ("a", "b"), "uneven": ("a", "b"), "vector": (("a", "b"),)}
    turned: Layout = {"even": ("b", "a"), "uneven": (None, "a"), "vector": ("a",)}
    state = {"leaves": sharded(torch.clone, mesh, layout), "epoch": 3}
    theirs = Theirs(str(folder / "theirs"), save_interval=1, chkpt_on_preemption=False)
    assert theirs.save(12, state, force=True)
    convert(folder / "theirs", folder / "ours")  # by its step
    xm.save(leaves(), folder / "xm.pt")

    def check(target: dict[str, Any]) -> None:
        torch_xla.sync(wait=True)
        for name, value in leaves().items():
            assert torch.equal(target[name].cpu(), value), name
        for name in turned:
            assert xs.wrap_if_sharded(target[name]).sharding_type != xs.ShardingType.REPLICATED, name

    target = {"leaves": sharded(torch.zeros_like, other, turned), "epoch": 0}
    restore_foreign(folder / "theirs" / "12", target)
    check(target["leaves"])  # type: ignore[arg-type]
    assert target["epoch"] == 3
    target = {"leaves": sharded(torch.zeros_like, other, turned)}
    restore_foreign(folder / "xm.pt", target["leaves"])  # type: ignore[arg-type]
    check(target["leaves"])  # type: ignore[arg-type]

    # What their planner leaves out, without a word: a tensor that is replicated over one axis.
    assert theirs.save(13, {"lost": sharded(torch.clone, mesh, {"even": ("a", None)})["even"], "n": 5}, force=True)
    for take_all in (restore_foreign, lambda path: convert(path, folder / "lost")):
        with pytest.raises(CorruptDataError, match="has no data") as caught:
            take_all(folder / "theirs" / "13")
        assert caught.value.leaf == "lost"
    restored = {"n": 0}
    restore_foreign(folder / "theirs" / "13", restored)
    assert restored == {"n": 5}

    # The files of FSDP's ranks, onto a parameter that is sharded another way.
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model = model.to(torch_xla.device())
    xs.mark_sharding(model[0].weight, mesh, (None, "a"))
    restore_foreign(SHARED / "xlafsdp" / "flattened", {"model": model}, items=["model"], adapt=[Cast()])
    torch_xla.sync(wait=True)
    assert torch.equal(model[0].weight.cpu(), torch.arange(15.0).reshape(3, 5) / 8)
    # And as torch_xla itself puts them together.
    for kind in ("flattened", "parameters", "rows"):
        wanted, _ = consolidate_sharded_model_checkpoints(f"{SHARED}/xlafsdp/{kind}/checkpoint", save_model=False)
        found = restore_foreign(SHARED / "xlafsdp" / kind).state["model"]
        assert found.keys() == wanted.keys()
        assert all(
            torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in wanted.items()
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
