"""Lightning on two processes: the Trainer with DDP and with FSDP2, Fabric with both ways of saving."""

# mypy: ignore-errors
# ruff: noqa: PLC0415, TID251 - a case imports what it needs in its own process, and sets up groups

from __future__ import annotations

import importlib.util
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import PoolView

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)
if importlib.util.find_spec("torch_xla") is not None:
    pytest.skip("once is enough; with torch_xla: tests/xla/test_lightning_xla.py", allow_module_level=True)

CASE_SECS = 110.0  # a member imports lightning first


def choices_of(strategy: str) -> dict[str, Any]:
    """Return what makes two processes of the pool one Trainer, which starts none itself."""
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

    if strategy == "ddp":
        made = DDPStrategy(process_group_backend="gloo", cluster_environment=LightningEnvironment())
    else:
        made = ModelParallelStrategy(process_group_backend="gloo")
    return {"strategy": made, "devices": 2, "max_epochs": 25}  # the steps take milliseconds, the agreement 0.2 s


def sharded() -> type:
    from torch.distributed.fsdp import fully_shard

    from support import lightning_runs

    class Sharded(lightning_runs.Told):
        def configure_model(self) -> None:
            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    return Sharded


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_signal_to_one_process_ends_all_at_one_step_from_which_they_go_on_bit_for_bit(
    strategy: str, pool2: PoolView, tmp_path: Path
) -> None:
    ended = pool2.run(case_preempted, strategy, str(tmp_path), timeout_secs=CASE_SECS)

    assert [status for status, *_ in ended] == [143, 143]
    assert len({step for _, step, *_ in ended}) == 1
    for _, step, again, whole in ended:
        assert 7 <= step < 150
        assert again == [told for told in whole if told[0] >= step]


def case_preempted(rank: int, strategy: str, root: str) -> tuple[Any, ...]:
    from support import lightning_runs

    kind = sharded() if strategy == "fsdp2" else lightning_runs.Told
    whole, *_ = lightning_runs.fit(None, kind=kind, **choices_of(strategy))
    status = None
    try:
        lightning_runs.fit(
            root,
            kind=kind,
            told={"ends_at": 7 if rank == 1 else -1, "ends_by": signal.SIGTERM},
            safepoint={"save_after_validation": False},
            **choices_of(strategy),
        )
    except SystemExit as error:
        status = error.code
    again, _, callback = lightning_runs.fit(root, kind=kind, **choices_of(strategy))
    return status, callback.restored.step, again.losses, whole.losses


def test_fabric_writes_on_global_zero_only_and_nobody_runs_ahead(pool2: PoolView, tmp_path: Path) -> None:
    results = pool2.run(case_fabric, str(tmp_path), timeout_secs=CASE_SECS)

    assert [calls for calls, *_ in results] == [["save", "load"], ["load"]]
    assert all(was_committed for _, was_committed, *_ in results)
    assert all(same and left == {} for *_, same, left in results)


def case_fabric(rank: int, root: str) -> tuple[Any, ...]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import DDPStrategy

    from safepoint.manager.integrations.lightning import SafepointCheckpointIO

    calls: list[str] = []

    class Noted(SafepointCheckpointIO):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            calls.append("save")
            super().save_checkpoint(*args, **kwargs)

        def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            calls.append("load")
            return super().load_checkpoint(*args, **kwargs)

    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=LightningEnvironment())
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[Noted()])
    fabric.launch()
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.ones(2, 4) * rank).sum())
    optimizer.step()
    path = f"{root}/run.ckpt"
    state = {"model": model, "optimizer": optimizer, "seen": 7}

    fabric.save(path, state)
    was_committed = os.path.exists(f"{path}/0/commit.json")

    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    state["seen"] = 0
    left = fabric.load(path, state)
    return calls, was_committed, torch.equal(model.weight, weight) and state["seen"] == 7, left


def test_a_sharded_model_of_fabric_is_saved_by_a_manager(pool2: PoolView, tmp_path: Path) -> None:
    assert pool2.run(case_sharded_fabric, str(tmp_path), timeout_secs=CASE_SECS) == [("sharded", True)] * 2


def case_sharded_fabric(rank: int, root: str) -> tuple[str | None, bool]:
    del rank
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from safepoint.manager import CheckpointManager

    def shard(model: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(shard, process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup(torch.nn.Linear(4, 6))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

    def step() -> float:
        loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        return loss.item()

    step()
    state = {"model": model.module, "optimizer": optimizer.optimizer}  # what is inside Fabric's wrappers
    with CheckpointManager(root, mode="sharded") as manager:
        result = manager.save(1, state)
        expected = [step() for _ in range(3)]
        manager.restore(1, state)
        return result.mode, [step() for _ in range(3)] == expected
