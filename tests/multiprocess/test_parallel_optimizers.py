"""Training goes on as if it had not stopped: FSDP2, DDP and torch's state-dict conventions, on any number of processes.

Losses and learning rates of the next steps are compared with those of the run that was saved. The data is the same on
each process, and numbers of processes are powers of two, so that gradients are equal bit for bit.
"""

# ruff: noqa: PLC0415 - a case imports torch.distributed in its own process

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import ProcessPool

DEADLINE_SECS = 20.0


class Net(torch.nn.Module):
    """Has a parameter that never gets a gradient, unless `uses_all` is set."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.uses_all = False
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Linear(6, 10)
        self.second = torch.nn.Linear(10, 7)
        self.unused = torch.nn.Parameter(torch.zeros(5))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.first(x).relu())
        return out + self.unused.sum() if self.uses_all else out


def make_fsdp(seed: int) -> torch.nn.Module:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Net(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_ddp(seed: int) -> torch.nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(Net(seed), find_unused_parameters=True)


def make_plain(seed: int) -> torch.nn.Module:
    return Net(seed)


MODELS = {"fsdp": make_fsdp, "ddp": make_ddp, "plain": make_plain}


def inner(model: torch.nn.Module) -> torch.nn.Module:
    return getattr(model, "module", model)


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    named = list(inner(model).named_parameters())
    if name == "sgd":
        return torch.optim.SGD(named, lr=0.01, momentum=0.9)
    groups: list[dict[str, Any]] = [{"params": named[:2]}, {"params": named[2:], "lr": 0.03, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, foreach=name == "foreach")


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: range) -> list[float]:
    told = []
    for n in steps:
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(n))
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        told += [float(loss.detach()), *(group["lr"] for group in optimizer.param_groups)]
    return told


def run(
    _rank: int, root: str, kind: str, name: str, mode: Any, form: str, action: str
) -> tuple[list[float], dict[str, str]]:
    torch.manual_seed(1)
    saves = action == "save"
    model = MODELS[kind](0 if saves else 5)
    # torch's own set_state_dict raises KeyError for a parameter without state (pytorch#126881).
    inner(model).uses_all = form == "app"  # type: ignore[assignment]
    optimizer = make_optimizer(name, model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    state = FORMS[form](model, optimizer)
    state["scheduler"] = scheduler
    with CheckpointManager(root, mode=mode, deadline_secs=DEADLINE_SECS) as manager:
        if saves:
            train(model, optimizer, scheduler, range(3))
            manager.save(3, {**FORMS[form](model, optimizer), "scheduler": scheduler})
        else:
            assert manager.restore_latest(state) is not None
            if form == "state dicts":
                from torch.distributed.checkpoint.state_dict import set_state_dict

                set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    kinds = {
        key: type(value).__name__
        for key, value in optimizer.state[inner(model).second.weight].items()  # type: ignore[index,union-attr]
        if isinstance(value, torch.Tensor)
    }
    return train(model, optimizer, scheduler, range(3, 7)), kinds


def objects(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": inner(model), "optimizer": optimizer}


def state_dicts(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


class AppState:
    """The wrapper that torch's tutorial on distributed checkpoints shows."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return state_dicts(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


FORMS: dict[str, Any] = {
    "objects": objects,
    "state dicts": state_dicts,
    "app": lambda model, optimizer: {"app": AppState(model, optimizer)},
}


def check(
    pool: ProcessPool, root: Path, saved: tuple[str, int], restored: tuple[str, int], name: str, mode: str, form: str
) -> list[dict[str, str]]:
    one = pool.run(run, str(root), saved[0], name, mode, form, "save", num_processes=saved[1])
    other = pool.run(run, str(root), restored[0], name, mode, form, "restore", num_processes=restored[1])
    for told, _ in (*one[1:], *other):
        assert told == one[0][0]
    return [kinds for _, kinds in other]


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
@pytest.mark.parametrize("name", ["adamw", "foreach", "sgd"])
def test_a_fresh_optimizer_of_fsdp_goes_on_on_another_number_of_processes(
    process_pool: ProcessPool, tmp_path: Path, mode: str, name: str
) -> None:
    for kinds in check(process_pool, tmp_path, ("fsdp", 2), ("fsdp", 4), name, mode, "objects"):
        assert kinds.pop("step", "Tensor") == "Tensor"
        assert set(kinds.values()) == {"DTensor"}
    again = process_pool.run(run, str(tmp_path), "fsdp", name, mode, "objects", "restore", num_processes=1)
    assert (
        again[0][0]
        == process_pool.run(run, str(tmp_path), "fsdp", name, mode, "objects", "restore", num_processes=2)[0][0]
    )


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
@pytest.mark.parametrize("others", [("ddp", 4), ("plain", 1), ("fsdp", 2)])
def test_what_ddp_saved_goes_on_under_anything(
    process_pool: ProcessPool, tmp_path: Path, mode: str, others: tuple[str, int]
) -> None:
    check(process_pool, tmp_path, ("ddp", 2), others, "adamw", mode, "objects")


def test_what_fsdp_saved_goes_on_in_one_plain_process(process_pool: ProcessPool, tmp_path: Path) -> None:
    check(process_pool, tmp_path, ("fsdp", 4), ("plain", 1), "adamw", "sharded", "objects")


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
@pytest.mark.parametrize("form", ["state dicts", "app"])
def test_state_dicts_of_torch_go_on_on_another_number_of_processes(
    process_pool: ProcessPool, tmp_path: Path, mode: str, form: str
) -> None:
    check(process_pool, tmp_path, ("fsdp", 2), ("fsdp", 4), "adamw", mode, form)
